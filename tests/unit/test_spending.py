"""Where the money went: steps that were kept, done again and lost, and machine time that adds up to what was billed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.run import Attempt, CheckpointRef, Metered, Run, new_run
from microtuning_core.domain.spending import (
    Steps,
    added,
    entry_days,
    model_of,
    outcome_ms,
    steps_by_attempt,
    utilisation,
)
from tests.unit.records import RUN_ID, a_cpu_plan, a_spec

NOW = datetime(2026, 1, 31, 23, 30, tzinfo=UTC)


def attempt(number: int, reached: int, checkpoint: int | None, outcome: str | None = "failed", **changes) -> Attempt:
    facts = {
        "attempt": number, "job_name": f"prod-{RUN_ID}-a{number:03d}", "lineage": 1, "plan": a_cpu_plan(),
        "created_at": NOW, "outcome": outcome, "checkpoint_step": checkpoint,
        "metered": Metered(step=reached, steps_done=changes.pop("done", 0)),
    }  # fmt: skip
    return Attempt(**(facts | changes))


def run(*attempts: Attempt, **changes) -> Run:
    return new_run(RUN_ID, a_spec(), NOW).with_(attempts=attempts, **changes)


def test_steps_after_the_last_checkpoint_are_wasted_and_doing_them_again_is_what_recovery_costs():
    found = steps_by_attempt(run(attempt(1, 70, 50), attempt(2, 100, 100, "completed")))
    assert found == {1: Steps(useful=50, wasted=20), 2: Steps(useful=30, recovered=20)}


def test_a_second_loss_before_the_first_is_made_up_for():
    found = steps_by_attempt(run(attempt(1, 70, 50), attempt(2, 60, 55), attempt(3, 80, 80, "completed")))
    assert found[2] == Steps(recovered=5, wasted=5)
    assert found[3] == Steps(useful=10, recovered=15)


def test_a_worker_that_was_started_again_in_place_wasted_what_it_did_twice():
    found = steps_by_attempt(run(attempt(1, 100, 100, "completed", done=112)))
    assert found == {1: Steps(useful=100, wasted=12)}


def test_all_of_an_attempt_without_a_checkpoint_is_lost_and_one_that_runs_counts_as_kept():
    assert steps_by_attempt(run(attempt(1, 30, None))) == {1: Steps(wasted=30)}
    assert steps_by_attempt(run(attempt(1, 30, None, None))) == {1: Steps(useful=30)}
    assert steps_by_attempt(run(attempt(1, 0, None, metered=None))) == {1: Steps()}


def test_a_new_lineage_begins_where_it_was_taken_up():
    second = attempt(2, 90, 90, "completed", lineage=2)
    found = steps_by_attempt(run(attempt(1, 70, 60), second, lineage=2, resume_from=CheckpointRef(lineage=1, step=40)))
    assert found[2] == Steps(useful=50)


def test_machine_time_goes_to_the_phases_that_make_steps_and_the_rest_is_idle():
    phases = {"load": 2000, "rollout": 3000, "update": 5000, "idle": 1000}
    assert outcome_ms(phases, 15_000, Steps(useful=6, recovered=1, wasted=1)) == {
        "useful": 6000, "recovered": 1000, "wasted": 1000, "idle": 7000,
    }  # fmt: skip


def test_spot_bills_less_than_it_worked_and_all_parts_shrink_alike():
    assert outcome_ms({"update": 8000, "load": 2000}, 5000, Steps(useful=4)) == {
        "useful": 4000, "recovered": 0, "wasted": 0, "idle": 1000,
    }  # fmt: skip


def test_progress_over_billed_time_is_the_utilisation():
    assert utilisation({"useful": 60, "recovered": 10, "wasted": 10, "idle": 20}) == 0.7
    assert utilisation({}) is None


def test_entries_may_lie_on_the_day_after_the_end_and_no_later():
    ended = run(ended_at=NOW + timedelta(hours=1))
    assert [day.isoformat() for day in entry_days(ended, NOW + timedelta(days=99))] == ["2026-01-31", "2026-02-02"]


@pytest.mark.parametrize(
    ("model", "name"), [({"arch": "Transformer"}, "Transformer"), ({"base": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B")]
)
def test_a_model_is_called_as_its_user_calls_it(model, name):
    assert model_of(new_run(RUN_ID, a_spec(model=model), NOW)) == name


COUNTS = st.integers(0, 10**6)
PHASES = st.dictionaries(st.sampled_from(["load", "rollout", "reward", "update", "checkpoint", "idle"]), COUNTS)


@given(PHASES, COUNTS, COUNTS, COUNTS, COUNTS)
def test_outcomes_add_up_to_what_was_billed_and_none_is_negative(phases, billed_ms, useful, recovered, wasted):
    parts = outcome_ms(phases, billed_ms, Steps(useful, recovered, wasted))
    assert sum(parts.values()) == billed_ms
    assert all(part >= 0 for part in parts.values())
    assert sum(added([parts, parts]).values()) == 2 * billed_ms


@given(st.lists(st.tuples(st.integers(0, 200), st.none() | st.integers(0, 200), st.integers(0, 400)), max_size=6))
def test_steps_that_are_kept_are_the_steps_of_the_model(history):
    attempts, furthest = [], 0
    for number, (reached, saved, done) in enumerate(history, 1):
        begins = furthest
        reached = max(reached, begins)
        furthest = max(begins, min(reached, saved or 0))
        attempts.append(attempt(number, reached, furthest or None, done=done))
    found = steps_by_attempt(run(*attempts))
    assert sum(each.useful + each.recovered for each in found.values()) == furthest
    assert all(min(each.useful, each.recovered, each.wasted) >= 0 for each in found.values())
