"""Who may run now: slots are shared among tenants, and waiting runs get them one by one.

`grant` is pure; its caller makes the answer true by one conditional write a slot, and asks again when it lost a race.

A free slot goes to the tenant furthest below its share. Shares: the slots of the stage divided by weight (equal unless
said otherwise) among the tenants that run or wait now. Ties go to whoever waits longest, then by run_id. Nobody passes a
limit, and a free slot is never kept from a run that may have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    """A run in the queue since then (aware UTC)."""

    run_id: str
    tenant: str
    since: datetime


def grant(limits: Limits, held: Mapping[str, str], waiting: Sequence[Waiting]) -> list[str]:
    """The runs that get a slot now, in order.

    Args:
        held: run_id -> tenant of the runs that hold a slot; one that also waits (a message came twice) gets no second.
        waiting: in any order; of two entries for one run the older counts.
    """
    queue, running = _queue(held, waiting), Counter(held.values())
    shares = _shares(limits, {*held.values(), *(each.tenant for each in queue)})
    granted: list[str] = []
    while len(held) + len(granted) < limits.total:
        allowed = [each for each in queue if running[each.tenant] < limits.of(each.tenant)]
        if not allowed:
            break
        granted.append(_take_next(queue, allowed, running, shares))
    return granted


def place_in_queue(run_id: str, limits: Limits, held: Mapping[str, str], waiting: Sequence[Waiting]) -> int | None:
    """1 for the run that gets the next slot, and so on; None if it does not wait.

    An estimate: as if slots came free one by one. Runs whose tenant is at its own limit stand behind all that are not.
    """
    queue, running = _queue(held, waiting), Counter(held.values())
    shares = _shares(limits, {*held.values(), *(each.tenant for each in queue)})
    order: list[str] = []
    while queue:
        allowed = [each for each in queue if running[each.tenant] < limits.of(each.tenant)]
        order.append(_take_next(queue, allowed or queue, running, shares))
    return order.index(run_id) + 1 if run_id in order else None


def _queue(held: Mapping[str, str], waiting: Sequence[Waiting]) -> list[Waiting]:
    """Longest waiting first, each run once, none that holds a slot."""
    oldest: dict[str, Waiting] = {}
    for each in sorted(waiting, key=lambda each: (each.since, each.run_id, each.tenant)):
        if each.run_id not in held:
            oldest.setdefault(each.run_id, each)
    return list(oldest.values())


def _shares(limits: Limits, tenants: set[str]) -> dict[str, Fraction]:
    """Slots that each tenant is entitled to, as exact fractions of the total."""
    weights = {tenant: limits.weight(tenant) for tenant in tenants}
    whole = sum(weights.values())
    return {tenant: Fraction(limits.total * weight, whole) for tenant, weight in weights.items()}


def _take_next(
    queue: list[Waiting], allowed: Sequence[Waiting], running: Counter[str], shares: Mapping[str, Fraction]
) -> str:
    """Moves the allowed run of the tenant furthest below its share from the queue to the running ones."""
    # The queue is sorted by waiting time, and max keeps the first of equals.
    chosen = max(allowed, key=lambda each: shares[each.tenant] - running[each.tenant])
    queue.remove(chosen)
    running[chosen.tenant] += 1
    return chosen.run_id
