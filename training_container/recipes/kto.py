"""Kahneman-Tversky optimisation: from single answers marked good or bad, against a reference.

    once, or each step: log-probabilities of the answers under the reference       compared
    for rows of a step:                                                             run.steps
        kl = mean log-ratio of the rows' prompts with other prompts' answers        divergence
        one step on 1 - sigmoid(+-beta (log-ratio - kl))                            losses.kto_loss

The other prompt's answer is the same for a row all through the run (data/preferences.py). TRL turns each batch's answers by
one instead, and in a batch of one row has nothing to turn; on one batch of all rows in their order both do the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..custom_code import load_loss
from ..data import Rated, render_marked
from ..engine import Engine, Example, LossFn
from ..losses import kto_loss
from ..reference import Reference
from ..run import Run
from .preference import (
    asked_each_step,
    compared,
    log_ratio,
    preference_step,
    say_what_was_lost,
    share_right,
    start_model,
    value_of,
)


def train(engine: Engine, run: Run) -> None:
    """Evaluate, train, evaluate. No dropout but the adapter's; rate constant after warm-up."""
    settings, state = run.settings, run.state
    found = render_marked(run.rows["train"], engine.tokenizer, settings.max_length)
    say_what_was_lost(run, found)
    rows, custom = found.rows, load_loss(run)
    held_out: list[Rated] = []
    if run.rows.get("eval"):
        held_out = render_marked(run.rows["eval"], engine.tokenizer, settings.max_length).rows

    reference, each_step = start_model(engine, run), asked_each_step(engine, run)
    with run.meter.phase("update"):
        held_out = compared_rows(held_out, reference)
        rows = rows if each_step else compared_rows(rows, reference)
    if not each_step:
        del reference  # a second copy of the weights, where there is no adapter to switch off

    if held_out and not state.eval_before:
        state.eval_before = run.report_eval("before", evaluate(engine, run, held_out))
    for indices in run.steps(rows=len(rows), batch=settings.batch_size):
        chosen = [rows[index] for index in indices]
        with run.meter.phase("update"):
            if each_step:
                chosen = compared_rows(chosen, reference)
            kl = divergence(engine, chosen)
        examples = [each.example for each in chosen]
        loss = custom or loss_over(run, chosen, kl)
        metrics = preference_step(engine, run, examples, loss, whole_groups=False)
        run.end_step(metrics, tokens=sum(example.trained_tokens for example in examples))
    if held_out:
        state.eval_after = run.report_eval("after", evaluate(engine, run, held_out))


def compared_rows(rows: Sequence[Rated], reference: Reference) -> list[Rated]:
    """The rows, and their prompts with other answers, with the reference's log-probabilities."""
    examples = compared([each.example for each in rows], reference)
    mates = iter(compared([each.mismatched for each in rows if each.mismatched], reference))
    return [
        replace(each, example=example, mismatched=next(mates) if each.mismatched else None)
        for each, example in zip(rows, examples, strict=True)
    ]


def divergence(engine: Engine, rows: Sequence[Rated]) -> float:
    """The policy's divergence from the reference as the paper estimates it, nats an answer, never below 0.

    Without dropout and the same for all of the step's micro-batches; 0 where the data have one prompt alone.
    """
    mates = [each.mismatched for each in rows if each.mismatched]
    if not mates:
        return 0.0
    return max(0.0, math.fsum(map(log_ratio, mates, engine.forward(mates))) / len(mates))


def loss_over(run: Run, rows: Sequence[Rated], kl: float) -> LossFn:
    settings = run.settings
    return partial(
        kto_loss,
        beta=settings.beta,
        kl=kl,
        good_rows=sum(is_good(each.example) for each in rows),
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
    )


def is_good(example: Example) -> bool:
    return example.label > 0.5


def evaluate(engine: Engine, run: Run, rows: Sequence[Rated]) -> dict[str, float]:
    """The loss on held-out rows, and the share of them that are on their side of the divergence."""
    examples = [each.example for each in rows]
    with run.meter.phase("update"):
        kl, outputs = divergence(engine, rows), engine.forward(examples)
    ratios = map(log_ratio, examples, outputs)
    margins = [(ratio - kl) * (1 if is_good(example) else -1) for example, ratio in zip(examples, ratios, strict=True)]
    return {
        "eval_loss": value_of(loss_over(run, rows, kl), outputs, examples)[0],
        "eval_accuracy": share_right(margins),
    }
