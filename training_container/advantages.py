"""How much better than its group a completion was.

Axes: P prompts of a rollout, G completions of a prompt. A reward of NaN stands for "not scored": the reward function
abstained, timed out, or returned something that is not finite. Such a member neither counts nor learns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["group_std", "group_mean", "leave_one_out", "batch_std"]

# Keeps rewards that barely differ from being blown up to unit size.
STD_FLOOR = 1e-4


def group_advantages(rewards_P_G: Tensor, kind: Kind = "group_std") -> Tensor:
    """Advantage of each completion, shape [P, G]; 0 for unscored members and for groups without spread.

    group_std       (r - mean) / (std + 1e-4)           arXiv:2402.03300 (GRPO)
    group_mean      r - mean                            arXiv:2503.20783 (Dr. GRPO)
    leave_one_out   r - mean of the others              arXiv:2402.14740 (RLOO)
    batch_std       (r - mean) / (batch's std + 1e-4)   arXiv:2501.03262 (REINFORCE++ with the group's mean as baseline)

    Mean and std (with n - 1) are over the scored members alone, so the advantages of a group add up to 0. batch_std takes
    the deviation of all rewards of the rollout, as TRL does; the paper takes that of their differences from the means.

    >>> group_advantages(torch.tensor([[1.0, 0.0, float("nan"), 0.0]]), "group_mean")
    tensor([[ 0.6667, -0.3333,  0.0000, -0.3333]])
    """
    scored_P_G = rewards_P_G.isfinite()
    count_P_1 = scored_P_G.sum(1, keepdim=True)
    mean_P_1 = _mean(rewards_P_G, scored_P_G)
    centred_P_G = (rewards_P_G - mean_P_1).masked_fill(~scored_P_G, 0.0)
    match kind:
        case "group_std":
            centred_P_G = centred_P_G / (_std(rewards_P_G, scored_P_G) + STD_FLOOR)
        case "leave_one_out":  # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
            centred_P_G = centred_P_G * count_P_1 / (count_P_1 - 1).clamp(min=1)
        case "batch_std":
            all_1_R = rewards_P_G.reshape(1, -1)
            centred_P_G = centred_P_G / (_std(all_1_R, all_1_R.isfinite()) + STD_FLOOR)
    return centred_P_G * has_spread(rewards_P_G)[:, None]


def has_spread(rewards_P_G: Tensor) -> Tensor:
    """Which groups can teach anything: at least two scored members that differ. Shape [P], bool.

    Asked of the rewards and not of their standard deviation, which rounding makes 1e-8 for five times 0.7.
    """
    scored_P_G = rewards_P_G.isfinite()
    highest_P = rewards_P_G.masked_fill(~scored_P_G, -torch.inf).amax(1)
    lowest_P = rewards_P_G.masked_fill(~scored_P_G, torch.inf).amin(1)
    return highest_P > lowest_P


def _mean(values_P_G: Tensor, scored_P_G: Tensor) -> Tensor:
    """Of each row's scored members, shape [P, 1]; 0 where there is none."""
    return values_P_G.masked_fill(~scored_P_G, 0.0).sum(1, keepdim=True) / scored_P_G.sum(1, keepdim=True).clamp(min=1)


def _std(values_P_G: Tensor, scored_P_G: Tensor) -> Tensor:
    """Likewise, with n - 1."""
    centred_P_G = (values_P_G - _mean(values_P_G, scored_P_G)).masked_fill(~scored_P_G, 0.0)
    return (centred_P_G.square().sum(1, keepdim=True) / (scored_P_G.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()
