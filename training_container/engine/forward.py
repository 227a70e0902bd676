"""Calling a transformers causal LM, any architecture, through its own forward.

Axes: N trained tokens of a micro-batch · V the vocabulary · B rows · L the longest row.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


def pick_logprobs(logits_N_V: Tensor, target_N: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the targets, without keeping a second [N, V] array for the gradient."""
    scaled_N_V = logits_N_V.float()
    if temperature != 1.0:
        scaled_N_V = scaled_N_V / temperature
    return scaled_N_V.gather(-1, target_N[:, None]).squeeze(-1) - scaled_N_V.logsumexp(-1)


# --- calling any causal LM -----------------------------------------------------------------------------------------------


def undressed(model: Any) -> Any:
    """The transformers model inside a peft wrapper, for looking at; calls go through the wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def call(model: Any, ids_B_L: Tensor, **wanted: Any) -> Any:
    """One forward with those of the wanted arguments that this architecture knows; `cache` goes by its name there."""
    known = _parameters(undressed(model))
    if (cache := wanted.pop("cache", None)) is not None:
        wanted[cache_argument(known)] = cache
    given = {
        name: value for name, value in wanted.items() if value is not None and (name in known or name == "use_cache")
    }
    return model(input_ids=ids_B_L, **given)


def _parameters(model: Any) -> frozenset[str]:
    """Names the forward takes; kept on the model, for asking takes longer than a small model's forward."""
    if "_microtuning_parameters" not in model.__dict__:
        model.__dict__["_microtuning_parameters"] = frozenset(inspect.signature(model.forward).parameters)
    known: frozenset[str] = model.__dict__["_microtuning_parameters"]
    return known


def cache_argument(known: frozenset[str]) -> str:
    """`cache` since transformers 5.2x, `past_key_values` before, `cache_params` for state-space models."""
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in known), "past_key_values")


def cache_of(output: Any) -> Any:
    return next(
        cache
        for name in ("cache", "past_key_values", "cache_params")
        if (cache := getattr(output, name, None)) is not None
    )
