"""Supervised losses, each number worked by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training_container.engine import MicroBatch, Totals
from training_container.losses import cross_entropy


def leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def close(actual: Tensor, expected: list[float] | float, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def a_batch(*, tokens: int) -> MicroBatch:
    """A loss of likelihood asks for the totals alone."""
    none = torch.zeros(0)
    return MicroBatch(
        none.long(), none.long(), none, none, none, none, torch.zeros(1), torch.zeros(1), Totals(tokens, 1)
    )


def test_cross_entropy_of_probabilities_a_half_and_an_eighth_is_two_log_two() -> None:
    # -(log 1/2 + log 1/8) / 2 = (1 + 3) log 2 / 2 = 2 log 2; each token pulls with -1/2.
    logprobs_N = leaf([math.log(0.5), math.log(0.125)])
    loss, _ = cross_entropy(logprobs_N, a_batch(tokens=2))
    close(loss, 2 * math.log(2))
    loss.backward()
    close(logprobs_N.grad, [-0.5, -0.5])


def test_cross_entropy_weighs_tokens_and_not_rows() -> None:
    # A row of 1 token at -1 and one of 3 tokens at -3: (1 + 9) / 4 = 2.5; the mean of row means would be 2.
    short, _ = cross_entropy(leaf([-1.0]), a_batch(tokens=4))
    long, _ = cross_entropy(leaf([-3.0, -3.0, -3.0]), a_batch(tokens=4))
    close(short + long, 2.5)
