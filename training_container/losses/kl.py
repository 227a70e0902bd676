"""Estimates of the divergence from a reference, one number a sampled token (John Schulman, "Approximating KL divergence").

With x drawn from the policy p and d = log reference(x) - log p(x), each estimates KL(p || reference) in nats:

    k1 = -d                  unbiased, of either sign
    k2 = d^2 / 2             its gradient is that of the divergence itself
    k3 = exp(d) - d - 1      unbiased and never negative; the one in GRPO (arXiv:2402.03300, eq. 4)

Departure: value and gradient are finite whatever the log-ratio. Up to d = 20 nothing differs; beyond, k3 goes on along its
tangent, so that the pull back is bounded (exp(20) a token) and never gone, and past 10,000 nats d counts as that.
"""

from __future__ import annotations

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
            bounded_N = d_N.clamp(max=_TANGENT_FROM)
            # expm1 keeps the digits that exp(d) - 1 loses near 0.
            beyond_N = (d_N - bounded_N) * torch.exp(torch.tensor(_TANGENT_FROM, dtype=at_least))
            return bounded_N.expm1() + beyond_N - d_N
