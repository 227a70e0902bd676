"""The emulator is killed with -9 in the middle of a run: a cloud of its own, so that nobody else's is hurt."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from microtuning_local import cloud as local
from microtuning_local.processes import started_at, wait_until
from microtuning_sdk import Run, SFTTrainer

from .conftest import PATIENCE_S, sort_rows


@pytest.fixture
def own_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[local.LocalCloud]:
    monkeypatch.setenv("MICROTUNING_HOME", str(tmp_path / "home"))
    yield local.up()
    local.reset()


@pytest.mark.parametrize("was_stopped_before", [False, True], ids=["no tables come back", "old tables come back"])
def test_after_kill_9_the_tables_are_read_back_and_the_run_in_flight_completes_in_its_first_attempt(
    own_cloud: local.LocalCloud, was_stopped_before: bool
) -> None:
    trainer = SFTTrainer(model_arch="Transformer", stage="local", checkpoint={"every_steps": 10, "every_epoch": False})
    before = trainer.fit(sort_rows(16), sort_rows(4), batch_size=8, wait=False)
    assert before.wait(PATIENCE_S).status == "completed"
    if was_stopped_before:
        local.down()
        own_cloud = local.up()
    run = trainer.fit(sort_rows(16), sort_rows(4), epochs=60, batch_size=8, wait=False)
    ends_at_s = time.monotonic() + PATIENCE_S
    while not run.checkpoints():
        assert time.monotonic() < ends_at_s, run.view()
        time.sleep(0.2)
    cost, versions = before.cost(), before.record.model_version

    assert own_cloud.endpoint.emulator_pid
    os.kill(own_cloud.endpoint.emulator_pid, signal.SIGKILL)
    assert wait_until(lambda: started_at(own_cloud.endpoint.emulator_pid or 0) is None, timeout_s=5)
    local.ensure_up()

    again = Run(before.run_id, "local")
    assert (again.status, again.cost(), again.record.model_version) == ("completed", cost, versions)
    assert [each.step for each in again.checkpoints()] == [each.step for each in before.checkpoints()]
    ended = Run(run.run_id, "local").wait(PATIENCE_S)
    assert (ended.status, [each.outcome for each in ended.attempts]) == ("completed", ["completed"])
    assert ended.model_version != versions
