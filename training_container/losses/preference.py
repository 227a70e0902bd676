"""Losses of preferences: which of two answers is better, or whether one is good.

Axes: P pairs (the rows of a micro-batch come as chosen, rejected, chosen, rejected, …) · B rows · N trained tokens. A row's
log-probability is the sum over its answer's tokens, in nats. Metrics have the names that TRL gives them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..engine import Metrics, MicroBatch

DpoKind = Literal["sigmoid", "ipo", "hinge"]

# A probability of 1 has no odds; this far below it, float32 still has.
_SURE = -1e-6


def dpo_loss(
    logprobs_N: Tensor, batch: MicroBatch, *, beta: float, kind: DpoKind = "sigmoid", label_smoothing: float = 0.0
) -> tuple[Tensor, Metrics]:
    """Direct preference optimisation, the mean over pairs, with h = log-ratio of the chosen less that of the rejected.

        sigmoid   -(1 - e) log sigmoid(b h) - e log sigmoid(-b h)       arXiv:2305.18290 eq. 7; e: Mitchell 2023 (cDPO)
        hinge     max(0, 1 - b h)                                       arXiv:2309.06657
        ipo       (h' - 1 / (2 b))^2                                    arXiv:2310.12036 eq. 17

    h' has each answer's log-ratio divided by its number of tokens: the paper does not say so, its authors do (to TRL's);
    without it the target would mean another thing for every length.

    Args:
        logprobs_N: the policy's; the batch has the reference's.
        beta: b, in 1 / nats; for ipo the paper's tau.
        label_smoothing: e, the share of labels taken to be wrong (sigmoid alone).
    """
    logprob_B = batch.per_row(logprobs_N)
    ratio_B = logprob_B - batch.per_row(batch.reference_logprobs_N.to(logprobs_N))
    scored_B = ratio_B / batch.tokens_B if kind == "ipo" else ratio_B
    loss_P = _of_difference(scored_B[0::2] - scored_B[1::2], beta, kind, label_smoothing)
    return _mean(loss_P, batch), _rewards(beta * ratio_B, logprob_B, batch)


def _of_difference(h_P: Tensor, beta: float, kind: DpoKind, label_smoothing: float) -> Tensor:
    if kind == "ipo":
        return (h_P - 1 / (2 * beta)).square()
    if kind == "hinge":
        return (1 - beta * h_P).relu()
    return -(1 - label_smoothing) * logsigmoid(beta * h_P) - label_smoothing * logsigmoid(-beta * h_P)


def kto_loss(
    logprobs_N: Tensor,
    batch: MicroBatch,
    *,
    beta: float,
    kl: float,
    good_rows: int,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """Kahneman-Tversky optimisation, the mean over rows (arXiv:2402.01306 eq. 7), with r the row's log-ratio:

        good   desirable_weight   (1 - sigmoid(b (r - kl)))
        bad    undesirable_weight (1 - sigmoid(b (kl - r)))

    Args:
        kl: the divergence from the reference, in nats, estimated by who calls; it has no gradient.
        good_rows: rows of the step with label 1. What a step has no rows of is not among its metrics.
    """
    ratio_B = batch.per_row(logprobs_N) - batch.per_row(batch.reference_logprobs_N.to(logprobs_N))
    is_good_B = batch.label_B > 0.5
    sign_B = torch.where(is_good_B, 1.0, -1.0)
    weight_B = torch.where(is_good_B, ratio_B.new_tensor(desirable_weight), ratio_B.new_tensor(undesirable_weight))
    loss_B = weight_B * torch.sigmoid(-beta * sign_B * (ratio_B - kl))
    metrics = {"kl": torch.tensor(kl * batch.rows / batch.totals.rows)}
    for name, of_B, rows in (
        ("chosen", is_good_B, good_rows),
        ("rejected", ~is_good_B, batch.totals.rows - good_rows),
    ):
        if rows:
            metrics[f"rewards/{name}"] = beta * ratio_B.detach()[of_B].sum() / rows
    return loss_B.sum() / batch.totals.rows, metrics


def orpo_loss(logprobs_N: Tensor, batch: MicroBatch, *, beta: float, chosen_tokens: int) -> tuple[Tensor, Metrics]:
    """Odds-ratio preference optimisation (arXiv:2403.07691 eqs. 4 to 7):

        -mean of log p over the chosen answers' tokens - b mean of log sigmoid(log odds(chosen) - log odds(rejected))

    with odds = p / (1 - p) and p the geometric mean of an answer's token probabilities. TRL takes the first mean over the
    prompts' tokens too; here, as everywhere, prompts are given and not learned. p is kept below 1 - 1e-6: at 1 odds end.

    Args:
        chosen_tokens: of the whole step.
    """
    logprob_B = batch.per_row(logprobs_N)
    mean_B = logprob_B / batch.tokens_B
    odds_B = mean_B - _log_of_rest(mean_B)
    log_odds_P = odds_B[0::2] - odds_B[1::2]
    nll = -logprob_B[0::2].sum() / chosen_tokens
    ratio = _mean(logsigmoid(log_odds_P), batch)
    metrics = _rewards(beta * mean_B, mean_B, batch) | {
        "nll_loss": nll.detach(),
        "log_odds_ratio": ratio.detach(),
        "log_odds_chosen": _mean(log_odds_P.detach(), batch),
    }
    return nll - beta * ratio, metrics


def _log_of_rest(logprob: Tensor) -> Tensor:
    """log(1 - p), each half of p's range by what keeps its digits there."""
    below = logprob.clamp(max=_SURE)
    likely, unlikely = below.clamp(min=-math.log(2)), below.clamp(max=-math.log(2))
    return torch.where(below > -math.log(2), torch.log(-torch.expm1(likely)), torch.log1p(-torch.exp(unlikely)))


def bradley_terry_loss(scores_B: Tensor, batch: MicroBatch, *, center_coef: float = 0.0) -> tuple[Tensor, Metrics]:
    """-log sigmoid(score of the chosen less that of the rejected), the mean over pairs (arXiv:2203.02155 eq. 1).

    Args:
        scores_B: a reward model's, one a row.
        center_coef: of the mean squared sum of a pair's scores, which the first term leaves free (arXiv:2312.09244).
    """
    chosen_P, rejected_P = scores_B[0::2], scores_B[1::2]
    loss = _mean(-logsigmoid(chosen_P - rejected_P) + center_coef * (chosen_P + rejected_P).square(), batch)
    margin_P = (chosen_P - rejected_P).detach()
    return loss, {
        "accuracy": _mean((margin_P > 0).float(), batch),
        "margin": _mean(margin_P, batch),
        "mean_reward": scores_B.detach().sum() / batch.totals.rows,
    }


# --- over pairs ------------------------------------------------------------------------------------------------------


def _mean(values_P: Tensor, batch: MicroBatch) -> Tensor:
    """This micro-batch's share of the mean over the step's pairs."""
    return values_P.sum() / (batch.totals.rows / 2)


def _rewards(reward_B: Tensor, logprob_B: Tensor, batch: MicroBatch) -> Metrics:
    """What the policy as its own reward model says of the pairs. A tie is not right."""
    reward_B, logprob_B = reward_B.detach(), logprob_B.detach()
    margin_P = reward_B[0::2] - reward_B[1::2]
    return {
        "rewards/chosen": _mean(reward_B[0::2], batch),
        "rewards/rejected": _mean(reward_B[1::2], batch),
        "rewards/margins": _mean(margin_P, batch),
        "rewards/accuracies": _mean((margin_P > 0).float(), batch),
        "logps/chosen": _mean(logprob_B[0::2], batch),
        "logps/rejected": _mean(logprob_B[1::2], batch),
    }
