"""What steering costs: transitions as AWS counts them, and nothing that is counted twice or less than nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.orchestration import (
    FUNCTION_OF_STATE,
    HANDLER_MS,
    PRICES,
    HistoryEvent,
    Path,
    execution_entry,
    invocations,
    path_of,
    quantities,
    saved_quantities,
)
from microtuning_core.domain.run import Attempt, Metered, Run, new_run
from tests.unit.records import RUN_ID, a_cpu_plan, a_spec

BEGAN = datetime(2026, 1, 2, 23, 50, tzinfo=UTC)
GOAL_USD = Decimal("0.005")
ONE_RECOVERY = [
    "Admit run", "Plan attempt", "Train", "What happened?", "Plan attempt", "Train", "What happened?",
    "Register model", "Close run", "How did it end?", "Completed",
]  # fmt: skip


def events(states: list[str], *, retried: tuple[str, ...] = (), ended: bool = True) -> list[HistoryEvent]:
    found = [HistoryEvent("ExecutionStarted", BEGAN)]
    for number, state in enumerate(states):
        at = BEGAN + timedelta(minutes=number)
        found.append(HistoryEvent("TaskStateEntered", at, state))
        found += [HistoryEvent("TaskScheduled", at)] * (2 if state in retried else 1)
    return [*found, HistoryEvent("ExecutionSucceeded", BEGAN + timedelta(hours=1))] if ended else found


def attempt(number: int, **changes) -> Attempt:
    facts = {
        "attempt": number, "job_name": f"prod-{RUN_ID}-a{number:03d}", "lineage": 1, "plan": a_cpu_plan(),
        "created_at": BEGAN + timedelta(minutes=number), "training_s": 600,
        "metered": Metered(saves=10, saved_files=120, step=100, steps_done=100),
    }  # fmt: skip
    return Attempt(**(facts | changes))


def run(**changes) -> Run:
    return new_run(RUN_ID, a_spec(), BEGAN).with_(revision=60, **changes)


def path(states: list[str], **more) -> Path:
    found = path_of(events(states, **more))
    assert found is not None
    return found


def test_every_state_every_retry_the_start_and_the_end_are_transitions():
    assert path(ONE_RECOVERY).transitions == len(ONE_RECOVERY) + 2
    retried = path(ONE_RECOVERY, retried=("Register model",))
    assert (retried.transitions, retried.invocations()["register_model"]) == (len(ONE_RECOVERY) + 3, 2)
    assert retried.invocations()["plan_attempt"] == retried.invocations()["launch_training"] == 2


def test_an_execution_that_goes_on_has_no_path_yet():
    assert path_of(events(ONE_RECOVERY[:3], ended=False)) is None
    assert path_of([]) is None


def test_a_run_with_one_recovery_of_twenty_minutes_is_steered_for_less_than_the_goal():
    two = run(attempts=(attempt(1), attempt(2)))
    amounts = quantities(two, path(ONE_RECOVERY), record_bytes=6000, writes=170)  # a sign every 10 s, and 50 others
    entry = execution_entry(two, 1, "orchestration", path(ONE_RECOVERY), amounts)
    assert entry is not None
    assert entry.amount_usd == sum(each.amount_usd for each in entry.charges)
    assert Decimal("0.001") < entry.amount_usd < GOAL_USD
    assert (entry.id, entry.state) == (f"{RUN_ID}#e01#orchestration#2026-01-03", "final")


def test_only_the_attempts_of_an_execution_are_counted_for_it():
    before = attempt(1, created_at=BEGAN - timedelta(hours=1))
    one, both = (invocations(run(), path(ONE_RECOVERY), given) for given in ([attempt(2)], [attempt(2), attempt(3)]))
    assert both["on_training_event"] == 2 * one["on_training_event"]
    two = run(attempts=(before, attempt(2)))
    amounts = quantities(two, path(ONE_RECOVERY), record_bytes=6000, writes=1)
    alone = quantities(run(attempts=(attempt(2),)), path(ONE_RECOVERY), record_bytes=6000, writes=1)
    assert amounts == alone


def test_every_function_has_its_milliseconds():
    assert set(FUNCTION_OF_STATE.values()) <= set(HANDLER_MS)
    busy = invocations(run(obeyed=("c1",)), path(ONE_RECOVERY), [attempt(1)])
    assert set(busy) == set(HANDLER_MS)


def test_what_was_saved_has_a_line_of_its_own():
    saved = Metered(saves=2, saved_files=24, saved_bytes=36 * 10**9)
    two = run(attempts=(attempt(1, metered=saved),))
    amounts = saved_quantities(two, path(ONE_RECOVERY))  # of an hour: the 720th part of a month
    assert amounts == {"checkpoint writes": 24, "checkpoint events": 24, "checkpoint storage": Decimal("0.05")}
    entry = execution_entry(two, 1, "objects", path(ONE_RECOVERY), amounts)
    assert entry is not None
    assert entry.amount_usd == Decimal("0.001294")
    nothing = saved_quantities(run(), path(ONE_RECOVERY))
    assert execution_entry(run(), 1, "objects", path(ONE_RECOVERY), nothing) is None


@given(
    st.lists(st.sampled_from(ONE_RECOVERY), max_size=40),
    st.integers(0, 500_000),
    st.integers(0, 10_000),
    st.none() | st.integers(0, 10**6),
)
def test_no_amount_is_negative_and_more_of_something_never_costs_less(states, record_bytes, writes, training_s):
    one = run(attempts=(attempt(1, training_s=training_s),))
    less = quantities(one, path(states), record_bytes=record_bytes, writes=writes)
    more = quantities(one, path([*states, "Train"]), record_bytes=record_bytes, writes=writes + 1)
    assert set(less) | set(saved_quantities(one, path(states))) == set(PRICES)
    assert all(0 <= less[name] <= more[name] for name in less)
