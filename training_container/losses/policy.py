"""Policy-gradient losses by settings: a term a token, a penalty for leaving the reference, and what they are shared over.

With r = exp(log p - log q) the importance ratio of a token to the policy q before the rollout's first update, and A its
advantage, the term of a token is

    ppo                   -min(r A, clip(r, 1 - low, 1 + high) A)    arXiv:1707.06347, eq. 7; high > low: 2503.14476, eq. 8
    importance_sampling   -r A                                       REINFORCE with importance weights
    cispo                 -sg(min(r, 1 + high)) A log p              arXiv:2506.13585, eq. 4 and 5, with no bound below
    gspo                  ppo with the row's exp(mean of log r)      arXiv:2507.18071, eq. 5 and 7
    dro                   -(A log p - beta / 2 (log r)^2)            arXiv:2405.19107: its square over beta, less a constant

The step's loss is the sum of the terms over (`normalise`)

    token      all tokens of the step                                arXiv:2503.14476, eq. 8
    sequence   the tokens of each row, then the rows                 arXiv:2402.03300, eq. 3
    constant   rows times the longest completion there may be        arXiv:2503.20783 (Dr. GRPO)

Tokens and rows are those of `batch.totals`: rows left out because they have no gradient do count. Metrics are means over
the tokens of `trained`, for nothing was computed of the others.

Departures: log r is held to [-20, 20], where its exponential is harmless. gspo's term is the same for each token of a row,
so "sequence" weighs rows as the paper does. dro takes our advantages where the paper learns a value. The penalty for
leaving the reference has the gradient of the divergence, which GRPO's k3 by itself has not (kl.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..engine import Metrics, MicroBatch, Totals
from .kl import Estimator, kl, penalty

Loss = Literal["ppo", "importance_sampling", "cispo", "gspo", "dro"]
Normalise = Literal["token", "sequence", "constant"]

_LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Objective:
    """Which of the above, and how far.

    clip_low, clip_high: how far a ratio may be below and above 1 before its token stops pushing it further.
    max_tokens: the longest completion there may be, for normalise="constant".
    off_policy_cap: of tokens that another program drew, each weighs min(q / its probability there, cap): importance weights
        cut as in arXiv:1802.01561, eq. 1. None for the engine's own sampler, which draws from q.
    """

    loss: Loss = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dro_beta: float = 0.05
    normalise: Normalise = "token"
    max_tokens: int = 1
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    off_policy_cap: float | None = None

    @property
    def acts_without_advantage(self) -> bool:
        """Whether tokens of advantage 0 have a gradient, so that their rows must not be left out."""
        return self.kl_coef > 0 or self.loss == "dro"


def policy_loss(
    logprobs_N: Tensor, batch: MicroBatch, objective: Objective, *, trained: Totals | None = None
) -> tuple[Tensor, Metrics]:
    """The share of the step's loss that these tokens have.

    Args:
        logprobs_N: log-probability of each sampled token under the policy that is trained, nats.
        batch: with advantages, and log q as `old_logprobs_N`, or as `sampled_logprobs_N` where the engine drew the tokens.
        objective: the loss, and what it is shared over.
        trained: tokens and rows that reach the loss in this step; those of `batch.totals` unless some were left out.

    Returns:
        Scalar loss with gradient, and metrics averaged over the trained tokens: `ratio`; `clipped` (1 where the clip took
        the gradient away); `sampler_gap`, nats between the sampler's log-probability and log q; `kl` to the reference.
    """
    old_N = batch.old_logprobs_N if len(batch.old_logprobs_N) else batch.sampled_logprobs_N
    log_ratio_N = (logprobs_N - old_N).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    term_N, clipped_N = _TERMS[objective.loss](logprobs_N, log_ratio_N, batch, objective)
    if objective.off_policy_cap is not None:
        term_N = term_N * sampler_weights(old_N, batch.sampled_logprobs_N, objective.off_policy_cap)
    found = {"ratio": log_ratio_N.exp(), "clipped": clipped_N.float(), "sampler_gap": _sampler_gap(logprobs_N, batch)}
    if objective.kl_coef > 0:
        found["kl"] = kl(logprobs_N, batch.reference_logprobs_N, objective.kl_estimator)
        term_N = term_N + objective.kl_coef * penalty(found["kl"], log_ratio_N.exp(), objective.kl_estimator)
    tokens = (trained or batch.totals).tokens
    return _shared(term_N, batch, objective), {name: value_N.detach().sum() / tokens for name, value_N in found.items()}


def sampler_weights(old_logprobs_N: Tensor, sampled_logprobs_N: Tensor, cap: float) -> Tensor:
    """What each token drawn by another program weighs, shape [N]. One whose log-probability it did not give weighs 1."""
    log_weight_N = (old_logprobs_N - sampled_logprobs_N).nan_to_num(nan=0.0)
    return log_weight_N.clamp(max=_LARGEST_LOG_RATIO).exp().clamp(max=cap)


def _shared(term_N: Tensor, batch: MicroBatch, objective: Objective) -> Tensor:
    match objective.normalise:
        case "token":
            return term_N.sum() / batch.totals.tokens
        case "sequence":
            return (batch.per_row(term_N) / batch.tokens_B.clamp(min=1)).sum() / batch.totals.rows
        case "constant":
            return term_N.sum() / (batch.totals.rows * objective.max_tokens)


def _sampler_gap(logprobs_N: Tensor, batch: MicroBatch) -> Tensor:
    """Between the sampler and the policy before the first update: where that was not asked again, the policy now."""
    old_N = batch.old_logprobs_N if len(batch.old_logprobs_N) else logprobs_N.detach()
    return (batch.sampled_logprobs_N - old_N).abs().nan_to_num(nan=0.0)


# --- terms: (log p, log r, batch, objective) -> the loss of each token, and where a clip took its gradient away --------


def _ppo(_: Tensor, log_ratio_N: Tensor, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor]:
    ratio_N = log_ratio_N.exp()
    pushed_N = ratio_N * batch.advantages_N
    held_N = ratio_N.clamp(1 - objective.clip_low, 1 + objective.clip_high) * batch.advantages_N
    return -torch.minimum(pushed_N, held_N), held_N < pushed_N


def _gspo(logprobs_N: Tensor, log_ratio_N: Tensor, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor]:
    mean_B = batch.per_row(log_ratio_N) / batch.tokens_B.clamp(min=1)
    return _ppo(logprobs_N, mean_B[batch.row_N], batch, objective)


def _importance_sampling(_: Tensor, log_ratio_N: Tensor, batch: MicroBatch, __: Objective) -> tuple[Tensor, Tensor]:
    return -log_ratio_N.exp() * batch.advantages_N, torch.zeros_like(log_ratio_N)


def _cispo(logprobs_N: Tensor, log_ratio_N: Tensor, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor]:
    ratio_N, highest = log_ratio_N.exp().detach(), 1 + objective.clip_high
    # The weight is cut, not the gradient; where it is cut and pushes up counts as clipped all the same.
    cut_N = (ratio_N > highest) & (batch.advantages_N > 0)
    return -ratio_N.clamp(max=highest) * batch.advantages_N * logprobs_N, cut_N


def _dro(logprobs_N: Tensor, log_ratio_N: Tensor, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor]:
    penalty_N = objective.dro_beta / 2 * log_ratio_N.square()
    return penalty_N - batch.advantages_N * logprobs_N, torch.zeros_like(log_ratio_N)


_Term = Callable[[Tensor, Tensor, MicroBatch, Objective], tuple[Tensor, Tensor]]
_TERMS: dict[Loss, _Term] = {
    "ppo": _ppo,
    "importance_sampling": _importance_sampling,
    "cispo": _cispo,
    "gspo": _gspo,
    "dro": _dro,
}
