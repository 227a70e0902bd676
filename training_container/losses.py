"""Losses as pure functions of log-probabilities.

Axes: N the trained tokens of a micro-batch, laid end to end (prompts and padding are not among them) · B rows · T tokens of
a row · P prompts · G completions of a prompt. Log-probabilities are in nats.

Every loss divides by `total_tokens`, the trained tokens of the whole optimizer step and not of the micro-batch: so the sum
over micro-batches is the loss of the full batch, however it was cut, and a long row weighs more than a short one.
Metrics are sums over the tokens given, which the engine adds up over micro-batches and divides by their number.

To add one: a function here with its numbers worked by hand in tests/training/test_losses.py, then a recipe that uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

Metrics = dict[str, Tensor]


def cross_entropy(logprobs_N: Tensor, *, total_tokens: int) -> tuple[Tensor, Metrics]:
    """Mean negative log-likelihood of the trained tokens.

    Args:
        logprobs_N: log-probability of each trained token given what stands before it.
        total_tokens: trained tokens of the whole step.

    Returns:
        Scalar loss with gradient; no metrics beside it.
    """
    return -logprobs_N.sum() / total_tokens, {}


def policy_gradient(
    logprobs_N: Tensor, sampled_logprobs_N: Tensor, advantages_N: Tensor, *, total_tokens: int, clip: float = 0.2
) -> tuple[Tensor, Metrics]:
    """Clipped policy gradient with importance ratio (arXiv:1707.06347, eq. 7), averaged over tokens (arXiv:2503.14476).

    Differs from the GRPO paper: no KL term, and a mean over all tokens of the step instead of a mean of row means, which
    favours short right answers.

    Args:
        logprobs_N: log-probability of each sampled token under the policy that is trained.
        sampled_logprobs_N: the same under the distribution it was drawn from; no gradient.
        advantages_N: advantage of the completion a token belongs to.
        total_tokens: trained tokens of the whole step.
        clip: how far the ratio may move from 1 before a token stops pushing it further.

    Returns:
        Scalar loss with gradient, and metrics summed over tokens: `ratio`, `clipped` (1 where the clip took the gradient
        away), `sampler_gap` (sampled minus trained log-probability, nats: 0 when sampler and trainer agree).
    """
    gap_N = logprobs_N - sampled_logprobs_N
    ratio_N = gap_N.exp()
    unclipped_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip) * advantages_N
    loss = -torch.minimum(unclipped_N, clipped_N).sum() / total_tokens
    metrics = {"ratio": ratio_N, "clipped": (clipped_N < unclipped_N).float(), "sampler_gap": -gap_N}
    return loss, {name: value_N.detach().sum() for name, value_N in metrics.items()}
