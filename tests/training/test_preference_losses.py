"""Losses of preferences, each number worked by hand; gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from training_container.engine import MicroBatch, Totals
from training_container.losses import bradley_terry_loss, dpo_loss, kto_loss, orpo_loss

LOG2 = math.log(2)
KINDS: list[Any] = ["sigmoid", "ipo", "hinge"]
EXTREME = [0.0, 1e-4, 30.0, 200.0, -200.0, 1e5, -1e5]


def leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def close(actual: Any, expected: list[float] | float, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def a_batch(
    tokens: list[int], *, reference: list[float] | None = None, labels: list[float] | None = None,
    totals: Totals | None = None,
) -> MicroBatch:  # fmt: skip
    """Rows of so many tokens, in double precision; totals are the batch's own where not given."""
    row_N = torch.arange(len(tokens)).repeat_interleave(torch.tensor(tokens))
    none_N = torch.zeros(len(row_N), dtype=torch.float64)
    reference_N = torch.tensor(reference or [0.0] * len(row_N), dtype=torch.float64)
    label_B = torch.tensor(labels or [1.0, 0.0] * (len(tokens) // 2) + [1.0] * (len(tokens) % 2))
    totals = totals or Totals(len(row_N), len(tokens))
    return MicroBatch(
        row_N * 0, row_N, none_N, none_N, none_N, reference_N, label_B, torch.arange(len(tokens)) // 2, totals
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# --- dpo -----------------------------------------------------------------------------------------------------------------


def test_dpo_of_a_chosen_answer_twice_and_a_rejected_half_as_likely_as_before() -> None:
    # Log-ratios: chosen log 2 (two tokens of sqrt 2), rejected -log 2; h = 2 log 2, b h = log 2 at b = 1/2.
    # -log sigmoid(log 2) = log 3/2; slope -b (1 - sigmoid) = -1/2 * 1/3 a chosen token, the reverse a rejected one.
    logprobs_N = leaf([LOG2 / 2 - 1, LOG2 / 2 - 1, -LOG2 - 1])
    batch = a_batch([2, 1], reference=[-1.0] * 3)
    loss, metrics = dpo_loss(logprobs_N, batch, beta=0.5)
    loss.backward()
    close(loss, math.log(1.5))
    close(logprobs_N.grad, [-1 / 6, -1 / 6, 1 / 6])
    assert {name: pytest.approx(float(value)) for name, value in metrics.items()} == {
        "rewards/chosen": LOG2 / 2, "rewards/rejected": -LOG2 / 2, "rewards/margins": LOG2, "rewards/accuracies": 1.0,
        "logps/chosen": LOG2 - 2, "logps/rejected": -LOG2 - 1,
    }  # fmt: skip


def test_label_smoothing_is_the_share_of_labels_taken_to_be_the_other_way_round() -> None:
    # -(3/4) log(2/3) - (1/4) log(1/3); slope b (sigmoid - 3/4) = (2/3 - 3/4) / 2: still a pull, as 2/3 is less.
    logprobs_N = leaf([LOG2, -LOG2])
    loss, _ = dpo_loss(logprobs_N, a_batch([1, 1]), beta=0.5, label_smoothing=0.25)
    loss.backward()
    close(loss, 0.75 * math.log(1.5) + 0.25 * math.log(3))
    close(logprobs_N.grad, [-1 / 24, 1 / 24])


@pytest.mark.parametrize(("ratio", "value", "slope"), [(1.0, 0.5, -0.25), (3.0, 0.0, 0.0), (-1.0, 1.5, -0.25)])
def test_hinge_is_satisfied_once_the_margin_is_1(ratio: float, value: float, slope: float) -> None:
    # b = 1/4; h = 2 ratio: 1 - h / 4, no further than 0.
    logprobs_N = leaf([ratio, -ratio])
    loss, _ = dpo_loss(logprobs_N, a_batch([1, 1]), beta=0.25, kind="hinge")
    loss.backward()
    close(loss, value)
    close(logprobs_N.grad, [slope, -slope])


def test_ipo_aims_at_a_difference_of_1_by_2_beta_in_the_mean_of_a_token() -> None:
    # Means: chosen (1 + 3) / 2 = 2, rejected -1: h = 3, target 1 / (2 * 1/4) = 2, so (3 - 2)^2; slopes 2 (h - 2) / tokens.
    logprobs_N = leaf([1.0, 3.0, -1.0])
    loss, metrics = dpo_loss(logprobs_N, a_batch([2, 1]), beta=0.25, kind="ipo")
    loss.backward()
    close(loss, 1.0)
    close(logprobs_N.grad, [1.0, 1.0, -2.0])
    assert float(metrics["rewards/margins"]) == pytest.approx(0.25 * 5)  # of whole answers, whatever the loss


@pytest.mark.parametrize(("kind", "value"), [("sigmoid", LOG2), ("hinge", 1.0), ("ipo", 25.0)])
def test_a_tie_costs_what_the_start_does_is_not_right_and_pulls_nowhere(kind: Any, value: float) -> None:
    # Both answers are the same row, so what pulls up one pulls down the other.
    answer = leaf([-0.7, -1.3])
    loss, metrics = dpo_loss(torch.cat([answer, answer]), a_batch([2, 2]), beta=0.1, kind=kind)
    loss.backward()
    close(loss, value)
    close(answer.grad, [0.0, 0.0])
    assert float(metrics["rewards/accuracies"]) == 0.0


# --- kto -----------------------------------------------------------------------------------------------------------------


def test_kto_of_a_good_row_twice_as_likely_and_a_bad_one_half_as_likely_at_a_divergence_of_log_2() -> None:
    # b = 1: good: r - kl = 0, 1 - 1/2, slope -1/4 a token. bad: kl - r = 2 log 2, 1 - 4/5 = 1/5, slope 4/25. Mean of 2.
    logprobs_N = leaf([LOG2 - 2, -LOG2 - 2])
    loss, metrics = kto_loss(logprobs_N, a_batch([1, 1], reference=[-2.0, -2.0]), beta=1.0, kl=LOG2, good_rows=1)
    loss.backward()
    close(loss, (0.5 + 0.2) / 2)
    close(logprobs_N.grad, [-1 / 8, 2 / 25])
    assert {name: float(value) for name, value in metrics.items()} == {
        "kl": pytest.approx(LOG2), "rewards/chosen": pytest.approx(LOG2), "rewards/rejected": pytest.approx(-LOG2)
    }  # fmt: skip


def test_weights_of_kto_are_of_a_kind_of_row() -> None:
    # At r = kl each row's loss is half its weight, whatever kind has more rows.
    loss, _ = kto_loss(
        leaf([0.0, 0.0, 0.0]), a_batch([1, 1, 1], labels=[1.0, 0.0, 0.0]), beta=0.1, kl=0.0, good_rows=1,
        desirable_weight=4 / 3, undesirable_weight=0.5,
    )  # fmt: skip
    close(loss, (4 / 3 + 0.5 + 0.5) / 2 / 3)


@pytest.mark.parametrize(("label", "name", "pull"), [(1.0, "rewards/chosen", -1), (0.0, "rewards/rejected", 1)])
def test_a_step_of_one_kind_alone_pulls_one_way_and_says_nothing_of_the_other_kind(
    label: float, name: str, pull: int
) -> None:
    logprobs_N = leaf([0.3, -0.2, 0.1])
    loss, metrics = kto_loss(
        logprobs_N, a_batch([1, 1, 1], labels=[label] * 3), beta=0.1, kl=0.05, good_rows=int(3 * label)
    )
    loss.backward()
    assert (torch.sign(logprobs_N.grad) == pull).all()  # type: ignore[arg-type]
    assert metrics.keys() == {"kl", name}
    close(metrics[name], 0.1 * 0.2 / 3)


# --- orpo ----------------------------------------------------------------------------------------------------------------


def test_orpo_of_an_answer_of_probability_2_thirds_and_one_of_1_third() -> None:
    # Odds 2 and 1/2: log odds ratio log 4, log sigmoid = log 4/5. The likelihood term: -(2 log 2/3) / 2 = log 3/2.
    logprobs_N = leaf([math.log(2 / 3)] * 2 + [math.log(1 / 3)])
    loss, metrics = orpo_loss(logprobs_N, a_batch([2, 1]), beta=0.3, chosen_tokens=2)
    loss.backward()
    close(loss, math.log(1.5) + 0.3 * math.log(1.25))
    close(metrics["nll_loss"], math.log(1.5))
    close(metrics["log_odds_ratio"], math.log(0.8))
    close(metrics["log_odds_chosen"], math.log(4))
    # d log odds / d log p = 1 / (1 - p): 3 and 3/2; times b (1 - 4/5); a token of the chosen has half of its row's.
    close(logprobs_N.grad, [-0.5 - 0.3 * 0.2 * 3 / 2] * 2 + [0.3 * 0.2 * 1.5])


def test_the_likelihood_of_orpo_is_a_mean_over_tokens_and_its_odds_over_pairs() -> None:
    # Chosen of 1 and 3 tokens, all of probability 1/2 as the rejected are: log 2 + b log 2.
    logprobs_N = leaf([-LOG2] * 8)
    loss, _ = orpo_loss(logprobs_N, a_batch([1, 2, 3, 2]), beta=0.5, chosen_tokens=4)
    loss.backward()
    close(loss, 1.5 * LOG2)
    # Each chosen token: -1/4; and of its pair's half: -b / 2 * 1/2 * 1 / (1 - 1/2) over its row's tokens.
    close(logprobs_N.grad, [-0.5, 0.125, 0.125, *[-0.25 - 0.25 / 3] * 3, 0.125, 0.125])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chosen", [0.0, -1e-45, -1e-9, -1e-6, -1e-3, -LOG2, -30.0, -1e4])
@pytest.mark.parametrize("rejected", [0.0, -1e-7, -LOG2, -1e4])
def test_no_probability_makes_orpo_or_its_gradient_infinite(chosen: float, rejected: float, dtype: torch.dtype) -> None:
    logprobs_N = torch.tensor([chosen, rejected], dtype=dtype, requires_grad=True)
    loss, metrics = orpo_loss(logprobs_N, a_batch([1, 1]), beta=0.1, chosen_tokens=1)
    loss.backward()
    assert loss.isfinite() and logprobs_N.grad.isfinite().all()  # type: ignore[union-attr]
    assert all(value.isfinite() for value in metrics.values())


def test_the_log_odds_keep_their_digits_in_float32_over_all_of_a_probabilitys_range() -> None:
    for logprob in (-2e-6, -1e-3, -0.5, -LOG2, -0.7, -5.0, -40.0):
        _, metrics = orpo_loss(torch.tensor([logprob, -LOG2]), a_batch([1, 1]), beta=0.1, chosen_tokens=1)
        exact = logprob - math.log(-math.expm1(logprob))  # of the rejected: 0
        assert float(metrics["log_odds_chosen"]) == pytest.approx(exact, rel=1e-6, abs=1e-6)


# --- reward --------------------------------------------------------------------------------------------------------------


def test_bradley_terry_of_scores_2_apart_and_the_pull_to_a_sum_of_0() -> None:
    # Pairs (1, -1): -log sigmoid(2), sum 0. (0, log 3): -log sigmoid(-log 3) = log 4, sum log 3.
    scores_B = leaf([1.0, -1.0, 0.0, math.log(3)])
    loss, metrics = bradley_terry_loss(scores_B, a_batch([1] * 4), center_coef=0.5)
    loss.backward()
    close(loss, (-math.log(sigmoid(2)) + math.log(4) + 0.5 * math.log(3) ** 2) / 2)
    sure, centre = 1 - sigmoid(2), 0.5 * math.log(3)  # 2 * 0.5 * log 3, halved as the mean of two pairs is
    close(scores_B.grad, [-sure / 2, sure / 2, -0.375 + centre, 0.375 + centre])
    assert {name: float(value) for name, value in metrics.items()} == {
        "accuracy": 0.5, "margin": pytest.approx((2 - math.log(3)) / 2), "mean_reward": pytest.approx(math.log(3) / 4)
    }  # fmt: skip


def test_equal_scores_cost_log_2_and_are_not_right() -> None:
    loss, metrics = bradley_terry_loss(leaf([0.4, 0.4]), a_batch([1, 1]))
    close(loss, LOG2)
    assert float(metrics["accuracy"]) == 0.0


# --- all of them ---------------------------------------------------------------------------------------------------------

TOKENS = [3, 1, 2, 2, 1, 4]
REFERENCE = [-0.3, -0.9, -1.1, -0.4, -2.0, -0.2, -0.8, -1.5, -0.6, -0.1, -1.2, -0.7, -0.5]
POLICY = [-0.5, -0.4, -1.3, -0.6, -1.1, -0.9, -0.3, -2.2, -0.7, -0.8, -0.2, -1.6, -1.0]
WAYS: dict[str, Callable[..., Any]] = {
    "dpo sigmoid": partial(dpo_loss, beta=0.7),
    "dpo smoothed": partial(dpo_loss, beta=0.7, label_smoothing=0.1),
    "dpo hinge": partial(dpo_loss, beta=0.7, kind="hinge"),
    "dpo ipo": partial(dpo_loss, beta=0.7, kind="ipo"),
    "kto": partial(kto_loss, beta=0.7, kl=0.2, good_rows=3, desirable_weight=1.1, undesirable_weight=0.6),
    "orpo": partial(orpo_loss, beta=0.7, chosen_tokens=6),
    "reward": partial(bradley_terry_loss, center_coef=0.2),
}


def of(name: str, rows: list[int], totals: Totals) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, metrics and gradient [6 rows, 4 tokens] of some of the six rows, as a micro-batch of them gives it."""
    values_B_T = torch.zeros(6, 4, dtype=torch.float64, requires_grad=True)
    starts = [sum(TOKENS[:row]) for row in range(6)]
    if name == "reward":
        offset_N = [POLICY[row] for row in rows]
        inputs_N = values_B_T[rows, 0]
    else:
        offset_N = [POLICY[starts[row] + at] for row in rows for at in range(TOKENS[row])]
        inputs_N = torch.cat([values_B_T[row, : TOKENS[row]] for row in rows])
    reference = [REFERENCE[starts[row] + at] for row in rows for at in range(TOKENS[row])]
    batch = a_batch(
        [TOKENS[row] for row in rows], reference=reference, labels=[float(row % 2 == 0) for row in rows], totals=totals
    )
    loss, metrics = WAYS[name](inputs_N + torch.tensor(offset_N, dtype=torch.float64), batch)
    loss.backward()
    return loss.detach(), metrics, values_B_T.grad  # type: ignore[return-value]


@pytest.mark.parametrize("name", WAYS)
def test_every_gradient_equals_finite_differences(name: str) -> None:
    values = POLICY[:6] if name == "reward" else POLICY
    batch = a_batch(TOKENS, reference=REFERENCE)
    assert torch.autograd.gradcheck(lambda values_N: WAYS[name](values_N, batch)[0], leaf(values))


# kto's rows are no pairs: they may be parted anywhere.
CUTS = [[[0, 1], [2, 3], [4, 5]], [[4, 5, 0, 1], [2, 3]], [[2, 3, 4, 5, 0, 1]]]
ODD = [[[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [1], [4, 2]]]


@pytest.mark.parametrize(
    ("name", "cut"), [*((name, cut) for name in WAYS for cut in CUTS), *(("kto", cut) for cut in ODD)]
)
def test_micro_batches_and_the_order_of_rows_leave_loss_metrics_and_gradient_as_they_are(
    name: str, cut: list[list[int]]
) -> None:
    totals = Totals(sum(TOKENS), len(TOKENS))
    loss, metrics, grad_B_T = of(name, list(range(6)), totals)
    parts = [of(name, rows, totals) for rows in cut]
    torch.testing.assert_close(sum(part[0] for part in parts), loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(sum(part[2] for part in parts), grad_B_T, atol=1e-12, rtol=0)
    for each, value in metrics.items():
        assert float(sum(part[1][each] for part in parts)) == pytest.approx(float(value), abs=1e-6)


@pytest.mark.parametrize("gap", EXTREME)
@pytest.mark.parametrize("name", [name for name in WAYS if name != "orpo"])  # which has no reference to be far from
def test_no_log_ratio_makes_a_loss_or_gradient_that_is_not_finite(name: str, gap: float) -> None:
    values = torch.tensor([gap, -1.0], requires_grad=True)
    loss, metrics = WAYS[name](values, a_batch([1, 1], reference=[-1.0, gap]))
    loss.backward()
    assert loss.isfinite() and values.grad.isfinite().all()  # type: ignore[union-attr]
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("kl", [0.0, 1e4])
@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("gap", EXTREME)
def test_kto_is_finite_and_between_0_and_1_however_far_a_row_has_gone(gap: float, label: float, kl: float) -> None:
    values = torch.tensor([gap], requires_grad=True)
    loss, metrics = kto_loss(values, a_batch([1], labels=[label]), beta=0.5, kl=kl, good_rows=int(label))
    loss.backward()
    assert 0 <= float(loss.detach()) <= 1 and values.grad.isfinite().all()  # type: ignore[union-attr]
    assert all(value.isfinite() for value in metrics.values())
