"""Calling a transformers causal LM, any architecture, through its own forward, with logits only where they are needed.

Axes: N trained tokens of a micro-batch · M positions that predict one or more of them · V the vocabulary · B rows · L the
longest row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Rows of an [M, V] array are worked on as many at a time as make about this many numbers: they stay in a CPU's cache, and
# whatever is needed beside the array itself stays small.
_CHUNK = 2**18


def pick_logprobs(
    logits_M_V: Tensor, target_N: Tensor, *, source_N: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature) at the targets, shape [N], float32.

    One array of the logits' size is made for the gradient, and none without; autograd's own would make three.

    Args:
        source_N: the row of logits each target is predicted by; row n predicts target n where not given.
    """
    if source_N is None:
        source_N = torch.arange(len(target_N), device=target_N.device)
    picked_N: Tensor = _Picked.apply(logits_M_V, source_N, target_N, temperature)  # type: ignore[no-untyped-call]
    return picked_N


class _Picked(torch.autograd.Function):
    """d logprob_n / d logits_m = (onehot(target_n) - softmax_m) / temperature, where m predicts n."""

    @staticmethod
    def forward(ctx: Any, logits_M_V: Tensor, source_N: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        total_M = torch.empty(len(logits_M_V), device=logits_M_V.device)
        for rows in _chunks(logits_M_V):
            total_M[rows] = torch.logsumexp(_scaled(logits_M_V[rows], temperature), -1)
        ctx.save_for_backward(logits_M_V, source_N, target_N, total_M)
        ctx.temperature = temperature
        return logits_M_V[source_N, target_N].float() / temperature - total_M[source_N]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits_M_V, source_N, target_N, total_M = ctx.saved_tensors
        pull_N = gradients[0] / ctx.temperature
        pull_M = torch.zeros_like(total_M).index_add_(0, source_N, pull_N)
        gradient_M_V = torch.empty_like(logits_M_V)
        for rows in _chunks(logits_M_V):
            share = _scaled(logits_M_V[rows], ctx.temperature) - total_M[rows, None]
            gradient_M_V[rows] = share.exp_().mul_(-pull_M[rows, None])
        gradient_M_V.index_put_((source_N, target_N), pull_N.to(gradient_M_V.dtype), accumulate=True)
        return gradient_M_V, None, None, None


def _scaled(logits_M_V: Tensor, temperature: float) -> Tensor:
    return logits_M_V.float() if temperature == 1.0 else logits_M_V.float() / temperature


def _chunks(array_M_V: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK // array_M_V.shape[1])
    return (slice(start, start + rows) for start in range(0, len(array_M_V), rows))


@contextmanager
def head_at(model: Any, position_M: Tensor) -> Iterator[None]:
    """Within, the head sees only these positions of the flattened [B * L]; logits come out as [1, M, V].

    Take that axis off by `squeeze(0)`: the gradient of an index would be an array of zeros, and a copy.

    With a vocabulary of 150,000 the logits of prompts and padding would be most of the memory. A hook before the head does
    it, so that whatever a model does after its head (soft-capping, scaling) stays in place.
    """

    def keep(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_B_L_D = inputs[0]
        return (hidden_B_L_D.reshape(-1, hidden_B_L_D.shape[-1])[position_M][None], *inputs[1:])

    hook = undressed(model).get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield
    finally:
        hook.remove()


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
