"""What fast and cheap recovery cost, in the words a user reads before a run starts."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from microtuning_core.domain.catalog import find
from microtuning_core.domain.planning import PlanRequest, choose_plan
from microtuning_core.domain.recovery_choice import choice_words
from tests.unit.test_planning import lora, tiny


def words(request: PlanRequest) -> str:
    return choice_words(request, choose_plan(request, []))


def on(instance: str, **changes: Any) -> PlanRequest:
    return lora(instance=instance, total_steps=1000, **changes)


def test_a_cheap_run_on_spot_is_told_what_fast_would_cost():
    assert words(on("ml.g5.xlarge")) == (
        "cheap: spot, at most 1.408 USD an hour; a lost machine comes back when AWS has another (minutes, no bound). "
        "Instead fast: on-demand at 1.408 USD an hour, the machine kept 600 s after a failure, at most 0.24 USD a "
        "recovery; back in seconds where the account has a warm pool quota and the machine is sound"
    )


def test_a_fast_run_is_told_what_cheap_would_cost():
    chosen, _, instead = words(on("ml.g5.xlarge", recovery="fast")).partition(". Instead ")
    assert chosen.startswith("fast: on-demand at 1.408 USD an hour, the machine kept 600 s")
    assert instead.startswith("cheap: spot, at most 1.408 USD an hour; a lost machine")


def test_cheap_is_on_demand_where_spot_does_not_pay_or_is_not_wanted():
    assert words(tiny(total_steps=10)).startswith("cheap: on-demand at 0.115 USD an hour; a lost machine")
    assert "cheap: on-demand" in words(on("ml.g5.xlarge", recovery="fast", spot=False))


def test_who_asks_for_spot_is_told_what_fast_would_cost_without_it():
    chosen, _, instead = words(on("ml.g5.xlarge", spot=True)).partition(". Instead ")
    assert chosen.startswith("cheap: spot") and instead.startswith("fast: on-demand")


def test_a_choice_that_the_budget_does_not_hold_is_said_to_be_so():
    """Enough for the shortest run and the end of its job, and not for machines that are kept as well."""
    enough = find("ml.g5.xlarge").price_usd_per_hour * 500 / 3600
    assert words(on("ml.g5.xlarge", budget_usd=enough)).endswith("Instead fast: more than the budget holds")


def test_prices_are_of_all_machines_together():
    assert "at 2.816 USD an hour" in words(on("ml.g5.xlarge", count=2, recovery="fast"))
    assert "at most 0.47 USD a recovery" in words(on("ml.g5.xlarge", count=2, recovery="fast"))
    assert Decimal("2.816") == 2 * find("ml.g5.xlarge").price_usd_per_hour
