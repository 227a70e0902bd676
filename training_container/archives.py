"""The user's code archive, unpacked so that nothing lands beside its folder, grows without end, or stands for another file.

Python's zipfile would bend a path that leads out until it fits, and write a link as a file of its text: both quietly give
another program than the one that was packed. Here each is refused by its name.
"""

from __future__ import annotations

import hashlib
import stat
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from .failures import UserFailure

MAX_FILES = 20_000
MAX_BYTES = 2**30  # unpacked; fit() packs at most 50 MB, and a script's folder may hold assets that compress well
_ENCRYPTED = 0x1
_NO_PLACE = (FileExistsError, IsADirectoryError, NotADirectoryError)  # two members want one name
_LONGEST_NAME = 255


def check_sha256(archive: Path, expected: str) -> None:
    """What runs is what was submitted.

    Raises:
        UserFailure: the archive is another one than the spec names.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserFailure(
            f"The code archive {archive.name} has the sha256 {found}, and code.sha256 in the spec is {expected}: it was "
            "changed after the spec was written. Submit again."
        )


def unpack_zip(archive: Path, folder: Path) -> None:
    """Every file of the archive, below the folder.

    Raises:
        UserFailure: it is no whole zip, holds a member that is no plain file inside it, or more than anyone's code.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            members = packed.infolist()
            _refuse_dangers(archive.name, members)
            for member in members:  # zipfile reads no more of a member than its header says, which was counted
                packed.extract(member, folder)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, *_NO_PLACE) as error:
        raise UserFailure(f"The code archive {archive.name} cannot be unpacked: {error}. Pack it again.") from error


def _refuse_dangers(name: str, members: Iterable[zipfile.ZipInfo]) -> None:
    count = total_bytes = 0
    for member in members:
        count, total_bytes = count + 1, total_bytes + member.file_size
        if fault := _fault_of(member):
            raise UserFailure(f"The code archive {name} holds {member.filename!r}, {fault}. Pack plain files only.")
    if count > MAX_FILES or total_bytes > MAX_BYTES:
        raise UserFailure(
            f"The code archive {name} unpacks to {count:,} files of {total_bytes:,} bytes; at most {MAX_FILES:,} files of "
            f"{MAX_BYTES:,} bytes are taken. Keep data in the data channels."
        )


def _fault_of(member: zipfile.ZipInfo) -> str | None:
    # orig_filename: what stands in the archive, before zipfile cut it at a NUL.
    path = member.orig_filename
    kind = stat.S_IFMT(member.external_attr >> 16)
    if path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/"):
        return "whose path leads out of the archive"
    if any(len(part.encode()) > _LONGEST_NAME for part in path.split("/")):
        return "whose name no file can have"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "which is a link or a device"
    if member.flag_bits & _ENCRYPTED:
        return "which is encrypted"
    return None
