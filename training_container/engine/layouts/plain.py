"""One row an example, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Example, targets
from ..forward import call, head_at, pick_logprobs
from .families import pad


def logprobs(model: Any, examples: Sequence[Example], *, device: torch.device, temperature: float = 1.0) -> Tensor:
    """Log-probability of each trained token, shape [N], float32.

    No mask: causal attention never looks at padding on the right.
    """
    ids_B_L, _ = pad([example.tokens[: example.read_tokens] for example in examples])
    starts = np.arange(len(examples)) * ids_B_L.shape[1]
    source = np.concatenate([start + example.trained_at - 1 for start, example in zip(starts, examples, strict=True)])
    with head_at(model, torch.from_numpy(source).to(device)):
        logits_N_V = call(model, ids_B_L.to(device), use_cache=False).logits.squeeze(0)
    return pick_logprobs(logits_N_V, targets(examples).to(device), temperature=temperature)
