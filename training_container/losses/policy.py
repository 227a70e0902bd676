"""Policy-gradient losses."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine import Metrics, MicroBatch


def policy_gradient(logprobs_N: Tensor, batch: MicroBatch, *, clip: float = 0.2) -> tuple[Tensor, Metrics]:
    """Clipped policy gradient with importance ratio (arXiv:1707.06347, eq. 7), averaged over tokens (arXiv:2503.14476).

    Differs from the GRPO paper: no KL term, and a mean over all tokens of the step instead of a mean of row means, which
    favours short right answers.

    Args:
        logprobs_N: log-probability of each sampled token under the policy that is trained.
        batch: with the log-probabilities the tokens were drawn with (no gradient), and advantages.
        clip: how far the ratio may move from 1 before a token stops pushing it further.

    Returns:
        Scalar loss with gradient, and metrics averaged over tokens: `ratio`, `clipped` (1 where the clip took the gradient
        away), `sampler_gap` (sampled minus trained log-probability, nats: 0 when sampler and trainer agree).
    """
    gap_N = logprobs_N - batch.sampled_logprobs_N
    ratio_N = gap_N.exp()
    unclipped_N = ratio_N * batch.advantages_N
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip) * batch.advantages_N
    loss = -torch.minimum(unclipped_N, clipped_N).sum() / batch.totals.tokens
    metrics = {"ratio": ratio_N, "clipped": (clipped_N < unclipped_N).float(), "sampler_gap": -gap_N}
    return loss, {name: value_N.detach().sum() / batch.totals.tokens for name, value_N in metrics.items()}
