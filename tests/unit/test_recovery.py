"""The five stages of every recovery, put together from what machines, SageMaker and our own tables say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.mirror import LATE_AFTER, checkpoint_age, looked_at, mirror_is_late, mirror_lag
from microtuning_core.domain.progress import Progress, Restart, Start, Written
from microtuning_core.domain.recovery import newly_complete, recoveries, total_ms
from microtuning_core.domain.run import (
    Attempt,
    CheckpointRef,
    FailureNote,
    Liveness,
    Recovery,
    Run,
    RunStatus,
    new_run,
)
from microtuning_core.usecases.checkpoint import with_progress
from tests.unit.records import RUN_ID, a_cpu_plan, a_spec

BEGAN = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
SPEC = a_spec()
PLAN = a_cpu_plan(max_runtime_s=60)
LOST = FailureNote(failure_class=FailureClass.PLATFORM, message="InternalServerError")


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def attempt(number: int, **facts) -> Attempt:
    made = {
        "attempt": number,
        "job_name": f"prod-{RUN_ID}-a{number:03d}",
        "lineage": 1,
        "plan": PLAN,
        "created_at": BEGAN,
    }
    return Attempt(**(made | facts))


def training(*attempts: Attempt, **changes) -> Run:
    facts = {"status": RunStatus.TRAINING, "attempts": attempts}
    return new_run(RUN_ID, SPEC, BEGAN).with_(**(facts | changes))


FAILED = attempt(
    1, launched_at=at(0), started_at=at(10), ended_at=at(100), settled_at=at(102), outcome="failed", failure=LOST
)
BACK = attempt(
    2, launched_at=at(105), started_at=at(165), starts=(Start(at=at(170), restore_ms=4000, first_step_ms=300),)
)


def test_an_attempt_that_follows_a_failed_one_has_all_five_stages():
    (recovery,) = recoveries(training(FAILED, BACK))
    assert recovery == Recovery(
        cause="platform",
        at=at(100),
        detect_ms=2000,
        decide_ms=3000,
        provision_ms=60_000,
        restore_ms=4000,
        first_step_ms=300,
    )
    assert total_ms(recovery) == 69_300


def test_stages_that_have_not_come_are_none():
    assert recoveries(training(FAILED)) == []  # nothing has been tried yet
    (asked,) = recoveries(training(FAILED, attempt(2, launched_at=at(105))))
    assert (asked.decide_ms, asked.provision_ms, asked.restore_ms, total_ms(asked)) == (3000, None, None, None)
    (given,) = recoveries(training(FAILED, attempt(2, launched_at=at(105), started_at=at(165))))
    assert (given.provision_ms, given.restore_ms) == (60_000, None)


def test_what_was_refused_between_counts_as_waiting_for_a_machine():
    refused = attempt(
        2,
        launched_at=None,
        created_at=at(103),
        ended_at=at(103),
        settled_at=at(103),
        outcome="failed",
        failure=FailureNote(failure_class=FailureClass.CAPACITY, message="none"),
    )
    (recovery,) = recoveries(training(FAILED, refused, BACK.model_copy(update={"attempt": 3})))
    assert (recovery.decide_ms, recovery.provision_ms) == (1000, 62_000)


def test_a_worker_that_dies_before_its_first_step_leaves_it_to_the_worker_after_it():
    restart = Recovery(
        cause="out of memory", at=at(171), detect_ms=0, decide_ms=4, provision_ms=6, restore_ms=100, first_step_ms=890
    )
    starts = (Start(at=at(170), restore_ms=4000),)
    (first, again) = recoveries(training(FAILED, BACK.model_copy(update={"starts": starts, "recoveries": (restart,)})))
    assert (first.restore_ms, first.first_step_ms) == (4000, 2000)  # trains from 170 on, steps at 172
    assert again == restart
    (waiting, _) = recoveries(
        training(
            FAILED,
            BACK.model_copy(
                update={"starts": starts, "recoveries": (restart.model_copy(update={"first_step_ms": None}),)}
            ),
        )
    )
    assert waiting.first_step_ms is None


def test_a_machine_that_is_lost_before_its_first_step_leaves_it_to_the_next():
    gone = {"starts": (), "ended_at": at(168), "settled_at": at(169), "outcome": "failed", "failure": LOST}
    third = attempt(
        3, launched_at=at(172), started_at=at(200), starts=(Start(at=at(204), restore_ms=3500, first_step_ms=250),)
    )
    first, second = recoveries(training(FAILED, BACK.model_copy(update=gone), third))
    assert (first.provision_ms, first.restore_ms, first.first_step_ms) == (95_000, 3500, 250)
    assert (second.provision_ms, second.restore_ms, second.first_step_ms) == (28_000, 3500, 250)


@pytest.mark.parametrize("outcome", ["completed", "stopped"])
def test_an_attempt_that_did_not_fail_is_nothing_to_recover_from(outcome):
    ended = FAILED.model_copy(update={"outcome": outcome, "failure": None})
    assert recoveries(training(ended, BACK)) == []


def test_clocks_that_differ_make_no_stage_negative():
    early = FAILED.model_copy(update={"settled_at": at(99)})
    (recovery,) = recoveries(training(early, BACK))
    assert recovery.detect_ms == 0


def test_an_interruption_ends_with_the_first_start_after_it():
    taken = Recovery(cause="interrupted", at=at(50), provision_ms=20_000)
    starts = (
        Start(at=at(12), restore_ms=900, first_step_ms=100),
        Start(at=at(72), restore_ms=1000, first_step_ms=110),
        Start(at=at(200), restore_ms=1100, first_step_ms=120),
    )
    (recovery,) = recoveries(training(attempt(1, started_at=at(10), recoveries=(taken,), starts=starts)))
    assert (recovery.provision_ms, recovery.restore_ms, recovery.first_step_ms) == (20_000, 1000, 110)


def progress(**facts) -> Progress:
    made = {"run_id": RUN_ID, "attempt": 2, "lineage": 1, "step": 7, "total_steps": 9, "at": at(180)}
    return Progress(**(made | facts))


def test_a_recovery_is_new_once():
    before = training(FAILED, BACK.model_copy(update={"starts": ()}))
    loading = with_progress(before, progress(starts=(Start(at=at(170), restore_ms=4000),)))
    assert newly_complete(before, loading) == []
    stepped = with_progress(loading, progress(starts=BACK.starts, at=at(181)))
    (ended,) = newly_complete(loading, stepped)
    assert ended.first_step_ms == 300
    assert newly_complete(stepped, with_progress(stepped, progress(starts=BACK.starts, step=8, at=at(190)))) == []


def test_a_restart_in_place_stands_beside_the_others_in_the_order_of_failures():
    restart = Restart(cause="killed by signal 9", at=at(175), detect_ms=1, decide_ms=2, provision_ms=3, restore_ms=4)
    run = with_progress(training(FAILED, BACK), progress(starts=BACK.starts, restarts=(restart,)))
    assert [each.cause for each in recoveries(run)] == ["platform", "killed by signal 9"]


# --- whether what a machine saves arrives ---------------------------------------------------------------------------


def seen(step: int = 7, at_s: float = 60, saved: Written | None = None) -> Liveness:
    return Liveness(at=at(at_s), step=step, checkpoint=saved)


TRAINS = attempt(1, launched_at=at(0), started_at=at(10))
LATE_S = LATE_AFTER.total_seconds()


def test_a_mirror_that_brings_everything_lags_by_what_has_passed_since_it_last_did():
    run = training(TRAINS, liveness=seen(at_s=60))
    assert mirror_lag(run, at(90)) == timedelta(seconds=30)
    assert not mirror_is_late(run, at(90))


def test_a_checkpoint_that_is_on_the_machine_and_never_registered_is_late():
    saved = Written(step=4, at=at(60))
    run = training(TRAINS, liveness=seen(at_s=60 + LATE_S, saved=saved))
    late = at(61 + LATE_S)
    assert mirror_is_late(run, late)
    assert not mirror_is_late(run.with_(last_checkpoint=CheckpointRef(lineage=1, step=4)), late)


def test_a_mirror_that_stopped_altogether_is_late_since_it_was_last_heard():
    assert mirror_is_late(training(TRAINS, liveness=seen(at_s=60)), at(61 + LATE_S))
    assert mirror_is_late(training(TRAINS), at(11 + LATE_S))


def test_slow_steps_are_given_their_time():
    slow = seen(at_s=60).model_copy(update={"longest_step_ms": 1000 * 1200})
    assert not mirror_is_late(training(TRAINS, liveness=slow), at(61 + LATE_S))


@pytest.mark.parametrize("status", [RunStatus.QUEUED, RunStatus.RECOVERING, RunStatus.COMPLETED])
def test_nothing_is_late_while_nothing_trains(status):
    run = training(TRAINS, status=status, liveness=seen())
    assert mirror_lag(run, at(10**6)) == timedelta() and checkpoint_age(run, at(10**6)) is None


def test_a_later_attempt_does_not_inherit_what_the_one_before_it_lost():
    lost = seen(saved=Written(step=4, at=at(60)))
    run = training(FAILED, attempt(2, launched_at=at(9000), started_at=at(9000)), liveness=lost)
    assert mirror_lag(run, at(9005)) == timedelta(seconds=5)


def test_the_age_of_a_checkpoint_is_what_a_lost_machine_would_cost():
    assert checkpoint_age(training(TRAINS), at(70)) == timedelta(seconds=60)
    assert checkpoint_age(training(TRAINS, checkpointed_at=at(50)), at(70)) == timedelta(seconds=20)


def test_since_when_a_mirror_is_late_is_kept_until_it_brings_something():
    run = training(TRAINS, liveness=seen(at_s=60))
    late = looked_at(run, at(100 + LATE_S))
    assert late.mirror_late_since == at(60)
    assert looked_at(late, at(500 + LATE_S)) == late
    assert looked_at(late.with_(liveness=seen(at_s=400 + LATE_S)), at(500 + LATE_S)).mirror_late_since is None
