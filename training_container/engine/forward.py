"""Calling a transformers causal LM, any architecture, through its own forward; and log-probabilities of given tokens.

Axes as in losses.py; V is the vocabulary, L the longest row of a micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One row to train on: token ids, and from which position on each carries a loss.

    trained: one flag a token; the first token is never trained, for nothing stands before it.
    advantage: of the completion (policy gradient only). sampled_logprobs: one a trained token, in order (likewise).
    """

    tokens: Sequence[int]
    trained: Sequence[bool]
    advantage: float = 0.0
    sampled_logprobs: Sequence[float] = ()

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True)
class MicroBatch:
    """Some examples as tensors: rows padded on the right, and the N trained tokens laid end to end."""

    ids_B_L: Tensor
    source_N: Tensor  # flat index into [B, L] of the position that predicts each trained token
    target_N: Tensor  # the trained token's id
    advantages_N: Tensor
    sampled_logprobs_N: Tensor


def collate(examples: Sequence[Example], device: torch.device) -> MicroBatch:
    """Pad on the right, with token 0: causal attention never looks there, so no mask is needed and any id will do."""
    longest = max(len(example.tokens) for example in examples)
    ids_B_L = torch.zeros(len(examples), longest, dtype=torch.long)
    trained_B_L = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids_B_L[row, : len(example.tokens)] = torch.tensor(example.tokens)
        trained_B_L[row, : len(example.tokens)] = torch.tensor(example.trained)
    position_N = trained_B_L.flatten().nonzero().squeeze(1)
    advantages_B = torch.tensor([example.advantage for example in examples])
    sampled = [value for example in examples for value in example.sampled_logprobs]
    return MicroBatch(
        ids_B_L=ids_B_L.to(device),
        source_N=(position_N - 1).to(device),
        target_N=ids_B_L.flatten()[position_N].to(device),
        advantages_N=advantages_B.repeat_interleave(trained_B_L.sum(1)).to(device),
        sampled_logprobs_N=torch.tensor(sampled).to(device),
    )


def token_logprobs(model: Any, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each trained token, shape [N], float32.

    The head sees only the positions that predict a trained token: with a vocabulary of 150,000 the logits of prompts and
    padding would be most of the memory. A hook before the head does it, so that whatever a model does after its head
    (soft-capping, scaling) stays in place.
    """

    def keep_sources(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_B_L_D = inputs[0]
        return (hidden_B_L_D.reshape(-1, hidden_B_L_D.shape[-1])[batch.source_N][None], *inputs[1:])

    hook = undressed(model).get_output_embeddings().register_forward_pre_hook(keep_sources)
    try:
        logits_N_V = call(model, batch.ids_B_L, use_cache=False).logits[0]
    finally:
        hook.remove()
    return pick_logprobs(logits_N_V, batch.target_N, temperature=temperature)


def pick_logprobs(logits_N_V: Tensor, target_N: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the targets, without keeping a second [N, V] array for the gradient."""
    scaled_N_V = logits_N_V.float()
    if temperature != 1.0:
        scaled_N_V = scaled_N_V / temperature
    return scaled_N_V.gather(-1, target_N[:, None]).squeeze(-1) - scaled_N_V.logsumexp(-1)


def micro_batches(examples: Sequence[Example], *, rows: int | None, max_tokens: int) -> Iterator[list[Example]]:
    """Cut a batch into parts of at most `rows` rows, or (None) of at most `max_tokens` tokens, padding included.

    Longest first, so that rows of like length share a part, and the part that needs most memory fails at once and not
    after half an epoch.
    """
    ordered = sorted(examples, key=lambda example: -len(example.tokens))
    start = 0
    while start < len(ordered):
        size = rows or max(1, max_tokens // len(ordered[start].tokens))
        yield ordered[start : start + size]
        start += size


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
