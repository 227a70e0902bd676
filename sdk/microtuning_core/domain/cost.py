"""The entries of the ledger, in exact Decimal USD, and sums over them; what makes an entry is in lines.py.

One entry, for the first of two days of an attempt:

    acme-sort-0a1b2c3d4e5f#a001#compute#2026-01-02: 3600 s billed x 2 instances x 1.408 USD/h = 2.8160000000 USD, final

Amounts are kept to 10 decimals and only `shown` rounds, to 4; whatever is split is split by running totals, so the parts
add up to the whole exactly. An entry has an id made of what it is about: written twice it is the same entry, and the final
entries of an attempt replace its estimates, never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal

from microtuning_core.domain.catalog import find
from microtuning_core.domain.record import Record, UsdAmount, Value

LedgerLine = Literal["compute", "warm_pool", "storage", "orchestration", "objects"]
LedgerState = Literal["estimate", "final"]

_KEPT = Decimal("1e-10")
_SHOWN = Decimal("0.0001")
_SECONDS_PER_HOUR = 3600


class Charge(Value):
    """One of several things that an entry is made of; quantity x unit_price_usd is amount_usd up to the tenth decimal."""

    name: str
    quantity: UsdAmount
    unit: str
    unit_price_usd: UsdAmount
    amount_usd: UsdAmount


class LedgerEntry(Record):
    """What one attempt, or one execution of the state machine, cost on one line and one UTC day.

    quantity x unit_price_usd is amount_usd up to the tenth decimal; the amount itself comes from whole seconds.
    phase_ms, metered_ms and tokens are what the container measured; they explain the amount and never make it.
    billed_s, training_s: of each instance; where spot billed less than it trained, `saved_usd` is the difference.
    charges: where several prices make the amount, which is their sum; quantity and unit are then 1 and "execution".
    execution: which of the run's executions, for the lines "orchestration" and "objects"; its attempt is 0.
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
    price_region: str = "us-east-1"
    training_s: int | None = None
    spot: bool = False
    model: str = ""
    tokens: dict[str, int] = {}
    execution: int = 0
    charges: tuple[Charge, ...] = ()

    @property
    def saved_usd(self) -> Decimal:
        """What the same seconds would have cost more without spot; 0 where that is not known."""
        if not self.spot or self.training_s is None or self.state != "final":
            return Decimal(0)
        on_demand = amount_usd(self.training_s, self.instance_count, self.unit_price_usd)
        return max(Decimal(0), on_demand - self.amount_usd)


@dataclass(frozen=True)
class UnitPrice:
    """USD for one unit of something, with who says so, where and since when."""

    usd: Decimal
    source: str
    as_of: date
    region: str = "us-east-1"


def price_of(instance_type: str) -> UnitPrice:
    """The catalog's price of one instance and one hour. Raises InvalidName for a type that is not in it."""
    row = find(instance_type)
    return UnitPrice(row.price_usd_per_hour, row.price_source, row.price_as_of, row.price_region)


@dataclass(frozen=True)
class CostRef:
    """Whose cost it is: an attempt's, or (attempt 0) an execution's."""

    tenant: str
    run_id: str
    attempt: int = 0
    execution: int = 0


def entry_id(ref: CostRef, line: LedgerLine, day: date) -> str:
    part = f"e{ref.execution:02d}" if ref.execution else f"a{ref.attempt:03d}"
    return f"{ref.run_id}#{part}#{line}#{day.isoformat()}"


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


def amount_usd(seconds: int, count: int, usd_per_hour: Decimal) -> Decimal:
    """USD for `seconds` on each of `count` instances, to 10 decimals."""
    return share_usd(seconds * count, _SECONDS_PER_HOUR, usd_per_hour)


def share_usd(units: int, whole: int, usd: Decimal) -> Decimal:
    """USD for `units` of something of which `whole` cost `usd`, to 10 decimals."""
    return rounded(Decimal(units) * usd / whole)


def rounded(value: Decimal) -> Decimal:
    """To 10 decimals, as amounts and quantities are kept."""
    return value.quantize(_KEPT, ROUND_HALF_UP)


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


def superseded(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Estimates that a final amount has put out and that lie on a day of their own, where it does not overwrite them."""
    given = list(entries)
    counted = {entry.id for entry in latest(given)}
    return [entry for entry in given if entry.id not in counted]


def _subject(entry: LedgerEntry) -> tuple[str, int, int, str]:
    return entry.run_id, entry.attempt, entry.execution, entry.line


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
    return amount_usd(whole_seconds(started_at, now), count, usd_per_hour) if started_at else Decimal(0)


def whole_seconds(start: datetime, end: datetime) -> int:
    """Seconds begun between two moments, never less than 0."""
    return max(0, -((start - end) // timedelta(seconds=1)))


def shown(usd: Decimal) -> str:
    """For people: 4 decimals, rounded half up. "7.2200"."""
    return str(usd.quantize(_SHOWN, ROUND_HALF_UP))
