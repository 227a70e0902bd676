"""Sums over the ledger by what one asks for: run, tenant, day, model, machine, phase, outcome. Every sum is exact.

    by phase    an entry's machines by the time of each phase; `start` is what was billed and not metered: SageMaker's own
                loading and saving. Lines other than compute are phases of their own
    by outcome  by what became of the steps (spending.py). `idle` are also warm pools and volumes; `overhead` is what no
                machine did; `unmetered` are machines of which nothing was measured, such as those of a user's script

USD per million tokens: the rollout's cost over all that was read or sampled (one forward pass a token, either way), the
update's over all that was trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from microtuning_core.domain.cost import LedgerEntry, rounded, split_whole
from microtuning_core.domain.run import Run
from microtuning_core.domain.spending import Steps, outcome_ms, steps_by_attempt

GROUPS = ("run", "tenant", "day", "month", "model", "type", "line", "phase", "outcome")
_PARTS_A_USD = 10**10
_MACHINES = ("compute", "warm_pool")
_NOTHING = Steps()


@dataclass
class Group:
    """One row of a report. machine_s: billed seconds of all machines together."""

    key: str
    amount_usd: Decimal = Decimal(0)
    machine_s: Decimal = Decimal(0)
    saved_usd: Decimal = Decimal(0)
    states: set[str] = field(default_factory=set)


def report(entries: Iterable[LedgerEntry], by: str, runs: Mapping[str, Run]) -> list[Group]:
    """The groups in the order of their keys; their amounts add up to the amounts of the entries.

    Args:
        entries: each id once (cost.latest).
        by: one of GROUPS.
        runs: by id; of a run that is not there only the outcome of its steps is not known.
    """
    steps = {run_id: steps_by_attempt(run) for run_id, run in runs.items()}
    found: dict[str, Group] = {}
    for entry in entries:
        became = steps.get(entry.run_id, {}).get(entry.attempt, _NOTHING)
        weights = _weights(entry, by, became)
        amounts, saved = share_out(entry.amount_usd, weights), share_out(entry.saved_usd, weights)
        machine = share_out(machine_seconds(entry), weights)
        for key in weights:
            group = found.setdefault(key, Group(key))
            group.amount_usd += amounts[key]
            group.machine_s += machine[key]
            group.saved_usd += saved[key]
            group.states.add(entry.state)
    return [found[key] for key in sorted(found)]


def machine_seconds(entry: LedgerEntry) -> Decimal:
    """Billed seconds of all machines of an entry; 0 for what no machine did."""
    return Decimal(entry.billed_s * entry.instance_count if entry.line in _MACHINES else 0)


def _weights(entry: LedgerEntry, by: str, steps: Steps) -> dict[str, int]:
    """Which groups an entry belongs to, and with what weight: one, or several where it is split."""
    match by:
        case "phase":
            return phase_weights(entry)
        case "outcome":
            return outcome_weights(entry, steps)
        case "day":
            return {entry.day.isoformat(): 1}
        case "month":
            return {f"{entry.day:%Y-%m}": 1}
        case "type":
            return {entry.instance_type or "none": 1}
        case "run":
            return {entry.run_id: 1}
        case _:
            return {str(getattr(entry, by)) or "unknown": 1}


def phase_weights(entry: LedgerEntry) -> dict[str, int]:
    """Milliseconds by phase, and `start` for what was billed beyond them."""
    if entry.line != "compute":
        return {entry.line: 1}
    phases = {name: ms for name, ms in entry.phase_ms.items() if ms}
    rest_ms = 1000 * entry.billed_s - sum(phases.values())
    return phases | ({"start": rest_ms} if rest_ms > 0 or not phases else {})


def outcome_weights(entry: LedgerEntry, steps: Steps) -> dict[str, int]:
    if entry.line in ("warm_pool", "storage"):
        return {"idle": 1}
    if entry.line != "compute":
        return {"overhead": 1}
    if not entry.metered_ms:
        return {"unmetered": 1}
    parts = outcome_ms(entry.phase_ms, 1000 * entry.billed_s, steps)
    return {name: ms for name, ms in parts.items() if ms} or {"idle": 1}


def share_out(amount: Decimal, weights: Mapping[str, int]) -> dict[str, Decimal]:
    """Parts of an amount by their weights, to 10 decimals; they add up to it exactly."""
    parts = split_whole(int(amount * _PARTS_A_USD), list(weights.values()))
    found = {key: Decimal(part) / _PARTS_A_USD for key, part in zip(weights, parts, strict=True)}
    last = next(reversed(found))
    found[last] += amount - sum(found.values(), Decimal(0))
    return found


def utilisation_of(entries: Iterable[LedgerEntry], runs: Mapping[str, Run]) -> Decimal | None:
    """Machine-seconds that made progress over machine-seconds that were billed; None where none were measured."""
    machines = [each for each in entries if each.line in _MACHINES and (each.metered_ms or each.line == "warm_pool")]
    groups = {group.key: group.machine_s for group in report(machines, "outcome", runs)}
    billed_s = sum(groups.values(), Decimal(0))
    if not billed_s:
        return None
    return (groups.get("useful", Decimal(0)) + groups.get("recovered", Decimal(0))) / billed_s


def usd_per_million_tokens(entries: Iterable[LedgerEntry]) -> dict[str, Decimal]:
    """By kind of token, where there were any."""
    machines = [each for each in entries if each.line == "compute"]
    spent = {group.key: group.amount_usd for group in report(machines, "phase", {})}
    tokens = {kind: sum(each.tokens.get(kind, 0) for each in machines) for kind in ("prefill", "sampled", "trained")}
    read = tokens["prefill"] + tokens["sampled"]
    rates = {
        "prefill": _per_million(spent.get("rollout"), read),
        "sampled": _per_million(spent.get("rollout"), read),
        "trained": _per_million(spent.get("update"), tokens["trained"]),
    }
    return {kind: rate for kind, rate in rates.items() if rate is not None and tokens[kind]}


def _per_million(usd: Decimal | None, tokens: int) -> Decimal | None:
    return rounded(usd * 1_000_000 / tokens) if usd is not None and tokens else None
