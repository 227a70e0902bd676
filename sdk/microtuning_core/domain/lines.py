"""What an attempt cost, line by line: its machines, their warm pool afterwards, and their volumes.

    compute     billed seconds x instances x price of an hour / 3600; spot's discount is in the billed seconds already
    warm_pool   seconds its machines were kept for the next job x instances x the same price, on the days after its end
    storage     the EBS volume while the machines ran, of types that have no disks of their own

Seconds are whole, as SageMaker bills them, and are split at UTC midnights in proportion to the time on each day. A job that
never got a machine has no entries: it cost 0.00.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal

from microtuning_core.domain.catalog import find
from microtuning_core.domain.cost import (
    CostRef,
    LedgerEntry,
    LedgerLine,
    LedgerState,
    UnitPrice,
    days_between,
    entry_id,
    price_of,
    rounded,
    share_usd,
    split_whole,
    whole_seconds,
)
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.run import AttemptPlan

_HOUR_S = 3600
# A GB-month is billed by the second of a month of 30 days, which is the dearest one.
_MONTH_S = 30 * 86_400
VOLUME_PRICE = UnitPrice(
    Decimal("0.14"),
    "not confirmed: SageMaker, general purpose (SSD) storage of training jobs, a GB-month",
    date(2026, 11, 30),
)


@dataclass(frozen=True)
class Measured:
    """What the container measured of an attempt: milliseconds by phase and tokens by kind; and of which model."""

    phase_ms: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    model: str = ""


NOTHING_MEASURED = Measured()


def plan_price(plan: AttemptPlan, planned_on: date) -> UnitPrice:
    """The price that an attempt was planned with, which later prices do not change."""
    listed = price_of(plan.instance_type)
    if plan.price_source is not None and plan.price_as_of is not None:
        return UnitPrice(plan.price_usd_per_hour, plan.price_source, plan.price_as_of, plan.price_region)
    if listed.usd == plan.price_usd_per_hour:
        return listed
    return UnitPrice(plan.price_usd_per_hour, "the attempt's plan", planned_on, listed.region)


def attempt_entries(
    ref: CostRef, job: JobFacts, price: UnitPrice, now: datetime, measured: Measured = NOTHING_MEASURED
) -> list[LedgerEntry]:
    """Every entry of an attempt, as far as its job tells by now."""
    return [
        *compute_entries(ref, job, price, now, measured),
        *warm_pool_entries(ref, job, price, measured.model),
        *storage_entries(ref, job, now, measured.model),
    ]


def attempt_state(job: JobFacts, now: datetime) -> LedgerState:
    """Final once no amount of the attempt may change any more: its pool has ended, too."""
    return "estimate" if job.keeps_pool else billed_seconds(job, now)[1]


def compute_entries(
    ref: CostRef, job: JobFacts, price: UnitPrice, now: datetime, measured: Measured = NOTHING_MEASURED
) -> list[LedgerEntry]:
    """The machines of one attempt, one entry a UTC day, oldest first; none for a job that never got a machine.

    Args:
        job: as described by SageMaker; every time and number may be missing.
        now: where a job that still runs is cut off.
    """
    seconds, state = billed_seconds(job, now)
    line = _Line(ref, "compute", job, price, "instance-hour", _HOUR_S, job.instance_count, state)
    trained_s = job.training_s if job.is_terminal else None
    return line.entries(_days(job, seconds, now), seconds, measured, trained_s)


def warm_pool_entries(ref: CostRef, job: JobFacts, price: UnitPrice, model: str = "") -> list[LedgerEntry]:
    """What keeping the machines after the job's end cost; an estimate that grows until the pool has ended."""
    seconds = job.warm_pool_s or 0
    if seconds <= 0:
        return []
    began = job.ended_at or job.started_at or job.created_at
    state: LedgerState = "estimate" if job.keeps_pool else "final"
    line = _Line(ref, "warm_pool", job, price, "instance-hour", _HOUR_S, job.instance_count, state)
    days = days_between(began, began + timedelta(seconds=seconds))
    return line.entries(days, seconds, Measured(model=model))


def storage_entries(ref: CostRef, job: JobFacts, now: datetime, model: str = "") -> list[LedgerEntry]:
    """The volume of types that have no disks of their own; spot saves nothing on it."""
    row = find(job.instance_type) if job.instance_type else None
    if row is None or row.local_storage_gb or not job.volume_gb:
        return []
    billed, state = billed_seconds(job, now)
    seconds = max(billed, job.training_s or 0)
    units = job.instance_count * job.volume_gb
    line = _Line(ref, "storage", job, VOLUME_PRICE, "GB-month", _MONTH_S, units, state)
    return line.entries(_days(job, seconds, now), seconds, Measured(model=model))


@dataclass(frozen=True)
class _Line:
    """What the entries of one line have in common; `units` of `unit` cost the price for every `unit_s` seconds."""

    ref: CostRef
    name: LedgerLine
    job: JobFacts
    price: UnitPrice
    unit: str
    unit_s: int
    units: int
    state: LedgerState

    def entries(
        self, days: Mapping[date, int], seconds: int, measured: Measured, trained_s: int | None = None
    ) -> list[LedgerEntry]:
        """One a day, which parts the seconds by the microseconds of each day."""
        if not days:
            return []
        weights = list(days.values())
        billed = split_whole(seconds, weights)
        trained = [None] * len(weights) if trained_s is None else split_whole(trained_s, weights)
        phases, tokens = (_split_each(each, weights) for each in (measured.phase_ms, measured.tokens))
        amounts = self._amounts(billed)
        return [
            self._entry(day, billed[i], trained[i], amounts[i], Measured(phases[i], tokens[i], measured.model))
            for i, day in enumerate(days)
        ]

    def _amounts(self, parts_s: Sequence[int]) -> list[Decimal]:
        """Differences of rounded running totals: they add up to the rounded whole."""
        amounts, before, reached_s = [], Decimal(0), 0
        for part_s in parts_s:
            reached_s += part_s
            upto = share_usd(reached_s * self.units, self.unit_s, self.price.usd)
            amounts.append(upto - before)
            before = upto
        return amounts

    def _entry(
        self, day: date, billed_s: int, trained_s: int | None, amount_usd: Decimal, measured: Measured
    ) -> LedgerEntry:
        return LedgerEntry(
            id=entry_id(self.ref, self.name, day),
            tenant=self.ref.tenant,
            run_id=self.ref.run_id,
            attempt=self.ref.attempt,
            line=self.name,
            day=day,
            phase_ms=dict(measured.phase_ms),
            metered_ms=sum(measured.phase_ms.values()),
            tokens=dict(measured.tokens),
            model=measured.model,
            billed_s=billed_s,
            training_s=trained_s,
            spot=self.job.spot,
            instance_type=self.job.instance_type,
            instance_count=self.job.instance_count,
            quantity=rounded(Decimal(billed_s * self.units) / self.unit_s),
            unit=self.unit,
            unit_price_usd=self.price.usd,
            price_source=self.price.source,
            price_as_of=self.price.as_of,
            price_region=self.price.region,
            amount_usd=amount_usd,
            state=self.state,
        )


def _split_each(numbers: Mapping[str, int], weights: Sequence[int]) -> list[dict[str, int]]:
    """Every number in parts by the weights: one mapping a weight."""
    parts = {name: split_whole(number, weights) for name, number in numbers.items()}
    return [{name: each[i] for name, each in parts.items()} for i in range(len(weights))]


def billed_seconds(job: JobFacts, now: datetime) -> tuple[int, LedgerState]:
    """Seconds to pay for one instance. Final once the job has ended and SageMaker has said how many.

    Until then the time since training started is the upper bound; a job without a start has cost nothing.
    """
    if job.is_terminal and (job.billed_s is not None or job.started_at is None):
        return max(job.billed_s or 0, 0), "final"
    if job.started_at is None:
        return 0, "estimate"
    return whole_seconds(job.started_at, job.ended_at or now), "estimate"


def _days(job: JobFacts, seconds: int, now: datetime) -> dict[date, int]:
    """UTC day -> microseconds that the job ran on it. One missing end follows from the other and the billed seconds."""
    start, end = job.started_at, job.ended_at
    if start is None and seconds == 0:
        return {}
    if start is None:
        end = end or now
        start = end - timedelta(seconds=seconds)
    if end is None:
        end = start + timedelta(seconds=seconds) if job.is_terminal else now
    return days_between(start, max(start, end))
