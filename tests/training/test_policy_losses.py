"""Policy losses and divergences: numbers worked by hand, and gradients against finite differences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training_container.engine import Example, MicroBatch, Totals
from training_container.engine.batch import micro_batch
from training_container.losses import Objective, kl, policy_loss
from training_container.losses.policy import sampler_weights

C26 = json.loads((Path(__file__).parents[1] / "cases" / "c26_kl_oracle.json").read_text("utf-8"))
LOSSES: list[Any] = ["ppo", "importance_sampling", "cispo", "gspo", "dro"]
NORMALISE: list[Any] = ["token", "sequence", "constant"]


def leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def close(actual: Any, expected: list[float] | float, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def a_batch(
    sampled: Any, advantages: Any, *, rows: list[int] | None = None, old: Any = (), reference: Any = (),
    totals: Totals | None = None,
) -> MicroBatch:  # fmt: skip
    """Tokens as a loss sees them, in double precision; `rows` says which row each is of."""
    row_N = torch.tensor(rows or [0] * len(sampled))
    count = int(row_N.max()) + 1
    given = [torch.as_tensor(values, dtype=torch.float64) for values in (advantages, sampled, old, reference)]
    totals = totals or Totals(len(row_N), count)
    return MicroBatch(row_N * 0, row_N, *given, torch.zeros(count), torch.zeros(count), totals)


def ratios(*values: float) -> Tensor:
    """Log-probabilities of these ratios to a sampler that gave each token -1."""
    return leaf([math.log(value) - 1 for value in values])


# --- the terms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_loss_pulls_a_token_by_its_advantage_over_the_tokens(loss: Any) -> None:
    # Ratio 1: -A / N a token; the ratio of gspo is a row's, so each pulls by the mean of A.
    logprobs_N = leaf([-0.5, -1.0, -2.0])
    batch = a_batch(logprobs_N.detach(), [2.0, -1.0, 0.0])
    value, metrics = policy_loss(logprobs_N, batch, Objective(loss))
    value.backward()
    close(logprobs_N.grad, [-1 / 9] * 3 if loss == "gspo" else [-2 / 3, 1 / 3, 0.0])
    assert (float(metrics["ratio"]), float(metrics["clipped"]), float(metrics["sampler_gap"])) == (1.0, 0.0, 0.0)


def test_ppo_stops_a_token_that_has_moved_far_enough_in_the_wanted_direction() -> None:
    # ratios 1.5 and 0.5, clip 0.2.
    #   advantage +1: min(1.5, 1.2) = 1.2 no gradient | min(0.5, 0.8) = 0.5 gradient -0.5
    #   advantage -1: min(-1.5, -1.2) = -1.5 gradient +1.5 | min(-0.5, -0.8) = -0.8 no gradient
    logprobs_N = ratios(1.5, 0.5, 1.5, 0.5)
    loss, metrics = policy_loss(logprobs_N, a_batch([-1.0] * 4, [1.0, 1.0, -1.0, -1.0]), Objective())
    close(loss, -(1.2 + 0.5 - 1.5 - 0.8) / 4)
    loss.backward()
    close(logprobs_N.grad, [0.0, -0.5 / 4, 1.5 / 4, 0.0])
    assert float(metrics["clipped"]) == 0.5


def test_a_higher_clip_above_lets_a_rising_token_rise_further() -> None:
    # Ratio 1.25, advantage 1: stopped at 1.2, not yet at 1.28.
    symmetric, asymmetric = ratios(1.25), ratios(1.25)
    policy_loss(symmetric, a_batch([-1.0], [1.0]), Objective())[0].backward()
    policy_loss(asymmetric, a_batch([-1.0], [1.0]), Objective(clip_high=0.28))[0].backward()
    assert (symmetric.grad.item(), asymmetric.grad.item()) == (0.0, pytest.approx(-1.25))  # type: ignore[union-attr]


def test_importance_sampling_has_no_clip() -> None:
    # -3 * 1; gradient -3.
    logprobs_N = ratios(3.0)
    loss, _ = policy_loss(logprobs_N, a_batch([-1.0], [1.0]), Objective("importance_sampling"))
    loss.backward()
    close(loss, -3.0)
    close(logprobs_N.grad, [-3.0])


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    # Weights min(1.5, 1.2) and 0.5 (no bound below): -(1.2 * 1 * log p) and -(0.5 * -2 * log p), over 2 tokens.
    logprobs_N = ratios(1.5, 0.5)
    first, second = logprobs_N.tolist()
    loss, metrics = policy_loss(logprobs_N, a_batch([-1.0] * 2, [1.0, -2.0]), Objective("cispo"))
    loss.backward()
    close(loss, (-1.2 * first + 1.0 * second) / 2)
    close(logprobs_N.grad, [-0.6, 0.5])
    assert float(metrics["clipped"]) == 0.5


def test_gspo_clips_whole_rows_by_the_geometric_mean_of_their_ratios() -> None:
    # Row 0: ratios 4 and 1, mean sqrt(4) = 2, stopped at 1.2: no gradient, though its second token never moved.
    # Row 1: ratios 1.21 and 1: 1.1, a gradient of -1.1 / 2 a token for two equal terms: -1.1 each, over 4 tokens.
    logprobs_N = ratios(4.0, 1.0, 1.21, 1.0)
    loss, metrics = policy_loss(logprobs_N, a_batch([-1.0] * 4, [1.0] * 4, rows=[0, 0, 1, 1]), Objective("gspo"))
    loss.backward()
    close(loss, -(2 * 1.2 + 2 * 1.1) / 4)
    close(logprobs_N.grad, [0.0, 0.0, -1.1 / 4, -1.1 / 4])
    assert float(metrics["clipped"]) == 0.5


def test_dro_pays_half_beta_for_the_square_of_the_log_ratio() -> None:
    # -(2 * log p) + 0.1 / 2 * log(2)^2; gradient -2 + 0.1 * log 2.
    logprobs_N = ratios(2.0)
    loss, _ = policy_loss(logprobs_N, a_batch([-1.0], [2.0]), Objective("dro", dro_beta=0.1))
    loss.backward()
    close(loss, -2 * (math.log(2) - 1) + 0.05 * math.log(2) ** 2)
    close(logprobs_N.grad, [-2 + 0.1 * math.log(2)])


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "cispo"])  # whose weight is held on purpose
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_every_gradient_equals_finite_differences(loss: Any, normalise: Any, kl_coef: float) -> None:
    batch = a_batch(
        [-1.0, -0.3, -2.0], [0.7, -1.1, 0.2], rows=[0, 0, 1], old=[-1.1, -0.2, -2.1], reference=[-0.8, -0.6, -2.5]
    )
    objective = Objective(loss, normalise=normalise, max_tokens=5, kl_coef=kl_coef, off_policy_cap=1.05)
    logprobs_N = leaf([-0.95, -0.4, -1.9])
    assert torch.autograd.gradcheck(lambda values_N: policy_loss(values_N, batch, objective)[0], logprobs_N)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [0.0, 19.0, 200.0, -200.0])
def test_no_log_ratio_makes_a_loss_or_gradient_that_is_not_finite(loss: Any, advantage: float, gap: float) -> None:
    logprobs_N = torch.tensor([-1.0], requires_grad=True)
    batch = a_batch([-1.0 - gap], [advantage])
    value, metrics = policy_loss(logprobs_N, batch, Objective(loss))
    value.backward()
    assert value.isfinite() and logprobs_N.grad.isfinite().all()  # type: ignore[union-attr]
    assert all(metric.isfinite() for metric in metrics.values())


# --- what they are shared over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("normalise", "expected"), [("token", 9 / 4), ("sequence", 17 / 6), ("constant", 0.9)])
def test_a_row_of_one_token_and_a_row_of_three_weigh_by_normalise(normalise: Any, expected: float) -> None:
    # Terms 4 | 1, 1, 3 (ratio 1, advantage minus the term): token 9 / 4; sequence (4 + 5/3) / 2; constant 9 / (2 * 5).
    batch = a_batch([-1.0] * 4, [-4.0, -1.0, -1.0, -3.0], rows=[0, 1, 1, 1])
    loss, _ = policy_loss(leaf([-1.0] * 4), batch, Objective(normalise=normalise, max_tokens=5))
    close(loss, expected)


@pytest.mark.parametrize("normalise", NORMALISE)
def test_rows_left_out_count_in_the_loss_and_not_in_its_metrics(normalise: Any) -> None:
    # One row of 2 tokens at ratio 1 and advantage 1 is given of 2 rows and 5 tokens.
    batch = a_batch([-1.0] * 2, [1.0] * 2, totals=Totals(5, 2))
    loss, metrics = policy_loss(
        leaf([-1.0] * 2), batch, Objective(normalise=normalise, max_tokens=4), trained=Totals(2, 1)
    )
    close(loss, {"token": -2 / 5, "sequence": -1 / 2, "constant": -2 / 8}[normalise])
    assert float(metrics["ratio"]) == 1.0


# --- tokens that another program drew ------------------------------------------------------------------------------------


def test_tokens_of_a_foreign_sampler_weigh_by_how_much_likelier_they_are_here_up_to_the_cap() -> None:
    # q / sampled = 1.5, 0.5 and 4 (cut to 2), advantage 1, ratio 1: terms -1.5, -0.5, -2; gaps log 1.5, log 2, log 4.
    old = [math.log(0.3), math.log(0.1), math.log(0.4)]
    sampled = [math.log(0.2), math.log(0.2), math.log(0.1)]
    logprobs_N = leaf(old)
    loss, metrics = policy_loss(logprobs_N, a_batch(sampled, [1.0] * 3, old=old), Objective(off_policy_cap=2.0))
    loss.backward()
    close(loss, -4 / 3)
    close(logprobs_N.grad, [-0.5, -0.5 / 3, -2 / 3])
    close(metrics["sampler_gap"], (math.log(1.5) + math.log(2) + math.log(4)) / 3)


def test_a_token_whose_sampler_gave_no_log_probability_weighs_1() -> None:
    weights_N = sampler_weights(torch.tensor([-1.0, -1.0]), torch.tensor([math.nan, -400.0]), 2.0)
    assert weights_N.tolist() == [1.0, 2.0]


# --- divergences ---------------------------------------------------------------------------------------------------------


def test_the_three_estimates_of_a_token_half_as_likely_under_the_reference() -> None:
    # d = log(1/2): k1 = log 2; k2 = log(2)^2 / 2; k3 = 1/2 + log 2 - 1. Gradients -> log p: 1, log 2, 1 - 1/2.
    for estimator, value, slope in (
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", math.log(2) - 0.5, 0.5),
    ):
        logprobs_N = leaf([math.log(0.5)])
        found_N = kl(logprobs_N, torch.tensor([math.log(0.25)]).double(), estimator)  # type: ignore[arg-type]
        found_N.sum().backward()
        close(found_N.detach(), [value], 1e-7)
        close(logprobs_N.grad, [slope], 1e-7)


def test_k3_is_the_exact_one_in_the_normal_range() -> None:
    d_N, exact_N = (torch.tensor(C26[name], dtype=torch.float32) for name in ("ref_minus_policy_logp", "k3_exact"))
    found_N = kl(torch.zeros(6), d_N)
    torch.testing.assert_close(found_N[:3], exact_N[:3], atol=1e-6, rtol=0)
    torch.testing.assert_close(
        found_N[3:5], exact_N[3:5], atol=0, rtol=1e-6
    )  # to 20 nats on the one side, and all of the other


def test_the_gradient_of_k3_is_exact_in_float32_to_20_nats() -> None:
    logprobs_N = torch.tensor([0.0, 1e-3, -1e-3, 1.0, -19.9], requires_grad=True)
    kl(logprobs_N, torch.zeros(5)).sum().backward()
    exact_N = -torch.expm1(-logprobs_N.detach().double())
    torch.testing.assert_close(logprobs_N.grad.double(), exact_N, atol=1e-7, rtol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_no_log_ratio_makes_a_divergence_or_gradient_that_is_not_finite(estimator: Any, dtype: torch.dtype) -> None:
    d_N = torch.tensor([*C26["ref_minus_policy_logp"], 3e38, -3e38, math.inf, -math.inf]).to(dtype)
    logprobs_N = torch.zeros(len(d_N), dtype=dtype, requires_grad=True)
    found_N = kl(logprobs_N, d_N, estimator)
    found_N.sum().backward()
    assert found_N.isfinite().all() and logprobs_N.grad.isfinite().all()  # type: ignore[union-attr]


def test_padding_is_never_among_the_tokens_of_a_loss() -> None:
    """Rows of 1 and 3 drawn tokens after prompts of 4 and 1: four tokens are laid end to end, and nothing between."""
    rows = [
        Example([5, 6, 7, 8, 9], [False] * 4 + [True], 1.0, [-1.0], reference_logprobs=[-1.5]),
        Example([5, 1, 2, 3], [False] + [True] * 3, 2.0, [-1.0] * 3, reference_logprobs=[-1.5] * 3),
    ]
    batch = micro_batch(rows, Totals.of(rows), torch.device("cpu"))
    assert batch.target_N.tolist() == [9, 1, 2, 3]
    assert batch.reference_logprobs_N.tolist() == [-1.5] * 4
    _, metrics = policy_loss(torch.full((4,), -1.0), batch, Objective(kl_coef=1.0))
    close(metrics["kl"], math.exp(-0.5) + 0.5 - 1, 1e-6)


def test_beyond_20_nats_k3_still_pulls_back_with_the_slope_it_had_there() -> None:
    logprobs_N = leaf([0.0, 0.0])
    kl(logprobs_N, torch.tensor([20.0, 120.0]).double()).sum().backward()
    assert logprobs_N.grad.tolist() == pytest.approx([1 - math.exp(20)] * 2)  # type: ignore[union-attr]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("moved", [0.0, 0.4])
def test_averaged_over_the_tokens_drawn_every_penalty_has_the_gradient_of_the_divergence(
    estimator: Any, moved: float
) -> None:
    """Also when the policy has moved since it drew."""
    logits_V = leaf([0.3, -0.2, 0.1])
    reference_V = torch.tensor([0.25, -0.1, 0.05]).double().log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    (exact_V,) = torch.autograd.grad((logprobs_V.exp() * (logprobs_V - reference_V)).sum(), logits_V)
    sampled_V = (logits_V.detach() + moved * torch.tensor([1.0, -1.0, 0.5])).log_softmax(0)
    penalty = torch.zeros(())
    for token in range(3):  # every token as often as the policy drew it
        batch = a_batch(sampled_V[token : token + 1], [0.0], reference=reference_V[token : token + 1])
        loss, _ = policy_loss(
            logits_V.log_softmax(0)[token : token + 1], batch, Objective(kl_coef=1.0, kl_estimator=estimator)
        )
        penalty = penalty + sampled_V[token].exp() * loss
    (found_V,) = torch.autograd.grad(penalty, logits_V)
    close(found_V, exact_V.tolist())
