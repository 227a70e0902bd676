"""How much better than its group a completion was.

Axes: P prompts of a step, G completions of a prompt. A reward of NaN stands for "not scored": the reward function
abstained, timed out, or returned something that is not finite. Such a member neither counts nor learns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Keeps a group whose rewards barely differ from being blown up to unit size.
STD_FLOOR = 1e-4


def group_advantages(rewards_P_G: Tensor, kind: Literal["group_std", "group_mean"] = "group_std") -> Tensor:
    """Advantage of each completion, shape [P, G]; 0 for unscored members and for groups without spread.

    group_std: (r - mean) / (std + 1e-4), std with n - 1 (arXiv:2402.03300). group_mean: r - mean (arXiv:2503.20783). Mean
    and std are over the scored members alone, so the advantages of a group add up to 0.

    >>> group_advantages(torch.tensor([[1.0, 0.0, float("nan"), 0.0]]), "group_mean")
    tensor([[ 0.6667, -0.3333,  0.0000, -0.3333]])
    """
    scored_P_G = rewards_P_G.isfinite()
    count_P_1 = scored_P_G.sum(1, keepdim=True).clamp(min=1)
    filled_P_G = rewards_P_G.masked_fill(~scored_P_G, 0.0)
    centred_P_G = (filled_P_G - filled_P_G.sum(1, keepdim=True) / count_P_1).masked_fill(~scored_P_G, 0.0)
    if kind == "group_std":
        variance_P_1 = centred_P_G.square().sum(1, keepdim=True) / (count_P_1 - 1).clamp(min=1)
        centred_P_G = centred_P_G / (variance_P_1.sqrt() + STD_FLOOR)
    return centred_P_G * has_spread(rewards_P_G)[:, None]


def has_spread(rewards_P_G: Tensor) -> Tensor:
    """Which groups can teach anything: at least two scored members that differ. Shape [P], bool.

    Asked of the rewards and not of their standard deviation, which rounding makes 1e-8 for five times 0.7.
    """
    scored_P_G = rewards_P_G.isfinite()
    highest_P = rewards_P_G.masked_fill(~scored_P_G, -torch.inf).amax(1)
    lowest_P = rewards_P_G.masked_fill(~scored_P_G, torch.inf).amin(1)
    return highest_P > lowest_P
