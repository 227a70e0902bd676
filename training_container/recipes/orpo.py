"""Odds-ratio preference optimisation: learn the chosen answers, and raise their odds over the rejected. No reference.

for pairs of a step:                                                                         run.steps
    one step on -log p(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected))     losses.orpo_loss
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ..custom_code import load_loss
from ..data import Pair
from ..engine import Engine, Example, LossFn
from ..losses import orpo_loss
from ..run import Run
from .preference import evaluate_pairs, examples_of, pairs_of, preference_step


def train(engine: Engine, run: Run) -> None:
    """Evaluate, train, evaluate. No dropout but the adapter's; rate constant after warm-up."""
    settings, state = run.settings, run.state
    pairs, held_out = pairs_of(engine, run)
    custom = load_loss(run)

    def evaluate() -> dict[str, float]:
        return evaluate_pairs(engine, run, held_out, loss_over(held_out, settings.beta), mean_logprob)

    if held_out and not state.eval_before:
        state.eval_before = run.report_eval("before", evaluate())
    for indices in run.steps(rows=len(pairs), batch=settings.batch_size):
        examples = examples_of(pairs, indices)
        loss = custom or loss_over([pairs[index] for index in indices], settings.beta)
        metrics = preference_step(engine, run, examples, loss, whole_groups=True)
        run.end_step(metrics, tokens=sum(example.trained_tokens for example in examples))
    if held_out:
        state.eval_after = run.report_eval("after", evaluate())


def loss_over(pairs: Sequence[Pair], beta: float) -> LossFn:
    """The loss of a step of these pairs: it has to know how many tokens their chosen answers have."""
    return partial(orpo_loss, beta=beta, chosen_tokens=sum(pair.chosen.trained_tokens for pair in pairs))


def mean_logprob(example: Example, logprobs: Sequence[float]) -> float:
    """What the odds are made of, nats a token."""
    return math.fsum(logprobs) / example.trained_tokens
