"""Advantages, each number worked by hand."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training_container.advantages import group_advantages, has_spread

NAN = math.nan
KINDS = ["group_std", "group_mean", "leave_one_out", "batch_std"]


def close(actual: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=tolerance, rtol=0)


def test_advantages_of_one_right_in_four_are_1_5_and_minus_a_half_by_std() -> None:
    # mean 1/4, deviations 3/4 and -1/4, variance (9 + 3) / 16 / 3 = 1/4, std 1/2 (+ 1e-4).
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    close(advantages, [[0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]])


def test_advantages_by_mean_are_the_plain_deviations() -> None:
    close(group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "group_mean"), [[0.75, -0.25, -0.25, -0.25]])


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 1 - (0 + 0 + 0) / 3 = 1; 0 - (1 + 0 + 0) / 3 = -1/3. With one unscored: 1 - (0 + 0) / 2 and 0 - (1 + 0) / 2.
    rewards_P_G = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, NAN, 0.0, 0.0]])
    close(group_advantages(rewards_P_G, "leave_one_out"), [[1.0, -1 / 3, -1 / 3, -1 / 3], [1.0, 0.0, -0.5, -0.5]])


def test_batch_std_divides_every_group_by_the_deviation_of_all_rewards() -> None:
    # All of 1, 0, 4, 2, 3: mean 2, squares 1 + 4 + 4 + 0 + 1 = 10, over 4: std sqrt(2.5). Group means 1/2 and 3.
    rewards_P_G = torch.tensor([[1.0, 0.0, NAN], [4.0, 2.0, 3.0]])
    std = math.sqrt(2.5) + 1e-4
    close(group_advantages(rewards_P_G, "batch_std"), [[0.5 / std, -0.5 / std, 0.0], [1 / std, -1 / std, 0.0]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_without_spread_gets_exactly_0_even_where_rounding_gives_it_a_deviation(kind: Any) -> None:
    rewards_P_G = torch.tensor([[0.7] * 5, [0.1, 0.1, 0.1, 0.1, NAN], [NAN] * 5, [0.3, NAN, NAN, NAN, NAN]])
    assert group_advantages(rewards_P_G, kind).abs().max() == 0.0
    assert has_spread(rewards_P_G).tolist() == [False] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_unscored_member_gets_0_and_the_scored_ones_add_up_to_0(kind: Any) -> None:
    advantages = group_advantages(torch.tensor([[1.0, NAN, 0.0, NAN], [0.0, 0.5, 1.0, 0.25]]), kind)
    assert advantages[0, [1, 3]].tolist() == [0.0, 0.0]
    close(advantages.sum(1), [0.0, 0.0])
    assert advantages[0, 0] == -advantages[0, 2] > 0.49


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["some_none", "all_none", "has_nan", "has_inf", "ints_bools"])
def test_no_odd_reward_ever_makes_an_advantage_that_is_not_finite(name: str, kind: Any) -> None:
    zoo = runpy.run_path(str(Path(__file__).parents[1] / "cases" / "c15_reward_zoo.py"))
    values = [NAN if value is None else float(value) for value in zoo[name](["a", "b", "c", "d"])]
    advantages = group_advantages(torch.tensor([values]), kind)
    assert advantages.isfinite().all()
    assert abs(float(advantages.sum())) < 1e-6
