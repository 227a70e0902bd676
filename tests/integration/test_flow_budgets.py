"""Budgets on the local cloud: a run saves and stops, and a raise lets it go on; a tenant's stops and holds all its runs."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from microtuning_core.domain.errors import CommandRefused
from microtuning_core.domain.tenants import TenantLimits
from microtuning_local import cloud as local
from microtuning_sdk import Run, Stage

if TYPE_CHECKING:
    from tests.integration.conftest import StageUnderTest

pytestmark = pytest.mark.cloud

SPENT_AT_ONCE = Decimal("0.0001")  # three seconds of the smallest machine


def handle(stage: StageUnderTest, run_id: str) -> Run:
    return Run(run_id, Stage(stage.names, stage.cloud))  # type: ignore[arg-type]  # a cloud makes clients


def test_a_run_over_its_budget_saves_and_stops_and_goes_on_after_a_raise(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang_until_restored")
    job = stage.training(run_id).attempts[0].job_name
    run = handle(stage, run_id)
    run.raise_budget(SPENT_AT_ONCE)  # another budget, be it a smaller one
    stage.until(lambda: (stage.job(job).training_s or 4) >= 4, "the job has not cost so much yet")
    local.tick()
    over = stage.ended_and_paid(run_id)
    assert (over.status, over.attempts[0].outcome, over.attempts[0].checkpoint_step) == ("stopped", "stopped", 2)
    assert (over.reason or "").startswith("budget: it has spent ")
    assert stage.events(run_id, "budget_stop") == [over.stop_requested]
    assert run_id not in stage.services.admissions.slots().held
    assert over.cost_usd is not None
    with pytest.raises(CommandRefused, match="is more than what the run has spent"):
        run.raise_budget(SPENT_AT_ONCE / 10)
    assert stage.run(run_id) == over
    assert run.raise_budget("5") == 5
    ended = stage.when(run_id, lambda run: run.status == "completed")
    assert (len(ended.attempts), ended.lineage, ended.execution) == (2, 1, f"{run_id}-e2")
    view = run.view()["cost"]
    assert view["budget_usd"] == "5"
    assert Decimal(view["at_most_usd"]) >= Decimal(view["amount_usd"]) > over.cost_usd


def test_what_runs_of_a_tenant_without_budget_is_stopped_and_what_comes_waits_until_there_is_more(
    stage: StageUnderTest,
) -> None:
    stage.ended_and_paid(stage.submit())  # whose steps of the machine alone cost more
    first = stage.submit("hang_until_restored")
    stage.training(first)
    limits = stage.services.admissions.change_limits
    try:
        limits("default", TenantLimits(budget_usd_per_day=SPENT_AT_ONCE))
        local.tick()
        over = stage.ended(first)
        assert (over.status, over.attempts[0].checkpoint_step) == ("stopped", 2)
        assert (over.reason or "").startswith("budget: tenant default has spent ")
        second = stage.submit()
        stage.when(second, lambda run: run.status == "queued")
        local.tick()
        assert (stage.run(second).reason or "").startswith("budget: tenant default has spent ")
    finally:
        limits("default", None)
        local.tick()
    assert stage.ended(second).status == "completed"
    handle(stage, first).raise_budget(5)
    assert stage.when(first, lambda run: run.status == "completed").lineage == 1
