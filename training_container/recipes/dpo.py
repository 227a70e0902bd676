"""Direct preference optimisation: make the chosen answer likelier than the rejected, and stay near the reference.

once, or each step: log-probabilities of both answers under the reference      compared_pairs, compared
for pairs of a step:                                                            run.steps
    one step on -log sigmoid(beta (log-ratio of the chosen - of the rejected))  losses.dpo_loss
"""

from __future__ import annotations

from functools import partial

from ..custom_code import chosen_loss
from ..engine import Engine
from ..losses import dpo_loss
from ..run import Run
from .preference import (
    asked_each_step,
    compared,
    compared_pairs,
    evaluate_pairs,
    examples_of,
    log_ratio,
    pairs_of,
    preference_step,
    start_model,
)


def train(engine: Engine, run: Run) -> None:
    """Evaluate, train, evaluate. No dropout but the adapter's; rate constant after warm-up."""
    settings, state = run.settings, run.state
    pairs, held_out = pairs_of(engine, run)
    own = partial(dpo_loss, beta=settings.beta, kind=settings.loss, label_smoothing=settings.label_smoothing)
    loss = chosen_loss(run, own)

    reference, each_step = start_model(engine, run), asked_each_step(engine, run)
    with run.meter.phase("update"):
        held_out = compared_pairs(held_out, reference)
        pairs = pairs if each_step else compared_pairs(pairs, reference)
    if not each_step:
        del reference  # a second copy of the weights, where there is no adapter to switch off

    if held_out and not state.eval_before:
        state.eval_before = run.report_eval("before", evaluate_pairs(engine, run, held_out, own, log_ratio))
    for indices in run.steps(rows=len(pairs), batch=settings.batch_size):
        examples = examples_of(pairs, indices)
        if each_step:
            with run.meter.phase("update"):
                examples = compared(examples, reference)
        metrics = preference_step(engine, run, examples, loss, whole_groups=True)
        run.end_step(metrics, tokens=sum(example.trained_tokens for example in examples))
    if held_out:
        state.eval_after = run.report_eval("after", evaluate_pairs(engine, run, held_out, own, log_ratio))
