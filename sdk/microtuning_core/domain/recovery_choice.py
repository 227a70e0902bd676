"""What `compute.recovery` chooses between, in words and money: how a run comes back from a lost attempt, at what price."""

from __future__ import annotations

from decimal import ROUND_UP, Decimal

from microtuning_core.domain.errors import BudgetExceeded
from microtuning_core.domain.planning import Plan, PlanRequest, choose_plan
from microtuning_core.domain.warm_pools import recovery_usd

_CENT = Decimal("0.01")
_COLD = "a lost machine comes back when AWS has another (minutes, no bound)"


def choice_words(request: PlanRequest, plan: Plan) -> str:
    """What the chosen recovery means for this plan, and what the other one would."""
    other = "cheap" if request.recovery == "fast" else "fast"
    planned = _other_plan(request)
    instead = _words(other, planned) if planned else f"{other}: more than the budget holds"
    return f"{_words(request.recovery, plan)}. Instead {instead}"


def _other_plan(request: PlanRequest) -> Plan | None:
    """The first plan under the other choice; spot is left open, since a run that asks for spot cannot be fast."""
    other = "cheap" if request.recovery == "fast" else "fast"
    try:
        return choose_plan(request.model_copy(update={"recovery": other, "spot": _other_spot(request)}), [])
    except BudgetExceeded:
        return None


def _other_spot(request: PlanRequest) -> bool | str:
    return "auto" if request.spot is True else request.spot


def _words(choice: str, plan: Plan) -> str:
    price = f"{plan.price_usd_per_hour * plan.count} USD an hour"
    if plan.keep_alive_s:
        most_usd = recovery_usd(plan.price_usd_per_hour, plan.count, plan.keep_alive_s).quantize(_CENT, ROUND_UP)
        return (
            f"{choice}: on-demand at {price}, the machine kept {plan.keep_alive_s} s after a failure, at most "
            f"{most_usd} USD a recovery; back in seconds where the account has a warm pool quota and the machine is sound"
        )
    return f"{choice}: {'spot, at most' if plan.spot else 'on-demand at'} {price}; {_COLD}"
