"""Which rows go to the model together, and in which layout.

A unit is what is not parted: a row, or the rows of a group where computing their common beginning once pays. Units of the
same layout and of like length make a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .batch import Example
from .layouts.families import consecutive_groups, shared_prefix

# How much dearer than a multiplication of weights one of attention is: in plain causal rows, where rows attend to a copied
# cache, and under a dense mask, all of whose entries are computed. Fitted to times on a CPU (docs/adr/0008).
_CAUSAL, _OVER_CACHE, _DENSE = 0.3, 0.85, 0.6
# Copying a token's keys and values, and adding up their gradients, costs so many times as attending to it once.
_COPY = 30.0
# It also costs memory, about this share of a token that is read.
_COPIED = 1 / 8


# What a call costs before its first token: so many tokens, and so many multiplications a layer. Measured on a CPU (models
# of 0.2, 1.6 and 8.4 million weights: 230, 90 and 65 tokens); of a GPU an estimate from 40 kernels a layer.
_CALL = {"cpu": (64, 10e6), "cuda": (512, 2e10)}


@dataclass(frozen=True)
class Costs:
    """What a model's forward costs: a token so much by itself, and so much with each token that it attends to.

    Both in multiplications, and wanted only roughly: they choose between layouts, and between padding and a call more.
    """

    token: float
    pair: float
    layers: int = 1

    def call(self, device_type: str) -> int:
        """What a call of the model costs whatever is in it, in tokens."""
        tokens, multiplications = _CALL["cpu" if device_type == "cpu" else "cuda"]
        return int(tokens + multiplications * self.layers / self.token)


@dataclass(frozen=True)
class Limits:
    """Of a micro-batch: padded tokens, trained tokens (a row of logits each), and, where given, rows.

    padding: tokens that may be nothing but padding; more of them take longer than another micro-batch would.
    """

    tokens: int
    trained: int
    rows: int | None = None
    padding: int = 2**62


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
    groups = [_Group.of(examples, rows) for rows in consecutive_groups(examples)]
    # One sharing layout for all: two would make twice as many, smaller micro-batches.
    layout = min(
        sharing, key=lambda name: sum(group.cost(group.better(name, costs), costs) for group in groups), default=""
    )
    if whole_groups:
        return [group.unit(group.better(layout, costs)) for group in groups]
    return [part for group in groups for part in _parted(examples, group, layout, limits, costs)]


def micro_batches(parts: Sequence[Unit], limits: Limits) -> Iterator[list[Unit]]:
    """Units of one layout, within the limits (but for a unit that is beyond them by itself).

    Longest first, so that rows of like length share a micro-batch, and the one that needs most memory fails at once and
    not after half an epoch. Where lengths fall evenly, so much padding that it costs what another call of the model does is
    the best there is: the mean cost of a row has its minimum there.
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
    padding = tokens - sum(unit.tokens for unit in taken)
    return (
        tokens <= limits.tokens and padding <= limits.padding and sum(unit.trained for unit in taken) <= limits.trained
    )


@dataclass(frozen=True)
class _Group:
    """Consecutive rows, the length of the beginning they share, and how many tokens of each are read."""

    rows: list[int]
    prefix: int
    lengths: list[int]
    trained: int

    @classmethod
    def of(cls, examples: Sequence[Example], rows: list[int]) -> _Group:
        members = [examples[row] for row in rows]
        return cls(
            rows,
            shared_prefix(members) if len(members) > 1 else 0,
            [member.read_tokens for member in members],
            sum(member.trained_tokens for member in members),
        )

    @property
    def rest(self) -> int:
        return max(1, max(self.lengths) - self.prefix)

    @property
    def packed(self) -> int:
        return self.prefix + sum(max(0, length - self.prefix) for length in self.lengths)

    def cost(self, layout: str, costs: Costs) -> float:
        """In multiplications of a forward; of copying, what would take as long."""
        count, longest, token, pair = len(self.rows), max(self.lengths), costs.token, costs.pair
        if layout == "packed":
            return self.packed * (token + _DENSE * pair * self.packed)
        if layout == "fork":
            beginning = self.prefix * (token + _CAUSAL * pair * self.prefix)
            rests = count * self.rest * (token + _OVER_CACHE * pair * (self.prefix + self.rest))
            return beginning + rests + count * self.prefix * _COPY * pair
        return count * longest * (token + _CAUSAL * pair * longest)

    def better(self, layout: str, costs: Costs) -> str:
        """This layout where it shares something and costs less than plain rows."""
        shares = bool(layout) and self.prefix > 0
        return layout if shares and self.cost(layout, costs) < self.cost("plain", costs) else "plain"

    def unit(self, layout: str) -> Unit:
        if layout == "packed":
            return Unit(self.rows, layout, 1, self.packed, self.trained)
        if layout == "fork":
            width = self.rest + int(self.prefix * (1 / len(self.rows) + _COPIED)) + 1
            return Unit(self.rows, layout, len(self.rows), width, self.trained)
        return Unit(self.rows, layout, len(self.rows), max(self.lengths), self.trained)


def _parted(examples: Sequence[Example], group: _Group, layout: str, limits: Limits, costs: Costs) -> list[Unit]:
    """A row each where nothing is shared; else the group in halves until each is within the limits."""
    unit = group.unit(group.better(layout, costs))
    if len(group.rows) == 1:
        return [unit]
    if unit.layout == "plain":
        return [_Group.of(examples, [row]).unit("plain") for row in group.rows]
    if _fits([unit], limits):
        return [unit]
    half = len(group.rows) // 2
    halves = (_Group.of(examples, rows) for rows in (group.rows[:half], group.rows[half:]))
    return [part for each in halves for part in _parted(examples, each, layout, limits, costs)]
