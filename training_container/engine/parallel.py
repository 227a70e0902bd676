"""The processes that train one model together. Recipes are written as if there were one; the engine asks here.

Every process holds the same recipe, rows and sources of chance, takes its share of the work, and has everybody's results
afterwards. Gradients are added up, not averaged: a loss divides by the totals of all processes (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..failures import PlatformFailure, UserFailure
from .sharding import full, shard

Item = TypeVar("Item")
Compression = Literal["none", "float16", "bfloat16"]

# Gradients travel in buckets of this many numbers: a copy of them all at once would double their memory.
_BUCKET_NUMBERS = 2**24
# While the main process waits for a reward the others wait for it; whoever dies closes its sockets, which they see at once.
_PATIENCE = timedelta(days=1)


class World:
    """One process alone: every share is the whole, and nothing is sent."""

    rank, size = 0, 1
    # Whether a forward is a collective: then every process must make the same number of them.
    forwards_together = False
    # Whether all trained weights are to be spread over the processes (sharding.py).
    shards = False

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
        """The largest of everybody's numbers."""
        return number

    def rounds(self, mine: int) -> int:
        """How many forwards and backwards this process makes when it has work for so many."""
        return mine

    def add_gradients(self, weights: Iterable[torch.nn.Parameter]) -> int:
        """Add up every process's gradient, in place; the bytes this process sent since the last call."""
        return 0

    def clip_gradients(self, weights: Sequence[torch.nn.Parameter], max_norm: float) -> float:
        """Scale the gradient down to `max_norm`, in place; its norm before that, the same on every process."""
        return float(full(torch.nn.utils.clip_grad_norm_(weights, max_norm)))

    def shard(self, model: Any, device: torch.device) -> None:
        """Spread the model's weights over the processes, in place."""

    def leave(self) -> None:
        """Take leave of the others, at the end."""


class Processes(World):
    """Several processes over torch.distributed: gloo between CPUs and for small things, NCCL between GPUs."""

    def __init__(self, *, compression: Compression = "none", shards: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shards = shards
        self._sharded_bytes = 0  # what a forward and backward through a sharded model sends
        self._wire = {"none": None, "float16": torch.float16, "bfloat16": torch.bfloat16}[compression]
        self._sent = 0

    @property
    def forwards_together(self) -> bool:  # type: ignore[override]  # a constant of one process alone
        return self._sharded_bytes > 0

    def share(self, weights: Sequence[int]) -> list[int]:
        """Heaviest first, each to whoever has least so far: at most 4/3 of the best possible maximum (Graham 1969)."""
        loads = [0] * self.size
        mine = []
        for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
            taker = loads.index(min(loads))
            loads[taker] += weights[index]
            if taker == self.rank:
                mine.append(index)
        return sorted(mine)

    def gather(self, mine: Item) -> list[Item]:
        found: list[Any] = [None] * self.size
        with talking():
            dist.all_gather_object(found, mine)
        return found

    def broadcast(self, value: Item) -> Item:
        held = [value]
        with talking():
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def once(self, make: Callable[[], Item]) -> Item:
        return self.broadcast(make() if self.is_main else None)  # type: ignore[return-value]  # the others' is not used

    def sum(self, values: dict[str, Tensor]) -> dict[str, float]:
        everyones = self.gather({name: float(value) for name, value in values.items()})
        names = dict.fromkeys(chain.from_iterable(everyones))
        return {name: sum(each.get(name, 0.0) for each in everyones) for name in names}

    def most(self, number: int) -> int:
        found = torch.tensor(number, dtype=torch.long)
        with talking():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def rounds(self, mine: int) -> int:
        if not self.forwards_together:
            return mine
        rounds = self.most(mine)
        self._sent += rounds * self._sharded_bytes
        return rounds

    def add_gradients(self, weights: Iterable[torch.nn.Parameter]) -> int:
        """Those of sharded weights were added up by their backward. A weight that no process has a gradient for keeps
        none, so that the optimizer leaves it alone as it does on one process."""
        whole = [weight for weight in weights if not hasattr(weight, "full_tensor")]
        with talking():
            for bucket in buckets(self._with_gradient(whole)):
                self._add_bucket(bucket)
        sent, self._sent = self._sent, 0
        return sent

    def _with_gradient(self, weights: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """The weights that any process has a gradient for; where it is not this one, its gradient is zero."""
        present = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.uint8)
        if weights:
            dist.all_reduce(present, dist.ReduceOp.MAX)
            self._count(present)
        found = [weight for weight, has_one in zip(weights, present.tolist(), strict=True) if has_one]
        for weight in found:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return found

    def _add_bucket(self, bucket: list[torch.nn.Parameter]) -> None:
        gradients = [weight.grad for weight in bucket if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        sent = flat if self._wire is None else flat.to(self._wire)
        dist.all_reduce(sent)
        self._count(sent)
        parts = torch.split(sent.to(flat.dtype), [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _count(self, tensor: Tensor) -> None:
        """A ring sends every number once around to be added up and once more to be told, but for its own part."""
        self._sent += 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size

    def shard(self, model: Any, device: torch.device) -> None:
        self._sharded_bytes = shard(model, size=self.size, device=device)

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def talking() -> Iterator[None]:
    """Another process's end is the machine's fault as far as this one can know, whoever's code it happens in."""
    try:
        yield
    except RuntimeError as error:
        raise PlatformFailure(f"Another process of this run does not answer: {error}") from error


def buckets(weights: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Weights of one dtype and device, in their order, of at most `_BUCKET_NUMBERS` numbers or one weight."""
    taken: list[torch.nn.Parameter] = []
    for weight in weights:
        fits = sum(each.numel() for each in taken) + weight.numel() <= _BUCKET_NUMBERS
        if taken and not (fits and (weight.dtype, weight.device) == (taken[0].dtype, taken[0].device)):
            yield taken
            taken = []
        taken.append(weight)
    if taken:
        yield taken


def join(environment: Mapping[str, str], device: torch.device, *, compression: Compression = "none") -> World:
    """The world that torchrun's variables describe (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without them one process.

    MICROTUNING_SHARD says whether fully trained weights are spread over the processes; else they are on GPUs.
    """
    size = int(environment.get("WORLD_SIZE") or 1)
    if size == 1:
        return World()
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise UserFailure(
            f"compute.processes is {size} and the machine has {torch.cuda.device_count()} GPUs, of which every process "
            "needs one. Lower it, or leave it out."
        )
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise PlatformFailure(f"The {size} processes of this run cannot reach each other: {error}") from error
    shards = environment.get("MICROTUNING_SHARD") or str(int(device.type == "cuda"))
    return Processes(compression=compression, shards=shards == "1")
