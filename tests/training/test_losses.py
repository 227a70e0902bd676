"""Losses and advantages, each number worked by hand, and gradients against autograd or finite differences."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training_container.advantages import group_advantages, has_spread
from training_container.engine import MicroBatch, Totals
from training_container.losses import cross_entropy, policy_gradient

NAN = math.nan


def leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def close(actual: Tensor, expected: list[float] | float, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def a_batch(sampled: list[float] | Tensor = (), advantages: list[float] | Tensor = (), *, tokens: int) -> MicroBatch:  # type: ignore[assignment]
    """One row's tokens as a loss sees them, in double precision."""
    count = max(len(sampled), 1)
    none = torch.zeros(0)
    return MicroBatch(
        target_N=torch.zeros(count, dtype=torch.long), row_N=torch.zeros(count, dtype=torch.long),
        advantages_N=torch.as_tensor(advantages, dtype=torch.float64),
        sampled_logprobs_N=torch.as_tensor(sampled, dtype=torch.float64),
        old_logprobs_N=none, reference_logprobs_N=none, label_B=torch.zeros(1), group_B=torch.zeros(1),
        totals=Totals(tokens, 1),
    )  # fmt: skip


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


def test_the_policy_gradient_on_policy_is_minus_the_advantage_over_the_tokens() -> None:
    # ratio 1: loss = -(2 - 1 + 0) / 3; d loss / d logprob = -advantage / 3.
    logprobs_N = leaf([-0.5, -1.0, -2.0])
    loss, metrics = policy_gradient(logprobs_N, a_batch(logprobs_N.detach(), [2.0, -1.0, 0.0], tokens=3))
    close(loss, -1 / 3)
    loss.backward()
    close(logprobs_N.grad, [-2 / 3, 1 / 3, 0.0])
    assert (float(metrics["ratio"]), float(metrics["clipped"]), float(metrics["sampler_gap"])) == (1.0, 0.0, 0.0)


def test_the_clip_stops_a_token_that_has_moved_far_enough_in_the_wanted_direction() -> None:
    # ratios 1.5 and 0.5, clip 0.2.
    #   advantage +1: min(1.5, 1.2) = 1.2 no gradient | min(0.5, 0.8) = 0.5 gradient -0.5
    #   advantage -1: min(-1.5, -1.2) = -1.5 gradient +1.5 | min(-0.5, -0.8) = -0.8 no gradient
    sampled_N = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    logprobs_N = (sampled_N + torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64).log()).requires_grad_()
    loss, metrics = policy_gradient(logprobs_N, a_batch(sampled_N, [1.0, 1.0, -1.0, -1.0], tokens=4))
    close(loss, -(1.2 + 0.5 - 1.5 - 0.8) / 4)
    loss.backward()
    close(logprobs_N.grad, [0.0, -0.5 / 4, 1.5 / 4, 0.0])
    assert float(metrics["clipped"]) == 0.5


def test_the_policy_gradient_equals_finite_differences() -> None:
    sampled_N, advantages_N = torch.tensor([-1.0, -0.3, -2.0]).double(), torch.tensor([0.7, -1.1, 0.2]).double()
    logprobs_N = leaf([-0.95, -0.4, -1.9])

    def loss_at(values_N: Tensor) -> Tensor:
        return policy_gradient(values_N, a_batch(sampled_N, advantages_N, tokens=3))[0]

    assert torch.autograd.gradcheck(loss_at, logprobs_N)


# --- advantages ------------------------------------------------------------------------------------------------------


def test_advantages_of_one_right_in_four_are_1_5_and_minus_a_half_by_std() -> None:
    # mean 1/4, deviations 3/4 and -1/4, variance (9 + 3) / 16 / 3 = 1/4, std 1/2 (+ 1e-4).
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    close(advantages, [[0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]], 1e-6)


def test_advantages_by_mean_are_the_plain_deviations() -> None:
    close(group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "group_mean"), [[0.75, -0.25, -0.25, -0.25]])


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_a_group_without_spread_gets_exactly_0_even_where_rounding_gives_it_a_deviation(kind: Any) -> None:
    rewards_P_G = torch.tensor([[0.7] * 5, [0.1, 0.1, 0.1, 0.1, NAN], [NAN] * 5, [0.3, NAN, NAN, NAN, NAN]])
    assert group_advantages(rewards_P_G, kind).abs().max() == 0.0
    assert has_spread(rewards_P_G).tolist() == [False] * 4


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_an_unscored_member_gets_0_and_the_scored_ones_add_up_to_0(kind: Any) -> None:
    advantages = group_advantages(torch.tensor([[1.0, NAN, 0.0, NAN], [0.0, 0.5, 1.0, 0.25]]), kind)
    assert advantages[0, [1, 3]].tolist() == [0.0, 0.0]
    close(advantages.sum(1), [0.0, 0.0], 1e-6)
    assert advantages[0, 0] == -advantages[0, 2] > 0.49


@pytest.mark.parametrize("name", ["some_none", "all_none", "has_nan", "has_inf", "ints_bools"])
def test_no_odd_reward_ever_makes_an_advantage_that_is_not_finite(name: str) -> None:
    zoo = runpy.run_path(str(Path(__file__).parents[1] / "cases" / "c15_reward_zoo.py"))
    values = [NAN if value is None else float(value) for value in zoo[name](["a", "b", "c", "d"])]
    advantages = group_advantages(torch.tensor([values]))
    assert advantages.isfinite().all()
    assert abs(float(advantages.sum())) < 1e-6
