"""A reward model from pairs: a score for an answer, the chosen's above the rejected's (Bradley and Terry).

    for pairs of a step:                                                           run.steps
        one step on -log sigmoid(score of the chosen - score of the rejected)      losses.bradley_terry_loss

The model that comes out is a sequence classifier with one label: a reward for the other recipes as `model:s3://…`, or
AutoModelForSequenceClassification anywhere. It scores the last token of prompt, answer and end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..engine import Engine, Example
from ..losses import bradley_terry_loss
from ..run import Run
from .preference import evaluate_pairs, examples_of, pairs_of, preference_step


def train(engine: Engine, run: Run) -> None:
    """Evaluate, train, evaluate. No dropout but the adapter's; rate constant after warm-up."""
    settings, state = run.settings, run.state
    pairs, held_out = pairs_of(engine, run)
    loss = partial(bradley_terry_loss, center_coef=settings.center_coef)

    if held_out and not state.eval_before:
        state.eval_before = run.report_eval("before", evaluate_pairs(engine, run, held_out, loss, score))
    for indices in run.steps(rows=len(pairs), batch=settings.batch_size):
        examples = examples_of(pairs, indices)
        metrics = preference_step(engine, run, examples, loss, whole_groups=True)
        run.end_step(metrics, tokens=sum(len(example.tokens) for example in examples))
    if held_out:
        state.eval_after = run.report_eval("after", evaluate_pairs(engine, run, held_out, loss, score))


def score(example: Example, output: Sequence[float]) -> float:
    return output[0]
