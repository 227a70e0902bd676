"""The processes that train one model together. Recipes are written as if there were one; the engine asks here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


class World:
    """One process alone: every share is the whole, and nothing is sent."""

    rank, size = 0, 1
    # Whether a forward is a collective: then every process must make the same number of them.
    forwards_together = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, weights: Sequence[int]) -> list[int]:
        """Indices of this process's part of some work, of which each piece weighs so much."""
        return list(range(len(weights)))

    def gather(self, mine: Item) -> list[Item]:
        """What each process has, in the order of ranks, on every process."""
        return [mine]

    def broadcast(self, value: Item) -> Item:
        """The main process's value, on every process."""
        return value

    def once(self, make: Callable[[], Item]) -> Item:
        """What the main process makes, on every process: for what must not be done twice, as asking a reward."""
        return make()

    def sum(self, values: dict[str, Tensor]) -> dict[str, float]:
        """The sums over processes; one may lack names that others have."""
        return {name: float(value) for name, value in values.items()}

    def most(self, number: int) -> int:
        return number

    def add_gradients(self, weights: Iterable[torch.nn.Parameter]) -> int:
        """Add up every process's gradient, in place; the bytes this process sent."""
        return 0

    def clip_gradients(self, weights: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        """Scale the gradient down to `max_norm`, in place; its norm before that, the same on every process."""
        return float(torch.nn.utils.clip_grad_norm_(weights, max_norm))
