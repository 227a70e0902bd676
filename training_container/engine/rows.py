"""Which rows go to the model together, and in which layout.

A unit is what is not parted: a row, or the rows of a group where computing their common beginning once pays. Units of the
same layout and of like length make a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .batch import Example
from .layouts.families import consecutive_groups, shared_prefix

# A forked row costs memory for its copy of the prefix's keys and values, by token about this share of a token that is read.
_COPIED = 1 / 8


@dataclass(frozen=True)
class Costs:
    """What a model's forward costs: a token so much by itself, and so much with each token that it attends to.

    Both in multiplications. Only their ratio matters here, and only roughly: it chooses between layouts.
    """

    token: float
    pair: float


@dataclass(frozen=True)
class Limits:
    """Of a micro-batch: padded tokens, trained tokens (a row of logits each), and, where given, rows."""

    tokens: int
    trained: int
    rows: int | None = None


@dataclass(frozen=True)
class Unit:
    """Examples (their indices) in a layout; alone in a micro-batch they fill an array of height x width tokens."""

    rows: list[int]
    layout: str
    height: int
    width: int
    trained: int

    @property
    def tokens(self) -> int:
        return self.height * self.width


def units(
    examples: Sequence[Example],
    *,
    limits: Limits,
    costs: Costs,
    sharing: Collection[str] = (),
    whole_groups: bool = False,
) -> list[Unit]:
    """The examples as units, in their order.

    Args:
        sharing: names of the layouts that may compute a common beginning once, as probe.py found them right.
        whole_groups: a group is a unit whatever its size, as a loss over pairs needs; else one beyond the limits is parted.
    """
    groups = [_unit(examples, rows, costs, sharing) for rows in consecutive_groups(examples)]
    if whole_groups:
        return groups
    return [part for group in groups for part in _parted(examples, group, limits, costs, sharing)]


def micro_batches(parts: Sequence[Unit], limits: Limits) -> Iterator[list[Unit]]:
    """Units of one layout, within the limits (but for a unit that is beyond them by itself).

    Longest first, so that rows of like length share a micro-batch, and the one that needs most memory fails at once and
    not after half an epoch.
    """
    taken: list[Unit] = []
    for unit in sorted(parts, key=lambda unit: (unit.layout, -unit.width)):
        if taken and (unit.layout != taken[0].layout or not _fits([*taken, unit], limits)):
            yield taken
            taken = []
        taken = [*taken, unit]
    if taken:
        yield taken


def _fits(taken: Sequence[Unit], limits: Limits) -> bool:
    if limits.rows:
        return sum(len(unit.rows) for unit in taken) <= limits.rows
    tokens = sum(unit.height for unit in taken) * max(unit.width for unit in taken)
    return tokens <= limits.tokens and sum(unit.trained for unit in taken) <= limits.trained


def _unit(examples: Sequence[Example], rows: list[int], costs: Costs, sharing: Collection[str]) -> Unit:
    """These rows in the layout that costs least."""
    lengths = [examples[row].read_tokens for row in rows]
    trained = sum(examples[row].trained_tokens for row in rows)
    count, longest = len(rows), max(lengths)
    plain = Unit(rows, "plain", count, longest, trained)
    if count == 1 or not sharing or not (prefix := shared_prefix([examples[row] for row in rows])):
        return plain
    rest = max(1, longest - prefix)
    packed = prefix + sum(max(0, length - prefix) for length in lengths)
    cost_of = {
        "plain": count * longest * (costs.token + costs.pair * longest / 2),
        "fork": prefix * (costs.token + costs.pair * prefix / 2)
        + count * rest * (costs.token + costs.pair * (prefix + rest)),
        "packed": packed * (costs.token + costs.pair * packed),
    }
    best = min(("plain", *sharing), key=lambda layout: cost_of[layout])
    if best == "fork":
        return Unit(rows, "fork", count, rest + int(prefix * (1 / count + _COPIED)) + 1, trained)
    return Unit(rows, "packed", 1, packed, trained) if best == "packed" else plain


def _parted(
    examples: Sequence[Example], unit: Unit, limits: Limits, costs: Costs, sharing: Collection[str]
) -> list[Unit]:
    """A row each where nothing is shared; else the unit in halves until each is within the limits."""
    if len(unit.rows) == 1:
        return [unit]
    if unit.layout == "plain":
        return [_unit(examples, [row], costs, ()) for row in unit.rows]
    if _fits([unit], limits):
        return [unit]
    half = len(unit.rows) // 2
    halves = (_unit(examples, rows, costs, sharing) for rows in (unit.rows[:half], unit.rows[half:]))
    return [part for each in halves for part in _parted(examples, each, limits, costs, sharing)]
