"""One row a family: the shared beginning, then the rest of each member. A mask keeps the members apart.

Nothing is copied, and one forward does it; attention is computed over the whole row, so many long members are dear. The
mask is of four dimensions, which sdpa and eager attention take; flash attention does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Example, IntArray, targets
from ..forward import call, head_at, pick_logprobs, undressed
from .families import Family, families, pad

_PADDING, _PREFIX = -1, 0  # segments; members are 1, 2, …


def logprobs(model: Any, examples: Sequence[Example], *, device: torch.device, temperature: float = 1.0) -> Tensor:
    """As plain.logprobs, shape [N], float32."""
    rows = [_row(examples, family) for family in families(examples)]
    ids_F_W, real_F_W = pad([row[0] for row in rows])
    position_F_W, segment_F_W = pad([row[1] for row in rows])[0], pad([row[2] for row in rows])[0]
    segment_F_W = segment_F_W.masked_fill(~real_F_W, _PADDING)
    starts = np.arange(len(rows)) * ids_F_W.shape[1]
    source_N = np.concatenate([start + row[3] for start, row in zip(starts, rows, strict=True)])
    source_M, source_N = np.unique(source_N, return_inverse=True)
    with head_at(model, torch.from_numpy(source_M).to(device)):
        logits_M_V = call(
            model,
            ids_F_W.to(device),
            attention_mask=masks(model, visible(segment_F_W.to(device)), position_F_W.to(device)),
            position_ids=position_F_W.to(device),
            use_cache=False,
        ).logits.squeeze(0)
    return pick_logprobs(
        logits_M_V,
        targets(examples).to(device),
        source_N=torch.from_numpy(source_N).to(device),
        temperature=temperature,
    )


def _row(examples: Sequence[Example], family: Family) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Of a family's row: ids, positions, segments, and where what predicts each trained token stands."""
    prefix = family.prefix
    ids = [np.asarray(examples[family.rows[0]].tokens[:prefix], dtype=np.int64)]
    positions, segments, sources = [np.arange(prefix)], [np.full(prefix, _PREFIX)], []
    end = prefix
    for member, row in enumerate(family.rows, start=1):
        example = examples[row]
        rest = np.asarray(example.tokens[prefix : example.read_tokens], dtype=np.int64)
        ids.append(rest)
        positions.append(np.arange(prefix, prefix + len(rest)))
        segments.append(np.full(len(rest), member))
        behind = example.trained_at - prefix - 1
        sources.append(np.where(behind < 0, prefix - 1, end + behind))
        end += len(rest)
    return np.concatenate(ids), np.concatenate(positions), np.concatenate(segments), np.concatenate(sources)


def visible(segment_F_W: Tensor) -> Tensor:
    """Which token (second-last axis) sees which: those before it of its own segment and of the shared beginning."""
    same = segment_F_W[:, :, None] == segment_F_W[:, None, :]
    return (same | (segment_F_W == _PREFIX)[:, None, :]).tril()


def masks(model: Any, visible_F_Q_K: Tensor, position_F_K: Tensor) -> Tensor | dict[str, Tensor]:
    """The mask as this model's attention wants it; one a kind of layer where it has several.

    Windows and chunks are cut by positions in the text, not in the row. Queries are the last of the keys.

    Raises:
        NotImplementedError: an attention, or a kind of layer, that no such mask can be given to.
    """
    config = undressed(model).config.get_text_config()
    if config._attn_implementation not in ("sdpa", "eager"):
        raise NotImplementedError(f"{config._attn_implementation} attention takes no mask of four dimensions")
    key, query = position_F_K[:, None, :], position_F_K[:, -visible_F_Q_K.shape[1] :, None]
    window: Any = getattr(config, "sliding_window", None)
    chunk: Any = getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])

    def of(kind: str) -> Tensor:
        if kind == "full_attention":
            seen = visible_F_Q_K
        elif kind == "sliding_attention":
            seen = visible_F_Q_K & (query - key < window)
        elif kind == "chunked_attention":
            seen = visible_F_Q_K & (query // chunk == key // chunk)
        else:
            raise NotImplementedError(f"layers of {kind}")
        return additive(seen, undressed(model).dtype)[:, None]

    found = {kind: of(kind) for kind in sorted(kinds)}
    return found if len(found) > 1 else next(iter(found.values()))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, else the least number: eager attention adds its mask, where a boolean one would silently be wrong."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
