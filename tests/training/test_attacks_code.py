"""What a job unpacks and loads: archives that lead out of their folder or never end, and files that would run code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from microtuning_core.domain.spec import ModelSpec
from training_container import archives
from training_container.engine.models import load_base, load_tokenizer
from training_container.failures import UserFailure
from training_container.job import unpack_code
from training_container.paths import MlTree
from training_container.rewards.model import ModelReward, unpacked

Box = Callable[..., Any]
CPU = torch.device("cpu")


class Canary:
    """Loaded by pickle, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.file),))


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    """That it sings is shown first: a canary that cannot would prove nothing."""
    trial = Canary(tmp_path / "sings")
    pickle.loads(pickle.dumps(trial))
    assert trial.file.exists()
    return Canary(tmp_path / "canary")


# --- code archives ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> MlTree:
    tree = MlTree(tmp_path / "ml")
    tree.channel("code").mkdir(parents=True)
    tree.make_outputs()
    return tree


def a_zip(tree: MlTree, *members: tuple[str | zipfile.ZipInfo, bytes]) -> None:
    with zipfile.ZipFile(tree.channel("code") / "code.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rewards.py", "x = 1\n")
        for name, content in members:
            archive.writestr(name, content)


def special(name: str, kind: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system = 3
    entry.external_attr = (kind | 0o777) << 16
    return entry


def everything_beside(tree: MlTree) -> set[str]:
    return {str(path) for path in tree.root.parent.rglob("*") if not path.is_relative_to(tree.code)}


@pytest.mark.parametrize(
    "name", ["../out.py", "a/../../out.py", "/tmp/out.py", "..\\out.py", "a/..", "C:\\out.py", "x" * 300 + ".py"]
)
def test_a_member_that_leads_out_is_refused_by_name_and_nothing_is_written(name: str, tree: MlTree) -> None:
    entry = zipfile.ZipInfo("placeholder")
    entry.filename = entry.orig_filename = name  # as another program may write it
    a_zip(tree, (entry, b"x = 2\n"))
    before = everything_beside(tree)
    with pytest.raises(UserFailure, match=r"code\.zip holds '.*Pack plain files only"):
        unpack_code(tree)
    assert everything_beside(tree) == before
    assert not list(tree.code.rglob("*.py"))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_a_link_or_a_device_is_refused(kind: int, tree: MlTree) -> None:
    a_zip(tree, (special("passwd", kind), b"/etc/passwd"))
    with pytest.raises(UserFailure, match="'passwd', which is a link or a device"):
        unpack_code(tree)


def test_a_bomb_is_refused_before_anything_is_unpacked(tree: MlTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 50_000_000)
    a_zip(tree, *((f"zeros{number}.bin", bytes(10_000_000)) for number in range(6)))
    assert (tree.channel("code") / "code.zip").stat().st_size < 100_000
    with pytest.raises(UserFailure, match="60,000,006 bytes; at most"):
        unpack_code(tree)
    assert not list(tree.code.rglob("*"))


def test_a_size_that_lies_gets_no_more_than_it_said(tree: MlTree) -> None:
    a_zip(tree, ("zeros.bin", bytes(1_000_000)))
    path = tree.channel("code") / "code.zip"
    packed = path.read_bytes()
    path.write_bytes(packed.replace((1_000_000).to_bytes(4, "little"), (10).to_bytes(4, "little")))
    with pytest.raises(UserFailure, match=r"code\.zip cannot be unpacked"):
        unpack_code(tree)
    assert sum(each.stat().st_size for each in tree.code.rglob("*") if each.is_file()) < 1000


def test_many_members_are_refused(tree: MlTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_FILES", 100)
    a_zip(tree, *((f"f{number}", b"") for number in range(200)))
    with pytest.raises(UserFailure, match="201 files"):
        unpack_code(tree)


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_zip_is_the_users_to_mend(content: bytes, tree: MlTree) -> None:
    (tree.channel("code") / "code.zip").write_bytes(content)
    with pytest.raises(UserFailure, match="cannot be unpacked"):
        unpack_code(tree)


def test_two_members_of_one_name_are_the_users_to_mend(tree: MlTree) -> None:
    a_zip(tree, ("a", b"x"), ("a/b.py", b"y"))
    with pytest.raises(UserFailure, match="cannot be unpacked"):
        unpack_code(tree)


def test_an_archive_that_was_changed_after_the_spec_ends_the_job_in_words(a_box: Box) -> None:
    box = a_box()  # whose spec names another sha256
    for path in box.tree.channel("code").iterdir():
        path.unlink()
    a_zip(box.tree, ("more.py", b""))
    assert box.supervise().returncode == 1
    assert box.failure["class"] == "user"
    assert "was changed after the spec was written" in box.failure["message"]


def test_the_archive_that_the_spec_names_is_taken(tree: MlTree) -> None:
    a_zip(tree, ("more.py", b""))
    path = tree.channel("code") / "code.zip"
    unpack_code(tree, hashlib.sha256(path.read_bytes()).hexdigest())
    assert (tree.code / "more.py").is_file()
    with pytest.raises(UserFailure, match=r"code\.sha256 in the spec is 0{64}"):
        unpack_code(tree, "0" * 64)


# --- pickles and remote code in models -------------------------------------------------------------------------------


def poisoned(folder: Path, canary: Canary) -> Path:
    """The weights replaced by a pickle, under the name that torch's own format has."""
    (folder / "model.safetensors").unlink()
    torch.save({"weight": canary}, folder / "pytorch_model.bin")
    return folder


def test_a_base_models_pickle_is_not_run(a_model_dir: Callable[..., Path], canary: Canary) -> None:
    folder = poisoned(a_model_dir(), canary)
    with pytest.raises(UserFailure):
        load_base(ModelSpec(base="tests/tiny"), str(folder), CPU)
    assert not canary.file.exists()


def test_a_reward_models_pickle_is_not_run(a_model_dir: Callable[..., Path], canary: Canary) -> None:
    with pytest.raises(UserFailure):
        ModelReward(poisoned(a_model_dir(), canary))
    assert not canary.file.exists()


def test_code_that_comes_with_a_model_is_not_run(a_model_dir: Callable[..., Path], canary: Canary) -> None:
    folder = a_model_dir()
    (folder / "modeling.py").write_text(f"import os\nos.mkdir({str(canary.file)!r})\nclass Mine: pass\n", "utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    own = {
        "AutoConfig": "modeling.Mine",
        "AutoModelForCausalLM": "modeling.Mine",
        "AutoTokenizer": ["modeling.Mine"] * 2,
    }
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": own}), "utf-8")
    with pytest.raises(UserFailure):
        load_base(ModelSpec(base="tests/tiny"), str(folder), CPU)
    described = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(described | {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["modeling.Mine", None]}}),
        "utf-8",
    )
    with pytest.raises(UserFailure):
        load_tokenizer(str(folder), None)
    assert not canary.file.exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_reward_models_archive_makes_no_link_out_of_its_folder(kind: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "channel"
    folder.mkdir()
    entry = tarfile.TarInfo("config.json")
    entry.type, entry.linkname = kind, "/etc/passwd"
    with tarfile.open(folder / "model.tar.gz", "w:gz") as archive:
        archive.addfile(entry)
    with pytest.raises(UserFailure):
        unpacked(folder)
    assert not (folder / "unpacked" / "config.json").exists()


def test_a_reward_models_archive_writes_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "channel"
    folder.mkdir()
    with tarfile.open(folder / "model.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("../../out.json")
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    with pytest.raises(UserFailure):
        unpacked(folder)
    assert not list(tmp_path.rglob("out.json"))


# --- pickles in checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["optimizer.safetensors", "random.json"])
def test_a_checkpoint_is_never_unpickled_even_where_its_manifest_agrees(file: str, a_box: Box, canary: Canary) -> None:
    """Whoever may write to the run's prefix could put any file there, and its hash into the manifest."""
    box = a_box(algorithm={"type": "sft", "batch_size": 4, "epochs": 2}, spec={"checkpoint": {"every_steps": 4}})
    stops = iter(range(100))
    assert box.work(stop=lambda: next(stops) >= 5) == 143
    for manifest in box.tree.checkpoints.glob("step-*/manifest.json"):
        (manifest.parent / "optimizer.pt").write_bytes(pickle.dumps(canary))  # of another trainer's naming
        path, told = manifest.parent / file, json.loads(manifest.read_text("utf-8"))
        path.write_bytes(pickle.dumps(canary))
        for each in told["files"]:
            if each["path"] == file:
                each |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        manifest.write_text(json.dumps(told), "utf-8")
    box.supervise()
    assert not canary.file.exists()
