"""Checkpoints: written beside the training, of the moment they were taken at, whole or not there."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from microtuning_core.domain.spec import CheckpointSpec
from training_container import checkpoints
from training_container.checkpoints import CheckpointWriter
from training_container.engine import Engine
from training_container.processes import has_room_for

Box, Rows = Callable[..., Any], Callable[..., Any]
SFT = {"type": "sft", "batch_size": 4, "epochs": 2, "learning_rate": 1e-3}


def fingerprints(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def files_of(box: Any, step: int) -> dict[str, str]:
    """What a manifest says of its files, but for those in which peft names the folder of the base model."""
    named = ("model/adapter_config.json", "model/README.md")
    return {each["path"]: each["sha256"] for each in box.manifest(step)["files"] if each["path"] not in named}


@pytest.mark.parametrize("kind", ["a_box", "a_lora_box"])
def test_a_checkpoint_written_while_training_goes_on_is_of_the_step_it_was_taken_at(
    kind: str, rows: Rows, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, spec = request.getfixturevalue(kind), {"checkpoint": {"every_steps": 2, "keep": 9}}
    waited, beside = (make(name=name, algorithm=SFT, rows=rows(16), spec=spec) for name in ("waited", "beside"))
    monkeypatch.setattr("training_container.run.has_room_for", lambda _: False)
    assert waited.work() == 0
    monkeypatch.undo()
    seal, began = checkpoints._seal, threading.Event()

    def slowly(folder: Path, path: Path) -> Any:
        if threading.current_thread() is not threading.main_thread() and not began.wait(5):
            raise AssertionError("no step was made meanwhile")
        return seal(folder, path)

    monkeypatch.setattr(checkpoints, "_seal", slowly)
    beside_steps = iter(range(100))
    assert beside.work(stop=lambda: bool(next(beside_steps) >= 2 and began.set())) == 0
    assert waited.steps == beside.steps == list(range(1, 9))
    for step in (2, 4, 6, 8):
        assert files_of(beside, step) == files_of(waited, step)


def test_a_full_disk_ends_the_job_with_the_reason_and_leaves_older_checkpoints_whole(
    a_box: Box, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = checkpoints._seal

    def full(folder: Path, path: Path) -> Any:
        if folder.name == "step-4":
            raise OSError(errno.ENOSPC, "No space left on device")
        return seal(folder, path)

    monkeypatch.setattr(checkpoints, "_seal", full)
    box = a_box(algorithm=SFT, rows=rows(16), spec={"checkpoint": {"every_steps": 2}})
    assert box.work() == 1
    assert box.failure["class"] == "platform"
    assert "The disk is full: checkpoint step-4 could not be written" in box.failure["message"]
    assert "Lower checkpoint.keep, or take a larger volume." in box.failure["message"]
    assert box.checkpoints == ["step-2"]
    assert not (box.tree.checkpoints / "step-4").exists()
    monkeypatch.undo()
    assert box.work() == 0
    assert box.steps[-1] == 8


def test_what_was_begun_is_whole_before_a_stop_is_obeyed(
    a_box: Box, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = checkpoints._seal

    def late(folder: Path, path: Path) -> Any:
        threading.Event().wait(0.05)
        return seal(folder, path)

    monkeypatch.setattr(checkpoints, "_seal", late)
    box = a_box(algorithm=SFT, rows=rows(16), spec={"checkpoint": {"every_steps": 2}})
    assert box.work(stop=lambda: len(box.steps) == 4) == 143
    assert box.checkpoints == ["step-2", "step-4"]


def test_a_writer_gives_what_it_wrote_once_and_raises_what_it_met(tmp_path: Path) -> None:
    def broken(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = CheckpointWriter()
    assert writer.take() is None
    writer.begin(tmp_path, 1, broken, None, CheckpointSpec())  # type: ignore[arg-type]
    writer.wait()
    with pytest.raises(OSError, match="Input/output error"):
        writer.take()
    assert writer.take() is None


def test_a_snapshot_is_the_state_of_its_moment_and_keeps_tied_weights_one(tmp_path: Path, a_model_dir: Any) -> None:
    from microtuning_core.domain.spec import ModelSpec

    spec = ModelSpec(base="tests/tiny", adapter="none")
    engine = Engine.build(spec, source=str(a_model_dir()), texts=(), seed=0, device=torch.device("cpu"))
    engine.model.tie_weights()
    (tmp_path / "live").mkdir()
    (tmp_path / "copy").mkdir()
    engine.save_state(tmp_path / "live")
    snapshot = engine.snapshot()
    assert snapshot is not None
    with torch.no_grad():
        for weight in engine.trainable.values():
            weight.add_(1.0)
    snapshot.write(tmp_path / "copy")
    assert fingerprints(tmp_path / "copy") == fingerprints(tmp_path / "live")


def test_room_is_asked_of_the_machine() -> None:
    assert has_room_for(1)
    assert not has_room_for(1 << 60)
