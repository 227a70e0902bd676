"""Estimates of the divergence from a reference, one number a sampled token (John Schulman, "Approximating KL divergence").

With x drawn from the policy p and d = log reference(x) - log p(x), each estimates KL(p || reference) in nats:

    k1 = -d                  unbiased, of either sign
    k2 = d^2 / 2             its gradient is that of the divergence itself
    k3 = exp(d) - d - 1      unbiased and never negative; the one of GRPO (arXiv:2402.03300, eq. 4)

Departure: value and gradient are finite whatever the log-ratio. Up to d = 20 nothing differs; beyond, k3 goes on along its
tangent, so that the pull back is bounded (exp(20) a token) and never gone, and past 10,000 nats d counts as that.

As a loss, differentiating the estimate is not enough: the tokens were drawn from the policy, which moves too. `penalty` has
the gradient of KL(p || reference) itself, on the average over tokens drawn from q and with r = p / q: r sg(k1), whose own
gradient would be 0; sg(r) k2; and r k3 (arXiv:2512.02556), whose own gradient would be that of the other direction.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

_TANGENT_FROM, _LARGEST = 20.0, 1e4


def kl(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: Estimator = "k3") -> Tensor:
    """The estimate at each token, shape [N], with gradient to `logprobs_N`; in float32 at least."""
    at_least = torch.promote_types(logprobs_N.dtype, torch.float32)
    d_N = (reference_logprobs_N.to(at_least) - logprobs_N.to(at_least)).clamp(-_LARGEST, _LARGEST)
    match estimator:
        case "k1":
            return -d_N
        case "k2":
            return d_N.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(d) - 1 loses near 0.
            exact_N = d_N.clamp(max=_TANGENT_FROM).expm1() - d_N
            tangent_N = math.exp(_TANGENT_FROM) * (1 + d_N - _TANGENT_FROM) - 1 - d_N
            return torch.where(d_N > _TANGENT_FROM, tangent_N, exact_N)


def penalty(estimate_N: Tensor, ratio_N: Tensor, estimator: Estimator) -> Tensor:
    """The estimate as a loss, shape [N]; `ratio_N` (r, with gradient) is of the policy to the one the tokens came from."""
    match estimator:
        case "k1":
            return ratio_N * estimate_N.detach()
        case "k2":
            return ratio_N.detach() * estimate_N
        case "k3":
            return ratio_N * estimate_N
