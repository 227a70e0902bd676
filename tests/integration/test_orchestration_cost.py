"""What steering a run costs: counted from a real execution of the very state machine, and held against the goal."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.orchestration import PRICES, path_of

if TYPE_CHECKING:
    from microtuning_core.domain.cost import Charge, LedgerEntry
    from microtuning_core.domain.run import Run
    from tests.integration.conftest import StageUnderTest

GOAL_USD = Decimal("0.005")


def orchestration(stage: StageUnderTest, run: Run) -> list[LedgerEntry]:
    entries = stage.services.ledger.month(run.tenant, f"{run.ended_at:%Y-%m}", run.run_id)
    return [each for each in entries if each.line == "orchestration"]


def history(stage: StageUnderTest, run: Run) -> list[dict[str, Any]]:
    pages = stage.client("stepfunctions").get_paginator("get_execution_history")
    arn = stage.names.execution_arn(run.execution)
    return [event for page in pages.paginate(executionArn=arn) for event in page["events"]]


def by_name(entry: LedgerEntry) -> dict[str, Charge]:
    return {charge.name: charge for charge in entry.charges}


def test_a_run_with_one_recovery_is_steered_for_less_than_the_goal(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit("platform_once"))
    assert (run.status, len(run.attempts)) == ("completed", 2)
    (entry,) = orchestration(stage, run)
    charges = by_name(entry)
    entered = [each for each in history(stage, run) if each["type"].endswith("StateEntered")]
    assert charges["transitions"].quantity == len(entered) + 2
    assert Counter(each["stateEnteredEventDetails"]["name"] for each in entered)["Train"] == 2
    assert entry.amount_usd == sum(each.amount_usd for each in entry.charges)
    assert all(each.unit_price_usd == PRICES[each.name].usd for each in entry.charges)
    assert entry.amount_usd <= GOAL_USD
    assert run.cost_usd is not None
    assert run.cost_usd >= entry.amount_usd


def test_the_end_of_an_execution_told_again_is_counted_once(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit())
    before = orchestration(stage, run)
    detail = {"name": run.execution, "executionArn": stage.names.execution_arn(run.execution), "status": "SUCCEEDED"}
    event = {"detail-type": "Step Functions Execution Status Change", "detail": detail, "time": "2026-01-02T03:04:05Z"}
    assert stage.deliver("on_execution_ended", event, event) == []
    assert orchestration(stage, run) == before
    assert stage.run(run.run_id) == run


def test_the_path_is_the_one_in_the_history(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit())
    path = path_of(stage.services.executions.history(run.execution))
    assert path is not None
    assert dict(path.entered) == {
        "Admit run": 1, "Plan attempt": 1, "Train": 1, "What happened?": 1, "Register model": 1, "Close run": 1,
        "How did it end?": 1, "Completed": 1,
    }  # fmt: skip
    assert (dict(path.retries), path.transitions) == ({}, 10)
