"""Supervised fine-tuning: make the completions of the data likelier, each token weighing the same."""

from __future__ import annotations

import math

from ..custom_code import chosen_loss
from ..data import render_supervised
from ..defaults import rates_for
from ..engine import Engine, Example
from ..losses import cross_entropy
from ..run import Run
from .supervised import supervised_step


def train(engine: Engine, run: Run) -> None:
    """Cross entropy on completions, assistant turns or whole texts. No packing, no dropout; rate constant after warm-up."""
    settings, state = run.settings, run.state
    rates, loss = rates_for("sft", run.spec.model), chosen_loss(run, cross_entropy)
    train_rows = render_supervised(run.rows["train"], engine.tokenizer, settings.max_length)
    eval_rows = (
        render_supervised(run.rows["eval"], engine.tokenizer, settings.max_length) if run.rows.get("eval") else None
    )
    if train_rows.dropped:
        run.log.emit("notice", message=f"{train_rows.dropped} rows keep no label within max_length and are left out")

    if eval_rows and not state.eval_before:
        state.eval_before = run.report_eval("before", evaluate(engine, run, eval_rows.examples))
    for indices in run.steps(rows=len(train_rows.examples), batch=settings.batch_size):
        examples = [train_rows.examples[index] for index in indices]
        metrics = supervised_step(
            engine,
            run,
            examples,
            rate=run.learning_rate(rates.learning_rate),
            max_grad_norm=settings.max_grad_norm or rates.max_grad_norm,
            weight_decay=settings.weight_decay,
            loss=loss,
        )
        run.end_step(metrics, tokens=sum(example.trained_tokens for example in examples))
    if eval_rows:
        state.eval_after = run.report_eval("after", evaluate(engine, run, eval_rows.examples))


def evaluate(engine: Engine, run: Run, examples: list[Example]) -> dict[str, float]:
    """Mean negative log-likelihood of the held-out rows' labels, nats a token, and its perplexity."""
    with run.meter.phase("update"):
        logprobs = [value for row in engine.forward(examples) for value in row]
    loss = -math.fsum(logprobs) / len(logprobs)
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 50.0))}
