"""Likelihood of given tokens."""

from __future__ import annotations

from torch import Tensor

from ..engine import Metrics, MicroBatch


def cross_entropy(logprobs_N: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """Mean negative log-likelihood over the trained tokens of the step; no metrics beside it."""
    return -logprobs_N.sum() / batch.totals.tokens, {}
