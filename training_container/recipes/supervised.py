"""The supervised step that sft and the warm start of grpo share."""

from __future__ import annotations

from collections.abc import Sequence

from ..data import render_supervised
from ..defaults import WARM_START_MAX_GRAD_NORM, WARM_START_RAMP_STEPS
from ..engine import Engine, Example, LossFn
from ..losses import cross_entropy
from ..run import Run

_REPORT_EVERY = 10


def supervised_step(
    engine: Engine,
    run: Run,
    examples: Sequence[Example],
    *,
    rate: float,
    max_grad_norm: float,
    weight_decay: float = 0.0,
    loss: LossFn = cross_entropy,
) -> dict[str, float]:
    """One optimizer step on these rows; gives loss and gradient norm."""
    with run.meter.phase("update"):
        metrics = engine.forward_backward(examples, loss)
        taken = engine.optim_step(rate, max_grad_norm, weight_decay=weight_decay)
    run.meter.count(trained=sum(example.trained_tokens for example in examples))
    run.count_skipped(taken.applied, "the gradient of the supervised loss")
    return metrics | {"grad_norm": taken.grad_norm, "learning_rate": rate}


def warm_start(engine: Engine, run: Run) -> None:
    """Supervised steps on the `warm` channel before the main phase, kept as checkpoint 0 when they are done.

    They are a phase of their own: `step` stays 0. Stopped half-way, checkpoint 0 holds the half and is replaced later.
    """
    plan, state = run.settings.warm_start, run.state
    if plan is None or state.warm_step >= plan.steps:
        return
    rendered = render_supervised(run.rows["warm"], engine.tokenizer, run.settings.max_length)
    run.log.emit(
        "phase",
        phase="warm_start",
        warm_step=state.warm_step,
        warm_steps=plan.steps,
        rows=len(rendered.examples),
        dropped=rendered.dropped,
    )
    while state.warm_step < plan.steps:
        indices, cursor = state.warm_cursor.take(len(rendered.examples), plan.batch_size, run.spec.seed)
        rate = plan.learning_rate * min(1.0, (state.warm_step + 1) / WARM_START_RAMP_STEPS)
        batch = [rendered.examples[index] for index in indices]
        metrics = supervised_step(engine, run, batch, rate=rate, max_grad_norm=WARM_START_MAX_GRAD_NORM)
        state.warm_step, state.warm_cursor = state.warm_step + 1, cursor
        if state.warm_step % _REPORT_EVERY == 0 or state.warm_step == plan.steps:
            run.log.emit("phase", phase="warm_start", warm_step=state.warm_step, warm_loss=metrics["loss"])
        if state.warm_step < plan.steps:
            run.end_warm_step()
    engine.new_optimizer()
    run.save({"warm_loss": metrics["loss"]})
    run.await_checkpoint()
    run.leave_if_asked(saved=True)
