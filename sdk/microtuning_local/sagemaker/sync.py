"""Files between S3 and a job's folders: channels in, checkpoints both ways, model and output out.

Checkpoints are mirrored while the job runs. Nothing is ever deleted in S3; names that begin with `.` or end in `.tmp`
are not whole yet; a folder's manifest.json goes last, and only when everything below it went: it is the commit.
"""

from __future__ import annotations

import logging
import tarfile
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from microtuning_local.sagemaker.locations import Location, path_of_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

COMMIT = "manifest.json"
SWEEP_S = 0.5

log = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """What tells one version of a file from the next."""

    size: int
    modified_ns: int
    inode: int


class NothingFound(Exception):
    """A channel names no object at all."""

    def __init__(self, location: Location) -> None:
        super().__init__(location.uri)
        self.location = location


def keys_under(s3: Any, location: Location) -> Iterator[str]:
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=location.bucket, Prefix=location.key):
        yield from (entry["Key"] for entry in page.get("Contents", []))


def download(s3: Any, location: Location, folder: Path, *, share: tuple[int, int] = (0, 1)) -> int:
    """Copy the objects of a prefix into a folder; returns their number. `share` (i, n) takes every n-th from i on."""
    index, count = share
    wanted = [(key, path) for key in keys_under(s3, location) if (path := path_of_key(location.key, key))]
    for key, path in wanted[index::count]:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(location.bucket, key, str(target), Config=one_thread())
    return len(wanted)


def download_channel(s3: Any, location: Location, folder: Path, *, share: tuple[int, int] = (0, 1)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not download(s3, location, folder, share=share):
        raise NothingFound(location)


def one_thread() -> Any:
    """Without s3transfer's own threads: a small file is one request, and a job starts no pool for it."""
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(use_threads=False)


def pack(folders: Iterable[Path], target: Path) -> bool:
    """Make a .tar.gz of what is in the folders, the later ones on top; returns whether there was anything."""
    members: dict[str, Path] = {}
    for folder in folders:
        members |= {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    # Level 1: on a laptop the packing, not the loopback, is what a run waits for.
    with tarfile.open(target, "w:gz", compresslevel=1) as archive:
        for name, path in members.items():
            archive.add(path, arcname=name, recursive=False)
    return bool(members)


def upload(s3: Any, path: Path, target: Location, kms_key: str | None = None) -> None:
    extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
    s3.upload_file(str(path), target.bucket, target.key, ExtraArgs=extra, Config=one_thread())


def upload_folder(s3: Any, folder: Path, target: Location, kms_key: str | None = None) -> int:
    """Copy a folder as it is; returns the number of files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        upload(s3, path, target.under(path.relative_to(folder).as_posix()), kms_key)
    return len(files)


class CheckpointMirror:
    """Uploads what changes in a folder, every `SWEEP_S`, until it is closed; the last sweep runs in `close`.

    Make it before the job starts: what is in the folder then was restored, and everything later is the job's.

    `failure` holds what S3 refused. The mirror stops there: a job whose checkpoints go nowhere must not run on. An S3
    that does not answer is asked again with the next sweep; only the last sweep has to succeed.
    """

    def __init__(self, s3: Any, folder: Path, target: Location) -> None:
        self.s3, self.folder, self.target = s3, folder, target
        self.sent: dict[Path, Stamp] = dict(scan(folder))  # came from S3 and does not go back
        self.failure: Exception | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mirror {target.key}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop sweeping, sweep once more, and raise what S3 refused."""
        self.abandon()
        if self.failure is None:
            self.sweep()
        else:
            raise self.failure

    def abandon(self) -> None:
        """Stop without a last sweep: the machine is gone."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def sweep(self) -> None:
        """Send what has changed; a manifest after everything below its folder, and only when all of that went."""
        found = dict(scan(self.folder))
        changed = [path for path in found if self.sent.get(path) != found[path]]
        lost = [path for path in changed if path.name != COMMIT and not self._send(path, found[path])]
        for path in changed:
            if path.name == COMMIT and not any(other.is_relative_to(path.parent) for other in lost):
                self._send(path, found[path])

    def _send(self, path: Path, stamp: Stamp) -> bool:
        """False when the file has gone meanwhile (the job prunes old checkpoints), or was written to while it was read and
        waits for the next sweep: then its folder has no commit.
        """
        from boto3.exceptions import S3UploadFailedError

        try:
            upload(self.s3, path, self.target.under(path.relative_to(self.folder).as_posix()))
        except FileNotFoundError:
            return False
        except S3UploadFailedError:
            if dict(scan(path.parent)).get(path) == stamp:
                raise
            return False
        self.sent[path] = stamp
        return True

    def _run(self) -> None:
        while not self._ending.wait(SWEEP_S) and self.failure is None:
            self._try_sweep()

    def _try_sweep(self) -> None:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import ConnectionError as NoAnswer

        try:
            self.sweep()
        except S3UploadFailedError as error:  # kept for the job's thread, which reports it as the job's failure
            self.failure = error
        except NoAnswer as error:
            log.warning("checkpoints of %s wait: %s", self.target.uri, error)


def scan(folder: Path) -> Iterator[tuple[Path, Stamp]]:
    """Every file that is whole, with its stamp. A file may go while we look: the job owns the folder."""
    for path in sorted(folder.rglob("*")):
        if is_unfinished(path.relative_to(folder)):
            continue
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file():
            yield path, Stamp(facts.st_size, facts.st_mtime_ns, facts.st_ino)


def is_unfinished(relative: Path) -> bool:
    return any(part.startswith(".") or part.endswith(".tmp") for part in relative.parts)
