"""`decide`: what becomes of a run, fact by fact, and the table of failures row by row."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from microtuning_core.domain.command import Command
from microtuning_core.domain.failures import Failure, FailureClass, classify_refusal
from microtuning_core.domain.job import JobFacts, StatusChange
from microtuning_core.domain.run import (
    Attempt,
    AttemptPlan,
    CheckpointRef,
    FailureNote,
    Liveness,
    Recovery,
    Run,
    RunStatus,
    new_run,
)
from microtuning_core.domain.settle import (
    MAX_EXECUTIONS,
    CloseRun,
    ExecutionFacts,
    Facts,
    ReleaseSlot,
    StartExecution,
    StopJob,
    WaitingState,
    answer,
    closed,
    decide,
    fail_run,
)
from tests.unit.records import RUN_ID, a_plan, a_spec

S = RunStatus
FC = FailureClass
BEGAN = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
NOW = BEGAN + timedelta(minutes=5)
SPEC = a_spec(compute={"deadline_s": 3600})


def plan(instance_type: str = "ml.g5.xlarge", spot: bool = False, micro_batch_size: int | None = 8) -> AttemptPlan:
    return a_plan(instance_type=instance_type, spot=spot, micro_batch_size=micro_batch_size)


def attempt(number: int = 1, **changes) -> Attempt:
    """Launched and under way."""
    facts = {"lineage": 1, "plan": plan(), "created_at": BEGAN, "launched_at": BEGAN}
    return Attempt(attempt=number, job_name=f"prod-{RUN_ID}-a{number:03d}", **(facts | changes))


def ended_attempt(number: int, failure_class: FailureClass = FC.PLATFORM, **changes) -> Attempt:
    note = FailureNote(failure_class=failure_class, message="before")
    return attempt(number, **({"outcome": "failed", "failure": note, "billed_s": 60, "ended_at": BEGAN} | changes))


def run(**changes) -> Run:
    """In training, with one attempt under way."""
    base = new_run(RUN_ID, SPEC, BEGAN)
    return base.with_(**({"status": S.TRAINING, "attempts": (attempt(),)} | changes))


def job(**changes) -> JobFacts:
    """The job of attempt 1, training for five minutes."""
    facts = {
        "job_name": f"prod-{RUN_ID}-a001",
        "status": "InProgress",
        "secondary": "Training",
        "created_at": BEGAN,
        "started_at": BEGAN,
    }
    return JobFacts(**(facts | changes))


def ended_job(status: str, secondary: str | None = None, **changes) -> JobFacts:
    facts = {"ended_at": NOW, "billed_s": 300, "training_s": 300}
    return job(status=status, secondary=secondary or status, **(facts | changes))


def failed_job(reason: str, **changes) -> JobFacts:
    return ended_job("Failed", failure_reason=reason, **changes)


def facts(**changes) -> Facts:
    return Facts(**({"now": NOW} | changes))


def cancel() -> Command:
    return Command(verb="cancel", issued_at=NOW)


def after(job_facts: JobFacts, **changes) -> Run:
    return decide(run(**changes), facts(job=job_facts)).run


def own_failure(failure_class: str, message: str = "why", **where) -> str:
    line = json.dumps({"class": failure_class, "message": message} | where)
    return f"AlgorithmError: {line}, exit code: 1"


# ----------------------------------------------------------------------------------- the job goes on, and ends well


def test_the_first_sight_of_a_job_notes_when_it_was_made_and_when_it_started():
    fresh = run(attempts=(attempt(launched_at=None),))
    seen = decide(fresh, facts(job=job())).run.current
    assert (seen.launched_at, seen.started_at, seen.is_settled) == (BEGAN, BEGAN, False)


def test_a_completed_job_settles_its_attempt_with_what_it_cost_and_asks_for_the_model():
    done = after(ended_job("Completed"))
    assert (done.status, done.verdict, done.current.outcome) == (S.EVALUATING, None, "completed")
    assert (done.current.billed_s, done.current.training_s, done.current.ended_at) == (300, 300, NOW)


def test_a_job_of_another_attempt_says_nothing():
    other = replace(ended_job("Failed"), job_name=f"prod-{RUN_ID}-a002")
    assert after(other) == run()


def test_what_was_not_asked_never_means_no():
    assert decide(run(), facts()) == decide(run(), facts(job=None, newest_step=None, execution=None))
    assert decide(run(), facts()).run == run()


def test_the_newest_whole_step_in_s3_counts_also_before_its_event_came():
    registered = CheckpointRef(lineage=1, step=10)
    seen = decide(run(last_checkpoint=registered), facts(job=ended_job("Completed"), newest_step=20)).run
    assert seen.current.checkpoint_step == 20
    assert after(ended_job("Completed"), last_checkpoint=registered).current.checkpoint_step == 10


# -------------------------------------------------------------------------------------- the table, row by row

CAPACITY = "CapacityError: Unable to provision requested ML compute capacity."


def test_capacity_moves_to_the_next_candidate_and_pays_nothing():
    seen = after(failed_job(CAPACITY, started_at=None, billed_s=None, training_s=None))
    assert (seen.status, seen.current.failure.failure_class, seen.current.billed_s) == (S.RECOVERING, FC.CAPACITY, 0)


def test_a_spot_wait_that_paid_nothing_is_a_lack_of_capacity():
    seen = after(ended_job("Stopped", "MaxWaitTimeExceeded", started_at=None, billed_s=0))
    assert (seen.status, seen.current.failure.failure_class) == (S.RECOVERING, FC.CAPACITY)


@pytest.mark.parametrize(("sweeps", "wait_s"), [(1, 60), (2, 120), (3, 240), (6, 1800), (9, 1800)])
def test_after_a_sweep_without_capacity_the_run_waits_1_2_4_to_30_minutes_without_its_slot(sweeps, wait_s):
    past = tuple(ended_attempt(n, FC.CAPACITY, billed_s=0) for n in range(1, sweeps + 1))
    current = attempt(sweeps + 1)
    lacking = failed_job(CAPACITY, job_name=current.job_name, started_at=None, billed_s=0)
    decision = decide(run(attempts=(*past, current)), facts(job=lacking))
    assert (decision.run.status, decision.run.not_before) == (S.QUEUED, NOW + timedelta(seconds=wait_s))
    assert decision.run.reason.startswith("CapacityError")
    assert decision.actions == (ReleaseSlot(),)


def test_waiting_for_capacity_ends_on_the_deadline_of_the_spec():
    past = ended_attempt(1, FC.CAPACITY, billed_s=0)
    lacking = failed_job(CAPACITY, job_name=attempt(2).job_name, started_at=None, billed_s=0)
    waiting = run(attempts=(past, attempt(2)), waiting_for_capacity_since=NOW - timedelta(seconds=3600))
    seen = decide(waiting, facts(job=lacking)).run
    assert (seen.verdict, seen.reason.startswith("no capacity within compute.deadline_s")) == ("failed", True)
    almost = waiting.with_(waiting_for_capacity_since=NOW - timedelta(seconds=3599))
    assert decide(almost, facts(job=lacking)).run.status == S.QUEUED


def test_time_on_a_machine_is_no_waiting_for_capacity_but_all_waits_add_up():
    waiting = run(waiting_for_capacity_since=BEGAN - timedelta(seconds=1800))
    training = decide(waiting, facts(job=job())).run
    assert (training.waiting_for_capacity_since, training.waited_for_capacity_s) == (None, 1800)
    later = training.with_(attempts=(ended_attempt(1, FC.CAPACITY, billed_s=0), attempt(2)))
    lacking = failed_job(CAPACITY, job_name=attempt(2).job_name, started_at=None, billed_s=0)
    ten_hours_on = NOW + timedelta(hours=10)
    again = decide(later, facts(now=ten_hours_on, job=lacking)).run
    assert (again.status, again.waiting_for_capacity_since) == (S.QUEUED, ten_hours_on)
    third = again.with_(status=S.TRAINING, attempts=(*again.attempts, attempt(3)))
    lacking = replace(lacking, job_name=attempt(3).job_name)
    assert decide(third, facts(now=ten_hours_on + timedelta(seconds=1799), job=lacking)).run.verdict is None
    assert decide(third, facts(now=ten_hours_on + timedelta(seconds=1800), job=lacking)).run.verdict == "failed"


def test_a_quota_refusal_takes_another_type_and_says_what_to_raise():
    text = "The account-level service limit 'ml.g5.xlarge for training job usage' is 0 Instances"
    seen = decide(run(), facts(refusal=classify_refusal("ResourceLimitExceeded", text))).run
    assert (seen.status, seen.current.failure.failure_class, seen.current.billed_s) == (S.RECOVERING, FC.QUOTA, 0)
    assert "Service Quotas" in seen.reason


def test_a_lost_platform_gets_the_next_attempt_from_the_last_checkpoint():
    seen = decide(run(), facts(job=failed_job("InternalServerError: We encountered …"), newest_step=40)).run
    assert (seen.status, seen.lineage, seen.current.checkpoint_step) == (S.RECOVERING, 1, 40)
    assert seen.current.failure.failure_class == FC.PLATFORM


def test_a_spot_machine_that_came_back_is_a_recovery_of_the_same_attempt():
    at = [BEGAN + timedelta(minutes=n) for n in range(4)]
    changes = [StatusChange(name, at[n]) for n, name in enumerate(["Training", "Interrupted", "Starting", "Training"])]
    seen = after(job(changes=tuple(changes)))
    assert (seen.status, len(seen.attempts)) == (S.TRAINING, 1)
    assert seen.current.recoveries == (Recovery(cause="interrupted", at=at[1], provision_ms=120_000),)


def test_a_spot_machine_that_never_came_back_gets_the_next_attempt():
    seen = after(ended_job("Stopped", "MaxWaitTimeExceeded", billed_s=120))
    assert (seen.status, seen.current.failure.failure_class) == (S.RECOVERING, FC.INTERRUPTED)


def test_out_of_memory_goes_on_with_another_attempt():
    seen = after(failed_job(own_failure("memory", "CUDA out of memory")))
    assert (seen.status, seen.reason, seen.lineage) == (S.RECOVERING, "CUDA out of memory", 1)


def test_bad_numerics_begin_a_new_lineage_where_the_ended_attempt_left_off():
    registered = CheckpointRef(lineage=1, step=10)
    late = decide(run(last_checkpoint=registered), facts(job=failed_job(own_failure("numerics")), newest_step=20)).run
    assert (late.status, late.lineage, late.last_checkpoint) == (S.RECOVERING, 2, None)
    assert late.resume_from == CheckpointRef(lineage=1, step=20)


def test_bad_numerics_before_any_checkpoint_begin_the_new_lineage_at_the_beginning():
    assert after(failed_job(own_failure("numerics"))).resume_from is None


def test_bad_numerics_in_the_second_lineage_end_the_run_with_the_evidence():
    past = ended_attempt(1, FC.NUMERICS)
    second = failed_job(own_failure("numerics", "the loss was nan"), job_name=attempt(2).job_name)
    seen = after(second, attempts=(past, attempt(2, lineage=2)), lineage=2)
    assert (seen.verdict, seen.reason) == ("failed", "it happened again after a new lineage: the loss was nan")


def test_an_error_of_the_user_ends_the_run_with_file_line_and_message():
    seen = after(failed_job(own_failure("user", "KeyError: 'answer'", file="rewards.py", line=12)))
    assert (seen.verdict, seen.reason) == ("failed", "KeyError: 'answer'")
    assert (seen.failure.file, seen.failure.line, len(seen.attempts)) == ("rewards.py", 12, 1)


def test_the_longest_run_time_stops_the_run_and_keeps_its_checkpoint():
    seen = decide(run(), facts(job=ended_job("Stopped", "MaxRuntimeExceeded", billed_s=3600), newest_step=90)).run
    assert (seen.verdict, seen.current.outcome, seen.current.billed_s) == ("stopped", "stopped", 3600)
    assert ("MaxRuntimeExceeded" in seen.reason, seen.current.checkpoint_step) == (True, 90)


def test_a_job_stopped_by_somebody_else_stops_the_run():
    assert after(ended_job("Stopped")).verdict == "stopped"


def test_evidence_that_nobody_foresaw_ends_the_run_and_is_shown():
    seen = after(failed_job("SomethingNew: with words"))
    assert (seen.verdict, seen.reason) == ("failed", "SomethingNew: with words")


def test_a_request_that_can_never_work_ends_the_run_with_its_reason():
    seen = decide(run(), facts(refusal=classify_refusal("ValidationException", "no such subnet"))).run
    assert (seen.verdict, seen.reason, seen.current.outcome) == ("failed", "no such subnet", "failed")


@pytest.mark.parametrize(("billed", "verdict"), [((60, 60, 60), "failed"), ((60, 0, 60), None), ((60, 60), None)])
def test_only_billed_attempts_without_a_newer_checkpoint_count_and_three_are_the_end(billed, verdict):
    past = tuple(ended_attempt(n, billed_s=seconds) for n, seconds in enumerate(billed[:-1], 1))
    current = attempt(len(billed))
    lost = failed_job("InternalServerError: …", job_name=current.job_name, billed_s=billed[-1])
    assert after(lost, attempts=(*past, current)).verdict == verdict


def test_three_attempts_with_a_newer_checkpoint_each_go_on():
    past = tuple(ended_attempt(n, checkpoint_step=10 * n) for n in (1, 2))
    lost = failed_job("InternalServerError: …", job_name=attempt(3).job_name)
    assert decide(run(attempts=(*past, attempt(3))), facts(job=lost, newest_step=30)).run.status == S.RECOVERING


# --------------------------------------------------------------------------------------------------- silence


def quiet_for(minutes: float, **changes) -> tuple[Run, Facts]:
    """A job in training whose newest sign of any kind is that old; the logs were asked."""
    sign = NOW - timedelta(minutes=minutes)
    long_ago = NOW - timedelta(days=1)
    liveness = Liveness(at=sign, step=3, longest_step_ms=changes.pop("longest_step_ms", 100))
    seen = facts(**({"job": job(started_at=long_ago), "logs_asked": True} | changes))
    return run(liveness=liveness), seen


@pytest.mark.parametrize(
    ("minutes", "longest_step_ms", "silent"),
    [
        (9.9, 100, False),
        (10.1, 100, True),
        (10.1, 120_000 + 2_000, False),
        (24.9, 300_000, False),
        (25.1, 300_000, True),
    ],
)
def test_silent_is_no_sign_for_ten_minutes_or_five_times_the_longest_step(minutes, longest_step_ms, silent):
    decision = decide(*quiet_for(minutes, longest_step_ms=longest_step_ms))
    assert (decision.run.current.stop_cause, decision.actions) == (
        ("silent", (StopJob(attempt().job_name),)) if silent else (None, ())
    )


def test_a_log_line_is_a_sign_of_life():
    assert decide(*quiet_for(60, last_sign_at=NOW - timedelta(minutes=9))).run.current.stop_cause is None


def test_nobody_is_silent_whose_log_was_not_asked():
    assert decide(*quiet_for(600, logs_asked=False)).run.current.stop_cause is None


def test_a_job_without_progress_and_log_is_silent_ten_minutes_after_it_started():
    asked = facts(now=BEGAN + timedelta(minutes=10, seconds=1), job=job(), logs_asked=True)
    assert decide(run(), asked).run.current.stop_cause == "silent"


def test_a_machine_given_again_after_an_hour_has_its_ten_minutes_to_show_a_sign():
    again = NOW - timedelta(minutes=1)
    changes = (StatusChange("Training", BEGAN), StatusChange("Interrupted", BEGAN), StatusChange("Training", again))
    seen = job(started_at=NOW - timedelta(days=1), changes=changes)
    assert decide(*quiet_for(60, job=seen)).run.current.stop_cause is None


@pytest.mark.parametrize("secondary", ["Starting", "Pending", "Downloading", "Uploading", "Interrupted", "Stopping"])
def test_only_a_job_in_training_can_be_silent(secondary):
    assert decide(*quiet_for(600, job=job(secondary=secondary))).run.current.stop_cause is None


def test_a_job_stopped_for_its_silence_is_a_lost_platform_and_the_next_attempt_comes_after_it_has_ended():
    stopping = attempt(stop_cause="silent")
    waiting = decide(run(attempts=(stopping,)), facts(job=job(status="Stopping", secondary="Stopping")))
    assert (waiting.run.status, waiting.run.current.is_settled, waiting.actions) == (S.TRAINING, False, ())
    seen = after(ended_job("Stopped"), attempts=(stopping,))
    assert (seen.status, seen.current.failure.failure_class) == (S.RECOVERING, FC.PLATFORM)
    assert seen.current.outcome == "failed"


def test_a_job_that_completes_while_it_is_stopped_for_silence_has_completed():
    assert after(ended_job("Completed"), attempts=(attempt(stop_cause="silent"),)).status == S.EVALUATING


# ---------------------------------------------------------------------------------------------------- cancel


@pytest.mark.parametrize("status", [S.SUBMITTED, S.QUEUED, S.PLANNING])
def test_cancel_before_the_first_job_ends_the_run_at_once(status):
    decision = decide(run(status=status, attempts=()), facts(command=cancel()))
    assert (decision.run.verdict, decision.run.reason, decision.actions) == ("stopped", "cancelled by its user", ())


@pytest.mark.parametrize("status", [S.RECOVERING, S.QUEUED, S.EVALUATING])
def test_cancel_between_two_jobs_ends_the_run_at_once(status):
    decided = decide(run(status=status, attempts=(ended_attempt(1),)), facts(command=cancel())).run
    assert (decided.verdict, decided.attempts) == ("stopped", (ended_attempt(1),))


def test_cancel_before_the_launch_settles_the_attempt_and_pays_nothing():
    planned = run(attempts=(attempt(launched_at=None),))
    decided = decide(planned, facts(command=cancel(), job_is_missing=True)).run
    assert (decided.verdict, decided.current.outcome, decided.current.billed_s) == ("stopped", "stopped", 0)


def test_cancel_in_training_stops_the_job_and_waits_for_its_end():
    decision = decide(run(), facts(command=cancel(), job=job()))
    assert (decision.run.verdict, decision.run.stop_requested) == (None, "cancelled by its user")
    assert decision.actions == (StopJob(attempt().job_name),)
    ended = decide(decision.run, facts(job=ended_job("Stopped"), newest_step=7)).run
    assert (ended.verdict, ended.current.outcome, ended.current.checkpoint_step) == ("stopped", "stopped", 7)


@pytest.mark.parametrize("reason", ["InternalServerError: …", own_failure("memory"), CAPACITY])
def test_a_cancelled_run_whose_job_fails_is_stopped_and_not_tried_again(reason):
    assert after(failed_job(reason), stop_requested="cancelled by its user").verdict == "stopped"


def test_a_second_cancel_and_one_of_a_final_run_change_nothing():
    once = decide(run(), facts(command=cancel(), job=job())).run
    assert decide(once, facts(command=cancel(), job=job())).run == once
    final = run(status=S.COMPLETED, verdict="completed")
    assert decide(final, facts(command=cancel())).run == final


def test_cancel_after_the_verdict_does_not_change_it():
    assert decide(run(status=S.EVALUATING, verdict="completed"), facts(command=cancel())).run.verdict == "completed"


# ------------------------------------------------------------------------------------------------- executions


@pytest.mark.parametrize("status", ["FAILED", "TIMED_OUT", "ABORTED"])
def test_an_execution_that_died_is_taken_up_under_the_next_name(status):
    decision = decide(run(), facts(job=job(), execution=ExecutionFacts(RUN_ID, status)))
    assert (decision.run.execution, decision.run.executions) == (f"{RUN_ID}-e2", 2)
    assert decision.actions == (StartExecution(),)


def test_the_death_of_an_earlier_execution_is_no_news():
    second = run(execution=f"{RUN_ID}-e2", executions=2)
    assert decide(second, facts(execution=ExecutionFacts(RUN_ID, "FAILED"))) == decide(second, facts())


def test_an_execution_that_was_never_started_is_started_under_its_own_name():
    decision = decide(run(), facts(execution=ExecutionFacts(RUN_ID, "MISSING")))
    assert (decision.run, decision.actions) == (run(), (StartExecution(),))


@pytest.mark.parametrize("status", ["RUNNING", "SUCCEEDED", "PENDING_REDRIVE"])
def test_an_execution_that_lives_or_is_done_is_left_alone(status):
    decision = decide(run(), facts(execution=ExecutionFacts(RUN_ID, status)))
    assert (decision.run, decision.actions) == (run(), ())


@pytest.mark.parametrize("status", ["FAILED", "ABORTED", "MISSING"])
def test_a_run_with_a_verdict_and_no_execution_to_close_it_is_closed(status):
    decision = decide(run(verdict="failed"), facts(execution=ExecutionFacts(RUN_ID, status)))
    assert (decision.run.executions, decision.actions) == (1, (CloseRun(),))


def test_after_ten_executions_that_died_the_run_fails_and_says_where_to_look():
    died = run()
    for _ in range(MAX_EXECUTIONS):
        assert died.verdict is None
        died = decide(died, facts(execution=ExecutionFacts(died.execution, "FAILED"))).run
    assert (died.verdict, died.execution) == ("failed", f"{RUN_ID}-e{MAX_EXECUTIONS}")
    assert "died 10 times" in died.reason


def test_a_verdict_in_the_same_look_as_the_death_closes_the_run_instead_of_starting_again():
    decision = decide(run(), facts(job=ended_job("Stopped"), execution=ExecutionFacts(RUN_ID, "ABORTED")))
    assert (decision.run.verdict, decision.run.executions, decision.actions) == ("stopped", 1, (CloseRun(),))


# ------------------------------------------------------------------------------- leftovers, answers, the last word


def test_the_job_of_a_final_run_is_stopped_and_the_run_stays_as_it_is():
    final = run(status=S.FAILED, verdict="failed")
    decision = decide(final, facts(job=job()))
    assert (decision.run, decision.actions) == (final, (StopJob(attempt().job_name),))


def test_a_final_run_is_neither_closed_nor_started_again_by_the_death_of_its_execution():
    final = run(status=S.COMPLETED, verdict="completed")
    decision = decide(final, facts(execution=ExecutionFacts(RUN_ID, "FAILED"), command=cancel()))
    assert (decision.run, decision.actions) == (final, ())


def test_a_job_launched_while_its_run_was_stopped_is_stopped_too():
    stopped = run(verdict="stopped", attempts=(attempt(outcome="stopped"),))
    assert decide(stopped, facts(job=job())).actions == (StopJob(attempt().job_name),)


@pytest.mark.parametrize("status", ["Stopping", "Completed", "Stopped", "Failed"])
def test_a_job_that_stops_or_has_ended_is_not_asked_to_stop_again(status):
    assert decide(run(verdict="stopped"), facts(job=job(status=status))).actions == ()


TRAIN = WaitingState("train", "token", RUN_ID, attempt=1)
ADMIT = WaitingState("admit", "token", RUN_ID)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"status": S.EVALUATING, "attempts": (attempt(outcome="completed"),)}, "completed"),
        ({"status": S.RECOVERING, "attempts": (ended_attempt(1),)}, "plan"),
        ({"status": S.QUEUED, "attempts": (ended_attempt(1),)}, "admit"),
        ({"status": S.RECOVERING, "attempts": (ended_attempt(1), attempt(2))}, None),
        ({"status": S.RECOVERING, "attempts": (ended_attempt(1), ended_attempt(2))}, None),
        ({"verdict": "failed"}, "failed"),
        ({"verdict": "stopped"}, "stopped"),
        ({"status": S.COMPLETED, "verdict": "completed"}, "completed"),
        ({"attempts": ()}, None),
    ],
)
def test_train_is_told_what_became_of_its_own_attempt_and_nothing_sooner(changes, word):
    assert answer(run(**changes), TRAIN, holds_slot=False) == word


@pytest.mark.parametrize(
    ("changes", "holds", "word"),
    [
        ({"status": S.QUEUED}, False, None),
        ({"status": S.QUEUED}, True, None),
        ({"status": S.PLANNING}, True, "admitted"),
        ({"status": S.TRAINING}, True, "admitted"),
        ({"status": S.TRAINING}, False, None),
        ({"status": S.QUEUED, "verdict": "stopped"}, False, "stopped"),
        ({"status": S.COMPLETED, "verdict": "completed"}, False, "completed"),
    ],
)
def test_admit_is_told_once_the_run_has_its_slot_and_has_left_the_queue(changes, holds, word):
    assert answer(run(**changes), ADMIT, holds_slot=holds) == word


def test_closing_gives_the_verdict_as_status_and_keeps_its_reason():
    ended = closed(run(verdict="stopped", reason="cancelled by its user"), NOW, "an error of the machine")
    assert (ended.status, ended.reason, ended.ended_at) == (S.STOPPED, "cancelled by its user", NOW)


def test_closing_without_a_verdict_is_a_failure_with_the_error_of_the_machine():
    ended = closed(run(), NOW, "AccessDenied: s3:PutObject")
    assert (ended.status, ended.reason, ended.failure.failure_class) == (
        S.FAILED,
        "AccessDenied: s3:PutObject",
        FC.PLATFORM,
    )
    assert closed(run(), NOW).reason == "its execution ended without an outcome"


def test_closing_twice_changes_nothing():
    once = closed(run(verdict="completed", status=S.EVALUATING), NOW)
    assert closed(once, NOW + timedelta(days=1), "late") == once


def test_a_verdict_from_outside_does_not_replace_one_there_is():
    assert fail_run(run(verdict="stopped"), "late").verdict == "stopped"
    failed = fail_run(run(), "no plan", FC.USER)
    assert (failed.verdict, failed.failure) == ("failed", FailureNote(failure_class=FC.USER, message="no plan"))


def test_a_refusal_and_a_failure_are_told_apart_by_what_they_cost():
    refused = decide(run(), facts(refusal=Failure(FC.PLATFORM, "try again"))).run
    assert (refused.status, refused.current.billed_s, refused.current.training_s) == (S.RECOVERING, 0, 0)
