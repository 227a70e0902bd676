"""What an attempt cost, in exact Decimal USD: the entries of the ledger, and sums over them.

One entry, for the first of two days of an attempt:

    acme-sort-0a1b2c3d4e5f#a001#compute#2026-01-02: 3600 s billed x 2 instances x 1.408 USD/h = 2.8160000000 USD, final

Rules. Cost = billed seconds x instances x price of an hour / 3600; spot's discount is in the billed seconds already.
Seconds are whole, as SageMaker bills them, and are split at UTC midnights in proportion to the time that the job ran on
each day. Amounts are kept to 10 decimals and only `shown` rounds, to 4; both seconds and amounts are split by running
totals, so the parts add up to the whole exactly. An entry has an id made of what it is about: written twice it is the
same entry, and the final entries of an attempt replace its estimates, never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal

from microtuning_core.domain.catalog import find
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.record import Record, UsdAmount

LedgerLine = Literal["compute", "warm_pool", "storage", "orchestration"]
LedgerState = Literal["estimate", "final"]

_KEPT = Decimal("1e-10")
_SHOWN = Decimal("0.0001")
_SECONDS_PER_HOUR = 3600


class LedgerEntry(Record):
    """What one attempt cost on one line and one UTC day.

    quantity x unit_price_usd is amount_usd up to the tenth decimal; the amount itself comes from whole seconds.
    phase_ms and metered_ms are what the container measured; they explain the amount and never make it.
    """

    id: str
    tenant: str
    run_id: str
    attempt: int
    line: LedgerLine
    day: date
    phase_ms: dict[str, int]
    metered_ms: int
    billed_s: int
    instance_type: str
    instance_count: int
    quantity: UsdAmount
    unit: str
    unit_price_usd: UsdAmount
    price_source: str
    price_as_of: date
    amount_usd: UsdAmount
    state: LedgerState


@dataclass(frozen=True)
class HourPrice:
    """USD for one instance and one hour, with who says so and since when."""

    usd_per_hour: Decimal
    source: str
    as_of: date


def price_of(instance_type: str) -> HourPrice:
    """The catalog's price. Raises InvalidName for a type that is not in it."""
    row = find(instance_type)
    return HourPrice(row.price_usd_per_hour, row.price_source, row.price_as_of)


@dataclass(frozen=True)
class AttemptRef:
    """Whose cost it is."""

    tenant: str
    run_id: str
    attempt: int


def compute_entries(
    ref: AttemptRef,
    job: JobFacts,
    price: HourPrice,
    now: datetime,
    *,
    phase_ms: Mapping[str, int] | None = None,
    line: LedgerLine = "compute",
) -> list[LedgerEntry]:
    """The entries of one attempt, one a UTC day, oldest first; none for a job that never got a machine.

    Args:
        job: as described by SageMaker; every time and number may be missing.
        now: where a job that still runs is cut off.
        phase_ms: milliseconds of the attempt by phase, as the container measured them.
    """
    seconds, state = billed_seconds(job, now)
    parts = _parts(_days(job, seconds, now), seconds, job.instance_count, price.usd_per_hour, phase_ms or {})
    return [_entry(ref, line, job, price, part, state) for part in parts]


@dataclass(frozen=True)
class _Part:
    """What one UTC day got of an attempt."""

    day: date
    billed_s: int
    amount_usd: Decimal
    phase_ms: dict[str, int]


def _parts(
    days: Mapping[date, int], seconds: int, count: int, usd_per_hour: Decimal, phase_ms: Mapping[str, int]
) -> list[_Part]:
    if not days:
        return []
    weights = list(days.values())
    parts_s = split_whole(seconds, weights)
    amounts = _split_amount(parts_s, count, usd_per_hour)
    phases = {name: split_whole(ms, weights) for name, ms in phase_ms.items()}
    return [
        _Part(day, parts_s[i], amounts[i], {name: parts_ms[i] for name, parts_ms in phases.items()})
        for i, day in enumerate(days)
    ]


def _entry(
    ref: AttemptRef, line: LedgerLine, job: JobFacts, price: HourPrice, part: _Part, state: LedgerState
) -> LedgerEntry:
    hours = Decimal(part.billed_s * job.instance_count) / _SECONDS_PER_HOUR
    return LedgerEntry(
        id=entry_id(ref, line, part.day),
        tenant=ref.tenant,
        run_id=ref.run_id,
        attempt=ref.attempt,
        line=line,
        day=part.day,
        phase_ms=part.phase_ms,
        metered_ms=sum(part.phase_ms.values()),
        billed_s=part.billed_s,
        instance_type=job.instance_type,
        instance_count=job.instance_count,
        quantity=hours.quantize(_KEPT, ROUND_HALF_UP),
        unit="instance-hour",
        unit_price_usd=price.usd_per_hour,
        price_source=price.source,
        price_as_of=price.as_of,
        amount_usd=part.amount_usd,
        state=state,
    )


def entry_id(ref: AttemptRef, line: LedgerLine, day: date) -> str:
    return f"{ref.run_id}#a{ref.attempt:03d}#{line}#{day.isoformat()}"


def billed_seconds(job: JobFacts, now: datetime) -> tuple[int, LedgerState]:
    """Seconds to pay for one instance. Final once the job has ended and SageMaker has said how many.

    Until then the time since training started is the upper bound; a job without a start has cost nothing.
    """
    if job.is_terminal and (job.billed_s is not None or job.started_at is None):
        return max(job.billed_s or 0, 0), "final"
    if job.started_at is None:
        return 0, "estimate"
    return _whole_seconds(job.started_at, job.ended_at or now), "estimate"


def _whole_seconds(start: datetime, end: datetime) -> int:
    """Seconds begun between two moments, never less than 0."""
    return max(0, -((start - end) // timedelta(seconds=1)))


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


def days_between(start: datetime, end: datetime) -> dict[date, int]:
    """UTC day -> microseconds of the time from `start` to `end` that lie on it; the start's day is always there."""
    start, end = start.astimezone(UTC), end.astimezone(UTC)
    found: dict[date, int] = {}
    while True:
        midnight = datetime.combine(start.date() + timedelta(days=1), time(), UTC)
        found[start.date()] = (min(end, midnight) - start) // timedelta(microseconds=1)
        if end <= midnight:
            return found
        start = midnight


def split_whole(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, which add up to it exactly (differences of running totals).

    split_whole(10, [1, 1, 1]) == [3, 3, 4]; if all weights are 0, the first part is everything.
    """
    whole = sum(weights)
    if whole == 0:
        return [total] + [0] * (len(weights) - 1)
    parts, before, reached = [], 0, 0
    for weight in weights:
        reached += weight
        upto = total * reached // whole
        parts.append(upto - before)
        before = upto
    return parts


def _split_amount(parts_s: Sequence[int], count: int, usd_per_hour: Decimal) -> list[Decimal]:
    """The amount of each part, as differences of rounded running totals: they add up to the rounded whole."""
    amounts, before, reached_s = [], Decimal(0), 0
    for part_s in parts_s:
        reached_s += part_s
        upto = amount_usd(reached_s, count, usd_per_hour)
        amounts.append(upto - before)
        before = upto
    return amounts


def amount_usd(seconds: int, count: int, usd_per_hour: Decimal) -> Decimal:
    """USD for `seconds` on each of `count` instances, to 10 decimals."""
    return (Decimal(seconds * count) * usd_per_hour / _SECONDS_PER_HOUR).quantize(_KEPT, ROUND_HALF_UP)


def latest(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """One entry an id, in the order of ids: final ones, or of an attempt without any the estimates that saw most.

    An estimate may lie on a later day than the end that was billed, so one final entry puts out all estimates of its line.
    """
    given = list(entries)
    settled = {_subject(entry) for entry in given if entry.state == "final"}
    best: dict[str, LedgerEntry] = {}
    for entry in given:
        if entry.state == "estimate" and _subject(entry) in settled:
            continue
        if entry.id not in best or _seen(entry) > _seen(best[entry.id]):
            best[entry.id] = entry
    return [best[each] for each in sorted(best)]


def _subject(entry: LedgerEntry) -> tuple[str, int, str]:
    return entry.run_id, entry.attempt, entry.line


def _seen(entry: LedgerEntry) -> tuple[int, int, Decimal]:
    return entry.billed_s, entry.metered_ms, entry.amount_usd


def total(entries: Iterable[LedgerEntry]) -> Decimal:
    """USD of all entries, each id once, in whatever order and however often they come."""
    return sum((entry.amount_usd for entry in latest(entries)), Decimal(0))


def saving_share(billable_s: int | None, training_s: int | None) -> Decimal | None:
    """What spot saved, as a share in [0, 1]: 1 - billable / training seconds. None where there is nothing to compare."""
    if billable_s is None or not training_s or training_s < 0:
        return None
    return max(Decimal(0), 1 - Decimal(billable_s) / training_s)


def cost_so_far(started_at: datetime | None, now: datetime, usd_per_hour: Decimal, count: int) -> Decimal:
    """USD until `now` at the on-demand price: for spot the upper bound. 0 before there is a machine."""
    return amount_usd(_whole_seconds(started_at, now), count, usd_per_hour) if started_at else Decimal(0)


def shown(usd: Decimal) -> str:
    """For people: 4 decimals, rounded half up. "7.2200"."""
    return str(usd.quantize(_SHOWN, ROUND_HALF_UP))
