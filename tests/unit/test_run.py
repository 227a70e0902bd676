"""The record of a run: its transitions, its newest attempt, and what it looks like in JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from pydantic import ValidationError

from microtuning_core.domain.errors import IllegalTransition
from microtuning_core.domain.run import FINAL, TRANSITIONS, Attempt, Run, RunStatus, new_run
from tests.unit.records import RUN_ID, a_cpu_plan, a_spec

NOW = datetime(2026, 1, 2, 3, 4, 5, 678900, tzinfo=UTC)
SPEC = a_spec()
ALL = list(RunStatus)


def run(**changes) -> Run:
    return new_run(RUN_ID, SPEC, NOW).with_(**changes)


def attempt(number: int = 1, **changes) -> Attempt:
    plan = a_cpu_plan(spot=True)
    facts = {"job_name": f"prod-{RUN_ID}-a{number:03d}", "lineage": 1, "plan": plan, "created_at": NOW}
    return Attempt(attempt=number, **(facts | changes))


def test_a_new_run_is_submitted_under_its_own_name_as_execution():
    assert (run().status, run().execution, run().tenant, run().revision) == ("submitted", RUN_ID, "acme", 0)
    assert new_run(RUN_ID, SPEC, NOW, execution="by-hand").execution == "by-hand"


@pytest.mark.parametrize("current", ALL)
@pytest.mark.parametrize("wanted", ALL)
def test_only_listed_transitions_are_made(current, wanted):
    if wanted == current or wanted in TRANSITIONS[current]:
        assert run(status=current).moved_to(wanted, reason="r").reason == "r"
    else:
        with pytest.raises(IllegalTransition, match=f"is {current} and cannot become {wanted}"):
            run(status=current).moved_to(wanted)


def test_a_final_status_leads_only_back_to_the_queue_and_every_other_can_fail_or_be_stopped():
    assert {status for status in ALL if TRANSITIONS[status] == {RunStatus.QUEUED}} - {RunStatus.SUBMITTED} == FINAL
    for status in set(ALL) - FINAL:
        assert {RunStatus.FAILED, RunStatus.STOPPED} <= TRANSITIONS[status]


def test_only_an_evaluated_run_completes():
    assert [status for status in ALL if RunStatus.COMPLETED in TRANSITIONS[status]] == [RunStatus.EVALUATING]


def test_a_change_of_the_newest_attempt_leaves_the_others():
    two = run(attempts=(attempt(1, outcome="failed"), attempt(2)))
    changed = two.with_current(outcome="completed")
    assert (changed.attempts[0], changed.attempts[1].outcome) == (two.attempts[0], "completed")
    assert (run().current, changed.current) == (None, changed.attempts[1])


def test_costs_are_final_when_every_attempt_that_became_a_job_has_its_final_amount():
    never, estimated = attempt(1), attempt(2, launched_at=NOW, cost_state="estimate")
    final = estimated.model_copy(update={"cost_state": "final"})
    costed = run(executions_costed=1)
    assert costed.costs_are_final
    assert costed.with_(attempts=(never,)).costs_are_final
    assert not costed.with_(attempts=(never, estimated)).costs_are_final
    assert costed.with_(attempts=(never, final)).costs_are_final


def test_costs_are_final_when_what_steered_the_run_is_in_the_ledger_too():
    assert not run().costs_are_final
    assert not run(executions=2, executions_costed=1).costs_are_final
    assert run(executions=2, executions_costed=2).costs_are_final
    assert run(executions_costed=None).costs_are_final  # of before it was counted


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"status": RunStatus.QUEUED, "not_before": NOW + timedelta(seconds=1)}, True),
        ({"status": RunStatus.QUEUED, "not_before": NOW}, False),
        ({"status": RunStatus.QUEUED}, False),
        ({"status": RunStatus.PLANNING, "not_before": NOW + timedelta(seconds=1)}, False),
    ],
)
def test_a_run_waits_out_a_lack_of_capacity_only_in_the_queue_and_before_its_time(changes, waits):
    assert run(**changes).waits_out(NOW) is waits


def test_a_stored_run_reads_back_the_same_with_utc_times_and_exact_money():
    whole = run(attempts=(attempt(1, launched_at=NOW, billed_s=7),), cost_usd=Decimal("0.000224"))
    text = whole.model_dump_json()
    assert Run.model_validate_json(text) == whole
    document = json.loads(text)
    assert (document["schema_version"], document["cost_usd"]) == (1, "0.000224")
    assert document["created_at"] == "2026-01-02T03:04:05.678900Z"


def test_a_field_that_nobody_knows_is_refused():
    document = json.loads(run().model_dump_json()) | {"colour": "red"}
    with pytest.raises(ValidationError, match="colour"):
        Run.model_validate(document)
