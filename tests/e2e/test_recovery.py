"""A run whose worker is killed, or whose spot machine is taken away, ends with the same bits as one left alone."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_local import cloud as local
from tests.processes import processes_of

from .conftest import PATIENCE_S, an_rl_trainer, slowly, sort_rows, wait_for_step, wait_until

if TYPE_CHECKING:
    from microtuning_sdk import Run, Stage


def begun(stage: Stage, name: str, *, spot: bool) -> Run:
    """Sixteen steps of half a second, a checkpoint at every second one; always the same seed."""
    trainer = an_rl_trainer(stage, name=name, reward_func=slowly, seed=7, compute={"spot": spot})
    return trainer.fit(sort_rows(32), sort_rows(8, 2), epochs=1, batch_size=8, wait=False)


@pytest.fixture(scope="module")
def undisturbed(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = begun(stage, "left alone", spot=False)
    return weights_of(run, tmp_path_factory.mktemp("undisturbed"))


def weights_of(run: Run, folder: Path) -> str:
    """sha256 of the final weights of a run that completes."""
    record = run.wait(PATIENCE_S)
    assert record.status == "completed", record.reason
    return hashlib.sha256((run.model.download(folder) / "model.safetensors").read_bytes()).hexdigest()


def completed_recovery(run: Run) -> dict[str, Any]:
    """The only one, once its first new step was heard of: of a short run that may be after its end."""

    def whole() -> Any:
        (recovery,) = run.view()["recoveries"]
        return recovery if recovery["total_ms"] is not None else None

    found: dict[str, Any] = wait_until(whole, "first new step", timeout_s=30)
    return found


def workers_of(job_name: str) -> list[int]:
    """The training process of a job: the child of its supervisor."""
    return [pid for pid, parent in processes_of(job_name).items() if parent in supervisors_of(job_name)]


def supervisors_of(job_name: str) -> list[int]:
    """The first process of a job."""
    job = processes_of(job_name)
    return [pid for pid, parent in job.items() if parent not in job]


def test_a_worker_killed_in_mid_run_changes_no_bit_of_the_result(
    stage: Stage, undisturbed: str, tmp_path: Path
) -> None:
    run = begun(stage, "killed", spot=False)
    wait_for_step(run, 5)
    (attempt,) = run.record.attempts
    workers = workers_of(attempt.job_name)
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert weights_of(run, tmp_path) == undisturbed
    assert len(run.record.attempts) == 1
    assert completed_recovery(run)
    assert [event["step"] for event in run.metrics()] == list(range(1, 17))


def test_a_job_killed_whole_is_made_good_by_a_second_attempt_with_the_same_bits(
    stage: Stage, undisturbed: str, tmp_path: Path
) -> None:
    run = begun(stage, "host lost", spot=False)
    wait_for_step(run, 5)
    (supervisor,) = supervisors_of(run.record.attempts[0].job_name)
    os.killpg(supervisor, signal.SIGKILL)
    assert weights_of(run, tmp_path) == undisturbed
    first, second = run.record.attempts
    assert first.failure is not None
    assert (first.failure.failure_class, second.plan) == ("platform", first.plan)
    recovery = completed_recovery(run)
    assert recovery["cause"] == "platform"
    assert None not in recovery.values()


def test_a_reclaimed_spot_machine_is_recovered_in_the_same_job_with_the_same_bits(
    stage: Stage, undisturbed: str, tmp_path: Path
) -> None:
    run = begun(stage, "reclaimed", spot=True)
    wait_for_step(run, 5)
    local.reclaim(run.record.attempts[0].job_name)
    assert weights_of(run, tmp_path) == undisturbed
    (attempt,) = run.record.attempts
    assert attempt.plan.spot
    recovery = completed_recovery(run)
    assert (recovery["cause"], recovery["detect_ms"], recovery["decide_ms"]) == ("interrupted", None, None)
    assert None not in [recovery[name] for name in ("provision_ms", "restore_ms", "first_step_ms", "total_ms")]
    assert attempt.billed_s is not None
    assert attempt.training_s is not None
    assert attempt.billed_s < attempt.training_s


def test_a_run_that_its_budget_stopped_ends_with_the_same_weights_after_a_raise(
    stage: Stage, undisturbed: str, tmp_path: Path
) -> None:
    run = begun(stage, "over its budget", spot=False)
    wait_for_step(run, 3)
    run.raise_budget("0.000001")
    stopped = run.wait(PATIENCE_S)
    assert (stopped.status, (stopped.reason or "").startswith("budget: ")) == ("stopped", True)
    assert stopped.attempts[0].checkpoint_step is not None
    run.raise_budget(5)
    assert weights_of(run, tmp_path) == undisturbed
    assert [each.outcome for each in run.record.attempts] == ["stopped", "completed"]
