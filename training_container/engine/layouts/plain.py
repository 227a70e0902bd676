"""One row an example, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import Example
from ..forward import call, pick_logprobs, undressed


def logprobs(model: Any, examples: Sequence[Example], *, device: torch.device, temperature: float = 1.0) -> Tensor:
    """Log-probability of each trained token, shape [N], float32.

    The head sees only the positions that predict a trained token: with a vocabulary of 150,000 the logits of prompts and
    padding would be most of the memory. A hook before the head does it, so that whatever a model does after its head
    (soft-capping, scaling) stays in place.
    """
    ids_B_L, trained_B_L = pad_right(examples)
    position_N = trained_B_L.flatten().nonzero().squeeze(1)
    source_N = (position_N - 1).to(device)

    def keep_sources(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_B_L_D = inputs[0]
        return (hidden_B_L_D.reshape(-1, hidden_B_L_D.shape[-1])[source_N][None], *inputs[1:])

    hook = undressed(model).get_output_embeddings().register_forward_pre_hook(keep_sources)
    try:
        logits_N_V = call(model, ids_B_L.to(device), use_cache=False).logits[0]
    finally:
        hook.remove()
    return pick_logprobs(logits_N_V, ids_B_L.flatten()[position_N].to(device), temperature=temperature)


def pad_right(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Ids and trained flags, [B, L]. Padding is token 0: causal attention never looks there, so it needs no mask."""
    longest = max(len(example.tokens) for example in examples)
    ids_B_L = torch.zeros(len(examples), longest, dtype=torch.long)
    trained_B_L = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids_B_L[row, : len(example.tokens)] = torch.tensor(example.tokens)
        trained_B_L[row, : len(example.tokens)] = torch.tensor(example.trained)
    return ids_B_L, trained_B_L
