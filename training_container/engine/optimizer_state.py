"""AdamW's moments as tensors by name, whatever the number of processes: "<weight>|exp_avg"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..failures import UserFailure
from .sharding import full, spread_like

Weights = Mapping[str, torch.nn.Parameter]
# step: optimizer steps; the moments have their weight's shape.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEYS = ("step", *_MOMENTS)


def optimizer_tensors(weights: Weights, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All of them, whole; a collective where weights are sharded."""
    return {
        f"{name}|{key}": full(value).contiguous()
        for name, weight in weights.items()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def load_optimizer_tensors(weights: Weights, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put them where `optimizer_tensors` found them.

    Raises:
        UserFailure: they are another optimizer's, or of other weights. Half of a state is worse than none.
    """
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("|")
        weight = weights.get(name)
        if weight is None or key not in _KEYS or (key in _MOMENTS and value.shape != weight.shape):
            raise UserFailure(
                f"The checkpoint's optimizer state does not fit this run's AdamW: {full_name} {tuple(value.shape)} has no "
                "place there. Resume with the algorithm, adapter, rank and target_modules that the checkpoint was made "
                "with, or start a new run."
            )
        optimizer.state[weight][key] = spread_like(value, weight)
