"""Which checkpoint a run is at, and what its progress says: news may come late, twice and in any order."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.manifest import newest_first
from microtuning_core.domain.progress import Progress, ProgressMetrics, Restart
from microtuning_core.domain.run import Attempt, CheckpointRef, Recovery, Run, RunStatus, new_run
from microtuning_core.domain.settle import register_checkpoint
from microtuning_core.usecases.checkpoint import with_progress
from tests.unit.records import RUN_ID, a_cpu_plan, a_spec

CASES = Path(__file__).parents[1] / "cases"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SPEC = a_spec()


def run(**changes) -> Run:
    """In training, in its second attempt."""
    plan = a_cpu_plan(max_runtime_s=60)
    made = [
        Attempt(attempt=n, job_name=f"prod-{RUN_ID}-a{n:03d}", lineage=1, plan=plan, created_at=NOW) for n in (1, 2)
    ]
    return new_run(RUN_ID, SPEC, NOW).with_(**({"status": RunStatus.TRAINING, "attempts": tuple(made)} | changes))


def progress(step: int = 5, **changes) -> Progress:
    """Of the second attempt, a minute a step."""
    facts = {
        "run_id": RUN_ID,
        "attempt": 2,
        "lineage": 1,
        "step": step,
        "total_steps": 10,
        "at": NOW + timedelta(minutes=step),
        "longest_step_ms": 100,
        "metrics": ProgressMetrics(first={"loss": 2.0}, last={"loss": 1.0 / step}),
    }
    return Progress(**(facts | changes))


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=8))
def test_in_any_order_the_run_is_at_the_highest_step_by_number(steps):
    seen = run()
    for step in steps:
        seen = register_checkpoint(seen, 1, step)
    assert seen.last_checkpoint == CheckpointRef(lineage=1, step=max(steps))


def test_older_news_and_news_of_another_lineage_change_nothing():
    at_ten = run(lineage=2, last_checkpoint=CheckpointRef(lineage=2, step=10))
    for lineage, step in ((2, 10), (2, 9), (1, 500), (3, 11)):
        assert register_checkpoint(at_ten, lineage, step) == at_ten


def test_the_first_checkpoint_of_a_new_lineage_counts_though_the_old_one_was_further():
    forked = run(lineage=2, last_checkpoint=CheckpointRef(lineage=1, step=900))
    assert register_checkpoint(forked, 2, 0).last_checkpoint == CheckpointRef(lineage=2, step=0)


def test_the_checkpoints_of_run_1_are_not_those_of_run_10():
    case = json.loads((CASES / "c39_keys.json").read_text())
    prefix = "checkpoints/acme/run-1/"
    inside = [key for key in case["keys"] if key.startswith(prefix)]
    assert len(inside) == case["want"]["listed"] == case["want"]["deleted"]
    assert len(case["keys"]) - len(inside) == case["want"]["survivors_of_delete"]
    folders = [key.removeprefix(prefix).split("/")[0].replace("checkpoint-", "step-") for key in inside]
    assert newest_first(folders) == [f"step-{case['want']['latest_step']}"]


def test_progress_is_the_sign_of_life_with_step_and_metrics():
    seen = with_progress(run(), progress(5))
    assert (seen.liveness.at, seen.liveness.step, seen.liveness.total_steps) == (NOW + timedelta(minutes=5), 5, 10)
    assert (seen.liveness.longest_step_ms, seen.metrics.first, seen.metrics.last) == (100, {"loss": 2.0}, {"loss": 0.2})


def test_in_any_order_and_number_the_newest_progress_stays():
    news = [progress(step) for step in (1, 2, 3)]
    results = set()
    for order in permutations([*news, news[1]]):
        seen = run()
        for each in order:
            seen = with_progress(seen, each)
        results.add(seen.model_dump_json())
    assert len(results) == 1


@pytest.mark.parametrize("number", [1, 3])
def test_progress_of_another_attempt_changes_nothing(number):
    assert with_progress(run(), progress(attempt=number)) == run()


def test_progress_of_a_run_that_has_no_job_changes_nothing():
    assert with_progress(run(attempts=()), progress()) == run(attempts=())


def test_the_last_progress_of_a_run_may_come_after_its_end_and_leaves_that_as_it_is():
    over = run(status=RunStatus.COMPLETED, ended_at=NOW)
    told = with_progress(over, progress())
    assert (told.status, told.ended_at, told.attempts[0]) == (over.status, over.ended_at, over.attempts[0])
    assert told.liveness is not None and told.liveness.step == 5


def test_the_metrics_of_the_first_step_stay_those_of_the_first_attempt():
    again = progress(6, metrics=ProgressMetrics(first={"loss": 9.0}, last={"loss": 0.1}))
    assert with_progress(with_progress(run(), progress(5)), again).metrics.first == {"loss": 2.0}


def test_an_evaluation_that_was_told_once_is_not_forgotten():
    told = progress(1, metrics=ProgressMetrics(eval_before={"eval_loss": 2.0}))
    assert with_progress(with_progress(run(), told), progress(2)).metrics.eval_before == {"eval_loss": 2.0}


def test_restarts_in_place_are_recoveries_of_the_attempt_each_once_and_in_order():
    interrupted = Recovery(cause="interrupted", at=NOW + timedelta(minutes=2), provision_ms=9)
    restarts = tuple(Restart(cause="crash", at=NOW + timedelta(minutes=n), detect_ms=n) for n in (3, 1))
    began = run().with_current(recoveries=(interrupted,))
    once = with_progress(began, progress(4, restarts=restarts))
    twice = with_progress(once, progress(5, restarts=restarts))
    assert [each.cause for each in twice.current.recoveries] == ["crash", "interrupted", "crash"]
    assert twice.current.recoveries == once.current.recoveries
