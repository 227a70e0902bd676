"""Going back to an older checkpoint: what is meant, when the next lineage begins, and what stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from microtuning_core.domain.branching import asked_to_go_back, find_checkpoint
from microtuning_core.domain.command import Command
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.run import Attempt, CheckpointRef, Run, RunStatus, new_run
from microtuning_core.domain.settle import Facts, StartExecution, StopJob, WaitingState, answer, closed, decide
from microtuning_core.usecases.command import changed
from tests.unit.records import RUN_ID, a_plan, a_spec

S = RunStatus
JOB = f"prod-{RUN_ID}-a001"
NOW = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
STEP_40 = CheckpointRef(lineage=1, step=40)
PLAN = a_plan()
SPEC = a_spec()


@dataclass(frozen=True)
class At:
    lineage: int
    step: int


def an_attempt(**changes) -> Attempt:
    facts = {"attempt": 1, "job_name": JOB, "lineage": 1, "plan": PLAN, "created_at": NOW, "launched_at": NOW}
    return Attempt(**(facts | changes))


def a_run(**changes) -> Run:
    """In training at step 80 of its first lineage, and asked to go back to step 40."""
    state = {
        "status": S.TRAINING, "attempts": (an_attempt(),), "rollback_to": STEP_40,
        "last_checkpoint": CheckpointRef(lineage=1, step=80),
    }  # fmt: skip
    return new_run(RUN_ID, SPEC, NOW).with_(**(state | changes))


def a_job(status: str = "InProgress", secondary: str = "Training") -> JobFacts:
    over = status != "InProgress"
    return JobFacts(
        job_name=JOB, status=status, secondary=secondary, created_at=NOW, started_at=NOW,
        ended_at=NOW if over else None, billed_s=60 if over else None, training_s=60 if over else None,
    )  # fmt: skip


# --- which checkpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "lineage", "expected"),
    [
        (40, None, (2, 40)),  # both lineages have it: the newer one is meant
        (40, 1, (1, 40)),
        (20, None, (1, 20)),
        (None, None, (2, 60)),
        (None, 1, (1, 90)),
        (90, 2, None),
        (41, None, None),
    ],
)
def test_a_step_means_the_newest_lineage_that_has_it(step, lineage, expected):
    registered = [At(1, 20), At(1, 40), At(1, 90), At(2, 40), At(2, 60)]
    found = find_checkpoint(registered, step, lineage)
    assert (found and (found.lineage, found.step)) == expected


# --- when the next lineage begins ---------------------------------------------------------------------------------------


def test_a_job_that_trains_is_stopped_first_and_its_end_begins_lineage_2_at_step_40():
    asked = decide(a_run(), Facts(now=NOW, job=a_job()))
    assert (asked.run.lineage, asked.run.current.stop_cause, asked.actions) == (1, "rollback", (StopJob(JOB),))
    gone_back = decide(asked.run, Facts(now=NOW, job=a_job("Stopped", "Stopped"), newest_step=81)).run
    assert (gone_back.status, gone_back.lineage, gone_back.resume_from) == (S.RECOVERING, 2, STEP_40)
    assert (gone_back.rollback_to, gone_back.last_checkpoint, gone_back.current.outcome) == (None, None, "stopped")
    assert answer(gone_back, WaitingState("train", "t", RUN_ID, 1), holds_slot=True) == "plan"


@pytest.mark.parametrize("end", [("Completed", "Completed"), ("Failed", "Failed"), ("Stopped", "MaxRuntimeExceeded")])
def test_however_the_job_ends_meanwhile_the_run_goes_back(end):
    gone_back = decide(a_run(), Facts(now=NOW, job=a_job(*end))).run
    assert (gone_back.status, gone_back.lineage, gone_back.verdict) == (S.RECOVERING, 2, None)


@pytest.mark.parametrize("status", [S.QUEUED, S.PLANNING, S.RECOVERING])
def test_where_no_job_trains_the_next_lineage_begins_at_once(status):
    ended = an_attempt(outcome="failed", billed_s=60)
    gone_back = decide(a_run(status=status, attempts=(ended,)), Facts(now=NOW)).run
    assert (gone_back.status, gone_back.lineage, gone_back.attempts) == (status, 2, (ended,))


def test_an_attempt_that_was_never_launched_is_settled_and_costs_nothing():
    planned = a_run(attempts=(an_attempt(launched_at=None),))
    gone_back = decide(planned, Facts(now=NOW, job_is_missing=True)).run
    assert (gone_back.lineage, gone_back.current.outcome, gone_back.current.billed_s) == (2, "stopped", 0)


def test_a_run_that_is_being_evaluated_ends_first_and_is_then_taken_up_by_its_next_execution():
    evaluating = a_run(status=S.EVALUATING, attempts=(an_attempt(outcome="completed", billed_s=60),))
    assert decide(evaluating, Facts(now=NOW)).run == evaluating
    over = closed(evaluating.with_(verdict="completed", model_version="sort/v1"), NOW)
    decision = decide(over, Facts(now=NOW))
    assert (decision.run.status, decision.run.lineage, decision.actions) == (S.QUEUED, 2, (StartExecution(),))
    assert (decision.run.execution, decision.run.verdict, decision.run.ended_at) == (f"{RUN_ID}-e2", None, None)


@pytest.mark.parametrize("status", [S.COMPLETED, S.FAILED, S.STOPPED])
def test_a_run_that_is_over_is_taken_up_once_and_keeps_its_attempts(status):
    attempts = (an_attempt(outcome="failed", billed_s=60),)
    over = a_run(status=status, verdict=str(status), attempts=attempts, stop_requested="cancelled by its user")
    opened = decide(over, Facts(now=NOW)).run
    assert (opened.status, opened.attempts, opened.stop_requested, opened.reopenings) == (S.QUEUED, attempts, None, 1)
    assert decide(opened, Facts(now=NOW)).run == opened


def test_a_cancel_has_more_weight_than_a_rollback():
    cancel = Command(verb="cancel", issued_at=NOW)
    asked = decide(a_run(), Facts(now=NOW, job=a_job(), command=cancel)).run
    ended = decide(asked, Facts(now=NOW, job=a_job("Stopped", "Stopped"))).run
    assert (ended.verdict, ended.lineage) == ("stopped", 1)


def test_a_command_that_is_delivered_twice_goes_back_once():
    once = asked_to_go_back(a_run(rollback_to=None), STEP_40, "c-1")
    gone_back = decide(once, Facts(now=NOW, job=a_job("Stopped", "Stopped"))).run
    assert asked_to_go_back(gone_back, STEP_40, "c-1") == gone_back
    assert asked_to_go_back(gone_back, STEP_40, "c-2").rollback_to == STEP_40


def test_ten_rollbacks_do_not_use_up_the_ten_executions_that_may_die():
    run = a_run(status=S.STOPPED, verdict="stopped", attempts=(an_attempt(outcome="stopped", billed_s=1),))
    for number in range(10):
        run = decide(asked_to_go_back(run, STEP_40, f"c-{number}"), Facts(now=NOW + timedelta(hours=number))).run
        run = run.with_(status=S.STOPPED, verdict="stopped")
    assert (run.executions - run.reopenings, run.lineage) == (1, 11)


# --- forks ---------------------------------------------------------------------------------------------------------------


def test_changes_are_laid_over_a_spec_mapping_by_mapping_and_null_restores_a_default():
    document = {"name": "sort", "algorithm": {"type": "sft", "epochs": 3, "batch_size": 8}, "seed": 1}
    changes = {"algorithm": {"learning_rate": 1e-5, "epochs": None}, "seed": 2}
    assert changed(document, changes) == {
        "name": "sort", "algorithm": {"type": "sft", "batch_size": 8, "learning_rate": 1e-5}, "seed": 2,
    }  # fmt: skip
    assert document["algorithm"]["epochs"] == 3
