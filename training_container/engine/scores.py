"""A model that gives a row one number: a transformers sequence classifier with a single label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Example
from .forward import call
from .layouts.families import pad


def row_scores(model: Any, examples: Sequence[Example], *, device: torch.device) -> Tensor:
    """The score of each row at its last token, shape [B], float32."""
    ids_B_L, real_B_L = pad([example.tokens for example in examples])
    # The model finds a row's end as the last token that is not padding.
    ids_B_L = ids_B_L.masked_fill(~real_B_L, model.config.pad_token_id)
    output = call(model, ids_B_L.to(device), attention_mask=real_B_L.long().to(device), use_cache=False)
    scores_B: Tensor = output.logits.squeeze(-1).float()
    return scores_B
