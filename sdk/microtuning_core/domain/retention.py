"""Which checkpoints of a lineage are kept: one rule for the machine's own disk and for S3."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from microtuning_core.domain.spec import CheckpointSpec


class Measured(Protocol):
    """A checkpoint, as far as keeping it goes: a manifest, or what the tables say of one."""

    @property
    def step(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def final(self) -> bool: ...


Each = TypeVar("Each", bound=Measured)


def superfluous(checkpoints: Sequence[Each], spec: CheckpointSpec, *, in_use: Collection[int] = ()) -> list[Each]:
    """Those of one lineage that need not be kept: not among the newest `keep`, not the best, not final, not in use.

    in_use: steps that something begins from, or will. What a user pinned is a copy of its own (branching.py).
    """
    ordered = sorted(checkpoints, key=lambda each: each.step)
    best = best_of(ordered, spec)
    kept = {each.step for each in ordered[-spec.keep :]} | set(in_use) | ({best.step} if best else set())
    return [each for each in ordered if each.step not in kept and not each.final]


def best_of(checkpoints: Sequence[Each], spec: CheckpointSpec) -> Each | None:
    """The one that is best by `best_metric`, the newest of equals; None where none is asked for, or none has it."""
    name = spec.best_metric
    measured = [each for each in checkpoints if name is not None and name in each.metrics]
    sign = 1 if spec.best_is == "highest" else -1
    return max(measured, key=lambda each: (sign * each.metrics[name or ""], each.step), default=None)
