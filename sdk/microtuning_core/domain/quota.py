"""Who may run now: slots are shared among tenants, and waiting runs get them one by one.

`grant` is pure; its caller makes the answer true by one conditional write a slot, and asks again when it lost a race.

A free slot goes to the tenant furthest below its share. Shares: the slots of the stage divided by weight (equal unless
said otherwise) among the tenants that run or wait now. Ties go to whoever waits longest, then by run_id. Nobody passes a
limit, and a free slot is never kept from a run that may have it. A tenant's runs that want GPUs of one family get them in
the order they came; while one waits for such GPUs, the tenant's runs of other families pass it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction

Gpus = Mapping[str, int]  # GPUs by family: {"A10G": 4}


@dataclass(frozen=True)
class Limits:
    """How many runs may hold a slot: in all, by tenant unless named, by named tenant; weights (1 unless named); and how
    many GPUs of a family a tenant's runs may hold together (any number unless named)."""

    total: int
    per_tenant_default: int | None = None  # None = only the total counts
    per_tenant: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    weight_default: int = 1
    gpus: Mapping[str, Gpus] = field(default_factory=dict)
    gpus_default: Gpus = field(default_factory=dict)

    def of(self, tenant: str) -> int:
        default = self.total if self.per_tenant_default is None else self.per_tenant_default
        return self.per_tenant.get(tenant, default)

    def weight(self, tenant: str) -> int:
        """At least 1: a weight of 0 would starve a tenant, which a limit of 0 does in plain sight."""
        return max(1, self.weights.get(tenant, self.weight_default))

    def gpus_of(self, tenant: str) -> Gpus:
        return self.gpus.get(tenant, self.gpus_default)


@dataclass(frozen=True)
class Waiting:
    """A run in the queue since then (aware UTC), and the GPUs that its next attempt would take."""

    run_id: str
    tenant: str
    since: datetime
    gpus: Gpus = field(default_factory=dict)


@dataclass(frozen=True)
class Holding:
    """A run with a slot: whose it is, and the GPUs that are set aside for it."""

    tenant: str
    gpus: Gpus = field(default_factory=dict)


def grant(limits: Limits, held: Mapping[str, Holding], waiting: Sequence[Waiting]) -> list[str]:
    """The runs that get a slot now, in order.

    Args:
        held: run_id -> what it holds; one that also waits (a message came twice) gets no second slot.
        waiting: in any order; of two entries for one run the older counts.
    """
    line = _Line(limits, held, waiting)
    granted: list[str] = []
    while len(held) + len(granted) < limits.total:
        chosen = line.take_next()
        if chosen is None:
            break
        granted.append(chosen)
    return granted


def places_in_queue(limits: Limits, held: Mapping[str, Holding], waiting: Sequence[Waiting]) -> dict[str, int]:
    """1 for the run that gets the next slot, and so on.

    An estimate: as if slots came free one by one. Runs whose tenant is at its own limit stand behind all that are not.
    """
    line, places = _Line(limits, held, waiting), dict[str, int]()
    while (chosen := line.take_next() or line.take_next(beyond_limits=True)) is not None:
        places[chosen] = len(places) + 1
    return places


def has_room(limits: Limits, held: Mapping[str, Holding], run_id: str, claim: Holding) -> bool:
    """Whether the run, instead of what it holds now, may hold `claim`; a run without a slot may not."""
    used = used_gpus(holding for other, holding in held.items() if other != run_id)
    return run_id in held and _gpus_fit(limits, used, claim.tenant, claim.gpus)


class _Line:
    """Who is served next, while runs are taken out one by one. Each tenant's runs stand in a line of their own, longest
    waiting first, so that a choice looks at tenants and not at all runs."""

    def __init__(self, limits: Limits, held: Mapping[str, Holding], waiting: Sequence[Waiting]) -> None:
        self._limits = limits
        self._running = Counter(each.tenant for each in held.values())
        self._gpus = used_gpus(held.values())
        self._lines: dict[str, list[Waiting]] = {}
        for each in _queue(held, waiting):
            self._lines.setdefault(each.tenant, []).append(each)
        self._shares = _shares(limits, {*self._running, *self._lines})

    def take_next(self, *, beyond_limits: bool = False) -> str | None:
        """The run that is served next, and no longer waits; None when nobody may be."""
        heads = [head for tenant in self._lines if (head := self._head(tenant, beyond_limits=beyond_limits))]
        if not heads:
            return None
        chosen = max(heads, key=lambda each: self._shares[each.tenant] - self._running[each.tenant])
        equals = [each for each in heads if self._distance(each) == self._distance(chosen)]
        return self._take(min(equals, key=_order))

    def _distance(self, each: Waiting) -> Fraction:
        return self._shares[each.tenant] - self._running[each.tenant]

    def _head(self, tenant: str, *, beyond_limits: bool) -> Waiting | None:
        line = self._lines[tenant]
        if beyond_limits:
            return line[0]
        if self._running[tenant] >= self._limits.of(tenant):
            return None
        return self._first_with_gpus(tenant, line)

    def _first_with_gpus(self, tenant: str, line: Sequence[Waiting]) -> Waiting | None:
        """Runs that want the same family are served in the order they came: else one that needs many would never be."""
        most, wanted = self._limits.gpus_of(tenant), set[str]()
        for each in line:
            limited = {family for family in each.gpus if family in most}
            if limited & wanted or not _gpus_fit(self._limits, self._gpus, tenant, each.gpus):
                can_ever = all(each.gpus[family] <= most[family] for family in limited)
                wanted |= limited if can_ever else set()
                continue
            return each
        return None

    def _take(self, chosen: Waiting) -> str:
        line = self._lines[chosen.tenant]
        line.remove(chosen)
        if not line:
            del self._lines[chosen.tenant]
        self._running[chosen.tenant] += 1
        self._gpus.update({(chosen.tenant, family): count for family, count in chosen.gpus.items()})
        return chosen.run_id


def _order(each: Waiting) -> tuple[datetime, str, str]:
    return each.since, each.run_id, each.tenant


def _queue(held: Mapping[str, Holding], waiting: Sequence[Waiting]) -> list[Waiting]:
    """Longest waiting first, each run once, none that holds a slot."""
    oldest: dict[str, Waiting] = {}
    for each in sorted(waiting, key=_order):
        if each.run_id not in held:
            oldest.setdefault(each.run_id, each)
    return list(oldest.values())


def used_gpus(holdings: Iterable[Holding]) -> Counter[tuple[str, str]]:
    """GPUs by tenant and family."""
    used: Counter[tuple[str, str]] = Counter()
    for each in holdings:
        used.update({(each.tenant, family): count for family, count in each.gpus.items()})
    return used


def _gpus_fit(limits: Limits, used: Mapping[tuple[str, str], int], tenant: str, gpus: Gpus) -> bool:
    most = limits.gpus_of(tenant)
    return all(
        used.get((tenant, family), 0) + count <= most[family] for family, count in gpus.items() if family in most
    )


def _shares(limits: Limits, tenants: set[str]) -> dict[str, Fraction]:
    """Slots that each tenant is entitled to, as exact fractions of the total."""
    weights = {tenant: limits.weight(tenant) for tenant in tenants}
    whole = sum(weights.values())
    return {tenant: Fraction(limits.total * weight, whole) for tenant, weight in weights.items()}
