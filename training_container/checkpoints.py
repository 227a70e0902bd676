"""Checkpoints on the job's own disk; SageMaker (or its local stand-in) mirrors the folder to S3 and back.

    checkpoints/step-40/{model/…, optimizer.safetensors, random.safetensors, random.json, loop.json, manifest.json}

Files are written in place and fsynced, manifest.json last and by rename: a folder without one does not count. A hidden
folder renamed at the end would be mirrored half written, and come back at every restore.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from microtuning_core.domain.manifest import (
    MANIFEST_NAME,
    CheckpointFile,
    CheckpointManifest,
    newest_first,
    step_folder,
    step_of_folder,
)
from microtuning_core.domain.retention import superfluous
from microtuning_core.domain.spec import CheckpointSpec

from .failures import PlatformFailure
from .paths import sync_folder, write_durably

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: every file its manifest names is there, to the byte."""

    folder: Path
    manifest: CheckpointManifest


def write_checkpoint(
    root: Path,
    step: int,
    fill: Callable[[Path], None],
    describe: Callable[[tuple[CheckpointFile, ...]], CheckpointManifest],
) -> Checkpoint:
    """Write step-<step>: `fill` puts the files there, `describe` makes the manifest of them.

    A folder of that step which is there already loses its manifest first, so that it is never whole with mixed contents.

    Raises:
        PlatformFailure: the disk is full; what was written of this checkpoint is removed, older ones are as they were.
    """
    folder = root / step_folder(step)
    try:
        return _written(root, folder, fill, describe)
    except (OSError, SafetensorError) as error:  # safetensors' own has no number
        if not (getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)):
            raise
        free = shutil.disk_usage(root).free
        remove_checkpoint(folder)
        raise PlatformFailure(
            f"The disk is full: checkpoint {folder.name} could not be written ({free / 1e6:,.0f} MB were free), and older "
            "ones are whole. Lower checkpoint.keep, or take a larger volume."
        ) from error


def _written(
    root: Path,
    folder: Path,
    fill: Callable[[Path], None],
    describe: Callable[[tuple[CheckpointFile, ...]], CheckpointManifest],
) -> Checkpoint:
    remove_checkpoint(folder)
    folder.mkdir(parents=True)
    fill(folder)
    files = tuple(_seal(folder, path) for path in _files(folder))
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    manifest = describe(files)
    write_durably(folder / MANIFEST_NAME, manifest.model_dump_json(indent=1))
    sync_folder(root)
    return Checkpoint(folder, manifest)


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread of its own, and then removes those that need not be kept."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[Checkpoint] | None = None
        self.took_s = 0.0  # to write the last one

    @property
    def is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def begin(
        self,
        root: Path,
        step: int,
        fill: Callable[[Path], None],
        described: CheckpointManifest,
        retention: CheckpointSpec,
    ) -> None:
        """Start to write step-<step> (write_checkpoint). What was begun before must have been taken."""
        assert self._writing is None

        def write() -> Checkpoint:
            began_at_s = time.monotonic()
            checkpoint = write_checkpoint(root, step, fill, lambda files: described.model_copy(update={"files": files}))
            prune(root, retention)
            self.took_s = time.monotonic() - began_at_s
            return checkpoint

        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Until what was begun is written, or could not be."""
        if self._writing is not None:
            wait([self._writing])

    def take(self) -> Checkpoint | None:
        """What has been written since the last call, if anything.

        Raises:
            PlatformFailure: the disk is full. OSError: it is broken otherwise.
        """
        if self._writing is None or not self._writing.done():
            return None
        written, self._writing = self._writing, None
        return written.result()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)


def _seal(folder: Path, path: Path) -> CheckpointFile:
    """Force one file to disk and take its fingerprint."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return CheckpointFile(path=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=file_sha256(path))


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def remove_checkpoint(folder: Path) -> None:
    """The manifest goes first: what is left of an interrupted removal does not count."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def damage_of(folder: Path, manifest: CheckpointManifest) -> str | None:
    """What is wrong with a checkpoint's files; None when all are there, of the right size and content."""
    for file in manifest.files:
        path = folder / file.path
        if not path.is_file():
            return f"{file.path} is missing"
        if path.stat().st_size != file.bytes:
            return f"{file.path} has {path.stat().st_size} bytes instead of {file.bytes}"
        if file_sha256(path) != file.sha256:
            return f"{file.path} has other contents than were saved"
    return None


def read_checkpoint(folder: Path) -> Checkpoint | str:
    """The checkpoint in `folder`, or the reason why there is none."""
    try:
        manifest = CheckpointManifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except OSError:
        return "it has no manifest"
    except ValueError as error:
        return f"its manifest cannot be read ({str(error).splitlines()[0]})"
    if step_of_folder(folder.name) not in (None, manifest.step):
        return f"its manifest is that of step {manifest.step}"
    return damage_of(folder, manifest) or Checkpoint(folder, manifest)


def newest_whole(root: Path, on_damage: Callable[[str, str], None]) -> Checkpoint | None:
    """The whole checkpoint of the highest step; a damaged one is reported (folder name, reason) and passed over."""
    names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    for name in newest_first(names):
        found = read_checkpoint(root / name)
        if isinstance(found, Checkpoint):
            return found
        on_damage(name, found)
    return None


def resume_checkpoint(channel: Path, on_damage: Callable[[str, str], None]) -> Checkpoint | None:
    """What the `resume` channel holds: one checkpoint itself, or a folder of some."""
    if (channel / MANIFEST_NAME).exists():
        found = read_checkpoint(channel)
        if isinstance(found, Checkpoint):
            return found
        on_damage(channel.name, found)
    return newest_whole(channel, on_damage)


def newest_step(root: Path) -> int:
    """Step of the newest checkpoint that has a manifest, unverified; -1 when there is none."""
    names = [path.name for path in root.iterdir() if (path / MANIFEST_NAME).exists()] if root.is_dir() else []
    return max((int(name.removeprefix("step-")) for name in newest_first(names)), default=-1)


def prune(root: Path, retention: CheckpointSpec) -> None:
    """Remove the whole checkpoints that need not be kept, and whatever folder older than a kept one is not whole."""
    names = newest_first(path.name for path in root.iterdir() if path.is_dir())
    manifests = {name: manifest for name in names if (manifest := _manifest_in(root / name)) is not None}
    doomed = {each.step for each in superfluous(list(manifests.values()), retention)}
    newest = max((each.step for each in manifests.values()), default=-1)
    for name in names:
        step = step_of_folder(name)
        torn = name not in manifests and step is not None and step < newest
        if torn or (name in manifests and manifests[name].step in doomed):
            remove_checkpoint(root / name)


def _manifest_in(folder: Path) -> CheckpointManifest | None:
    """None where there is none, or none that can be read: such a folder is no checkpoint."""
    try:
        return CheckpointManifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return None
