"""What a run left as its model, unpacked on its user's machine: nothing beside the folder, and an error in words."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from microtuning_core.domain.errors import MicrotuningError
from microtuning_sdk._run import Model

URI = "s3://bucket/tenants/acme/runs/r/output/model.tar.gz"


def a_model(content: bytes) -> Model:
    def download_fileobj(bucket: str, key: str, file: Any) -> None:
        assert f"s3://{bucket}/{key}" == URI
        file.write(content)

    return Model(URI, SimpleNamespace(s3=SimpleNamespace(download_fileobj=download_fileobj)))  # type: ignore[arg-type]


def an_archive(**member: Any) -> bytes:
    packed, entry = io.BytesIO(), tarfile.TarInfo(member.pop("name", "model.bin"))
    for name, value in member.items():
        setattr(entry, name, value)
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(entry, io.BytesIO(b"x" * entry.size))
    return packed.getvalue()


HOSTILE = {
    "above": an_archive(name="../out.bin", size=1),
    "far above": an_archive(name="a/../../out.bin", size=1),
    "link above": an_archive(type=tarfile.SYMTYPE, linkname="../../etc/passwd"),
    "link to a file of the machine": an_archive(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": an_archive(type=tarfile.LNKTYPE, linkname="../out.bin"),
    "device": an_archive(type=tarfile.CHRTYPE),
    "no archive": b"no archive at all",
    "cut off": an_archive(size=100_000)[:60],
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing_beside_its_folder(kind: str, tmp_path: Path) -> None:
    with pytest.raises(MicrotuningError, match="cannot be unpacked"):
        a_model(HOSTILE[kind]).download(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path for path in tmp_path.rglob("*") if path.is_symlink() or path.name == "out.bin"] == []


def test_a_file_comes_without_rights_that_it_should_not_have(tmp_path: Path) -> None:
    folder = a_model(an_archive(size=3, mode=0o6777, uid=0)).download(tmp_path / "model")
    found = (folder / "model.bin").stat()
    assert found.st_mode & 0o6022 == 0
    assert found.st_size == 3
