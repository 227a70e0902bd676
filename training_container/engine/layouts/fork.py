"""The shared beginning of a family is read once; its cache, with gradient, is repeated for the rest of every member.

Works under any attention implementation: masks are of two dimensions. The cache is copied for each member, which a long
beginning and many members make dear; `packed` copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Example, targets
from ..forward import cache_of, call, head_at, pick_logprobs
from .families import Family, families, pad, positions


def logprobs(model: Any, examples: Sequence[Example], *, device: torch.device, temperature: float = 1.0) -> Tensor:
    """As plain.logprobs, shape [N], float32."""
    shared = families(examples)
    ids_F_P, real_F_P = pad([examples[family.rows[0]].tokens[: family.prefix] for family in shared], left=True)
    last_F = torch.arange(1, len(shared) + 1) * ids_F_P.shape[1] - 1
    ragged = not bool(real_F_P.all())
    with head_at(model, last_F.to(device)):
        output = call(
            model,
            ids_F_P.to(device),
            attention_mask=real_F_P.long().to(device) if ragged else None,
            position_ids=positions(real_F_P).to(device),
            use_cache=True,
        )
    target_N, family_N, source_N = _sources(examples, shared)
    # A token at the head of a rest is predicted by the beginning; all others by the rest itself.
    in_prefix_N = source_N < 0
    head_N = pick_logprobs(
        output.logits.squeeze(0),
        target_N[in_prefix_N].to(device),
        source_N=family_N[in_prefix_N].to(device),
        temperature=temperature,
    )
    if bool(in_prefix_N.all()):
        return head_N
    ids_B_S = _rests(examples, shared)
    repeat(cache := cache_of(output), [len(family.rows) for family in shared], device)
    family_B = torch.tensor([index for index, family in enumerate(shared) for _ in family.rows])
    mask_B_L = torch.cat([real_F_P[family_B], torch.ones_like(ids_B_S, dtype=torch.bool)], 1)
    position_B_S = real_F_P.sum(1)[family_B, None] + torch.arange(ids_B_S.shape[1])
    with head_at(model, source_N[~in_prefix_N].to(device)):
        logits_M_V = call(
            model,
            ids_B_S.to(device),
            attention_mask=mask_B_L.long().to(device) if ragged else None,
            position_ids=position_B_S.to(device),
            cache=cache,
            use_cache=True,
        ).logits.squeeze(0)
    rest_N = pick_logprobs(logits_M_V, target_N[~in_prefix_N].to(device), temperature=temperature)
    order_N = torch.cat([in_prefix_N.nonzero(), (~in_prefix_N).nonzero()]).squeeze(1).argsort()
    return torch.cat([head_N, rest_N])[order_N.to(device)]


def _rests(examples: Sequence[Example], shared: Sequence[Family]) -> Tensor:
    """What each member has beyond its family's beginning, padded on the right, [B, S]. One without a rest reads padding."""
    rests = [
        examples[row].tokens[family.prefix : examples[row].read_tokens] for family in shared for row in family.rows
    ]
    return pad(rests)[0]


def _sources(examples: Sequence[Example], shared: Sequence[Family]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each trained token: its id, its family, and the position in the flattened rests that predicts it, or -1."""
    longest = max(examples[row].read_tokens - family.prefix for family in shared for row in family.rows)
    family_N, source_N = [], []
    for index, family in enumerate(shared):
        for row in family.rows:
            behind = examples[row].trained_at - family.prefix - 1
            source_N.append(np.where(behind < 0, -1, row * longest + behind))
            family_N.append(np.full(len(behind), index))
    return targets(examples), torch.from_numpy(np.concatenate(family_N)), torch.from_numpy(np.concatenate(source_N))


def repeat(cache: Any, counts: Sequence[int], device: torch.device) -> None:
    """Each row of the cache as many times as its count says, with gradient."""
    if len(set(counts)) == 1:
        # Its gradient is a plain sum; that of an index is slower.
        cache.batch_repeat_interleave(counts[0])
    else:
        cache.reorder_cache(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device))
