"""Machines that are kept between the attempts of a run (`recovery: fast`): how long, at what cost, and when no longer.

SageMaker keeps a job's machines for KeepAlivePeriodInSeconds after it has ended, however it ended but for a machine that
failed, and gives them to the next job of the same role, type, count and volume. They are paid for while they wait.
Never of spot machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from microtuning_core.domain.failures import Failure, FailureClass

if TYPE_CHECKING:
    from microtuning_core.domain.run import Attempt, AttemptPlan

# Two ticks of the reconciler, which is the longest that a next attempt takes to be asked for when all its events were
# lost. It bounds what a pool costs when nobody is left to end it; a run that closes ends its pool at once. (The API takes
# 0 to 21,600; the documentation's pages say 3,600.)
KEEP_ALIVE_S = 600


def keep_alive_s(recovery: Literal["cheap", "fast"], *, spot: bool) -> int:
    """How long the machines of an attempt are kept after it."""
    return KEEP_ALIVE_S if recovery == "fast" and not spot else 0


def recovery_usd(price_usd_per_hour: Decimal, count: int, kept_s: int = KEEP_ALIVE_S) -> Decimal:
    """What keeping machines that long costs: their price, as while they train."""
    return price_usd_per_hour * count * kept_s / 3600


def is_about_pool(failure: Failure) -> bool:
    """Whether a refusal is about the quota for kept machines alone, 0 in every new account: the job itself may have one.

    Its name ends in "for training warm pool usage".
    """
    return failure.failure_class is FailureClass.QUOTA and "warm pool" in failure.message.lower()


def pools_left(attempts: Sequence[Attempt], now: datetime) -> list[Attempt]:
    """The attempts whose machines may still be kept, newest first."""
    return [each for each in reversed(attempts) if each.plan.keep_alive_s and each.launched_at and _may_keep(each, now)]


def _may_keep(attempt: Attempt, now: datetime) -> bool:
    """Twice the time, since the end that we know of is SageMaker's own and clocks differ."""
    return attempt.ended_at is None or now < attempt.ended_at + timedelta(seconds=2 * attempt.plan.keep_alive_s)


def fits_pool(plan: AttemptPlan, pool: AttemptPlan) -> bool:
    """Whether a job of `plan` takes the machines kept after one of `pool`; all else that must agree is the stage's."""
    return (plan.instance_type, plan.count, plan.spot) == (pool.instance_type, pool.count, False)


def kept_usd(attempts: Sequence[Attempt], now: datetime) -> Decimal:
    """What the machines kept after these attempts cost at most, until the next attempt began or their time was over."""
    pairs = zip(attempts, [*attempts[1:], None], strict=False)
    return sum((_kept_usd(each, following, now) for each, following in pairs), Decimal(0))


def _kept_usd(attempt: Attempt, following: Attempt | None, now: datetime) -> Decimal:
    plan = attempt.plan
    if not plan.keep_alive_s or attempt.ended_at is None or not attempt.billed_s:
        return Decimal(0)
    until = following.started_at if following and following.started_at else now
    kept_s = min(plan.keep_alive_s, max(0, int((until - attempt.ended_at).total_seconds())))
    return recovery_usd(plan.price_usd_per_hour, plan.count, kept_s)
