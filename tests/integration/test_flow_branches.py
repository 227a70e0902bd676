"""Rollback, fork and pin on the local cloud, by the commands that the SDK puts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from microtuning_core.domain.errors import CommandRefused
from microtuning_core.domain.layout import kept_prefix
from microtuning_core.domain.run import CheckpointRef
from microtuning_sdk import Run, Stage

from .conftest import StageUnderTest


@pytest.fixture
def handle(stage: StageUnderTest) -> Callable[[str], Run]:
    """The run as its user holds it."""

    def of(run_id: str) -> Run:
        return Run(run_id, Stage(stage.names, stage.cloud))  # type: ignore[arg-type]  # a cloud makes clients

    return of


def channels_of(stage: StageUnderTest, job_name: str) -> dict[str, str]:
    answer: dict[str, Any] = stage.client("sagemaker").describe_training_job(TrainingJobName=job_name)
    return {each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"] for each in answer["InputDataConfig"]}


def test_a_completed_run_goes_on_from_its_checkpoint_as_lineage_2_and_completes_again(
    stage: StageUnderTest, handle: Callable[[str], Run]
) -> None:
    first = stage.ended_and_paid(stage.submit())
    assert first.last_checkpoint
    start = handle(first.run_id).rollback()
    assert (start.lineage, start.step) == (1, first.last_checkpoint.step)
    again = stage.when(first.run_id, lambda run: run.is_final and run.lineage == 2)
    assert (again.status, again.execution, len(again.attempts)) == ("completed", f"{first.run_id}-e2", 2)
    resumed = channels_of(stage, again.attempts[1].job_name)["resume"]
    assert resumed.endswith(f"{first.run_id}/checkpoints/l01/step-{start.step}/")
    assert stage.execution_ended(f"{first.run_id}-e2")["status"] == "SUCCEEDED"
    assert stage.services.admissions.slots().held == {}


def test_a_training_run_is_stopped_and_goes_on_in_the_same_execution(
    stage: StageUnderTest, handle: Callable[[str], Run]
) -> None:
    run_id = stage.submit("hang")
    stage.training(run_id)
    stage.when(run_id, lambda run: run.last_checkpoint)
    handle(run_id).rollback(1)
    second = stage.when(run_id, lambda run: len(run.attempts) == 2 and run.attempts[1].launched_at)
    assert (second.lineage, second.resume_from, second.executions) == (2, CheckpointRef(lineage=1, step=1), 1)
    assert second.attempts[0].outcome == "stopped"
    stage.cancel(run_id)
    assert stage.ended_and_paid(run_id).status == "stopped"


def test_a_fork_is_a_run_of_its_own_that_begins_at_a_kept_copy(
    stage: StageUnderTest, handle: Callable[[str], Run]
) -> None:
    first = stage.ended_and_paid(stage.submit())
    forked = handle(first.run_id).fork(name="forked", changes={"algorithm": {"epochs": 2}})
    run = stage.ended_and_paid(forked.run_id)
    assert (run.status, run.name, run.spec.algorithm.epochs) == ("completed", "forked", 2)
    assert run.resume_from and run.resume_from.run_id == first.run_id
    kept = kept_prefix(first.run_id, run.resume_from.lineage, run.resume_from.step)
    assert channels_of(stage, run.attempts[0].job_name)["resume"] == f"s3://{stage.names.bucket}/{kept}"
    assert f"{kept}manifest.json" in stage.keys(kept)
    assert stage.run(first.run_id) == first


def test_a_pinned_checkpoint_is_whole_and_pinning_it_again_changes_nothing(
    stage: StageUnderTest, handle: Callable[[str], Run]
) -> None:
    first = stage.ended_and_paid(stage.submit())
    uri = handle(first.run_id).pin()
    assert handle(first.run_id).pin() == uri
    prefix = uri.removeprefix(f"s3://{stage.names.bucket}/")
    source = prefix.replace("/kept/", "/checkpoints/")
    assert [key.removeprefix(prefix) for key in stage.keys(prefix)] == [
        key.removeprefix(source) for key in stage.keys(source)
    ]


def test_what_cannot_be_done_is_refused_and_names_what_there_is(
    stage: StageUnderTest, handle: Callable[[str], Run]
) -> None:
    first = stage.ended_and_paid(stage.submit())
    run = handle(first.run_id)
    with pytest.raises(CommandRefused, match=r"is no checkpoint of .*, which has"):
        run.rollback(9999)
    with pytest.raises(CommandRefused, match=r"algorithm\.epochs"):
        run.fork(changes={"algorithm": {"epochs": 0}})
    with pytest.raises(CommandRefused, match="outside s3://"):
        run.fork(changes={"data": {"train": "s3://elsewhere/rows.jsonl"}})
    assert stage.run(first.run_id) == first
