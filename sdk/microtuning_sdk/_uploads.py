"""What must be in the stage's bucket before a spec may name it: a parcel per object, each put once.

Every parcel's key holds a hash of what it belongs to, so an upload that was cut off leaves nothing that counts: the spec
that would name it was never put, and the next try uploads only what is missing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from microtuning_core.domain.layout import S3Uri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from microtuning_sdk._connection import Stage

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Parcel:
    """One object to be: its key, and its bytes, the local file that has them, or the S3 object to copy."""

    key: str
    content: bytes | Path | S3Uri = field(repr=False)
    bytes: int


def parcel(key: str, content: bytes | Path) -> Parcel:
    return Parcel(key, content, content.stat().st_size if isinstance(content, Path) else len(content))


def put_missing(stage: Stage, parcels: Iterable[Parcel], say: Callable[[str], None]) -> None:
    """Uploads what is not there yet."""
    for each in parcels:
        if stage.objects.bytes_of(each.key) == each.bytes:
            continue
        say(f"uploading {each.key} ({_size(each.bytes)})")
        _put(stage, each)


def _put(stage: Stage, each: Parcel) -> None:
    match each.content:
        case bytes():
            stage.s3.put_object(Bucket=stage.bucket, Key=each.key, Body=each.content)
        case Path():
            stage.s3.upload_file(str(each.content), stage.bucket, each.key)
        case S3Uri():
            # With the caller's own rights, which may reach further than those of the job's role.
            source = {"Bucket": each.content.bucket, "Key": each.content.key}
            stage.s3.copy(source, stage.bucket, each.key)  # type: ignore[arg-type]


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count:,} bytes"


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_tree(entries: Sequence[tuple[str, str]]) -> str:
    """The hash of a folder from `(path, hash or version of the file)`; moving or changing any file changes it."""
    return hashlib.sha256("\0".join(f"{path}\0{mark}" for path, mark in sorted(entries)).encode()).hexdigest()


def local_path(folder: Path, given: str | Path) -> Path:
    """A path as a user writes it, from `folder` on; "~" is the home, and "~x" stays as it is when there is no user x."""
    try:
        return folder / Path(given).expanduser()
    except RuntimeError:
        return folder / given
