"""What numbers a model is kept and computed in.

                        frozen weights      trained weights    computes in
    CPU                 float32             float32            float32
    GPU with bfloat16   bfloat16            float32            bfloat16, sums and losses in float32 (autocast)
    other GPUs          float32             float32            float32

Trained weights are never of 16 bits: an update of 1e-5 of a weight would be rounded away. `dtype: float32` makes it float32
everywhere, and so do presets, which are too small to gain anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from microtuning_core.domain.spec import ModelSpec


@dataclass(frozen=True)
class Precision:
    """notice: what the user should know, where the machine cannot do what was asked."""

    frozen: torch.dtype
    computes: torch.dtype
    notice: str | None = None


FLOAT32 = Precision(torch.float32, torch.float32)
BFLOAT16 = Precision(torch.bfloat16, torch.bfloat16)


def choose_precision(spec: ModelSpec, device: torch.device) -> Precision:
    if spec.dtype == "float32" or (spec.dtype == "auto" and spec.arch):
        return FLOAT32
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return BFLOAT16
    if spec.dtype == "auto":
        return FLOAT32
    where = "this machine has no GPU" if device.type == "cpu" else "this GPU has no bfloat16"
    return Precision(torch.float32, torch.float32, f"model.dtype is bfloat16, but {where}: it trains in float32")


def computing_in(model: Any, device: torch.device, computes: torch.dtype) -> Any:
    """The model, whose every forward now computes so; its weights stay what they are."""
    if computes != torch.float32:
        model.forward = torch.autocast(device.type, dtype=computes)(model.forward)
    return model


def trained_in_float32(model: Any) -> Any:
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype.is_floating_point:
            weight.data = weight.data.float()
    return model
