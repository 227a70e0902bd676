"""On-policy distillation: the student answers, and a teacher grades every token of the answer.

    for prompts x of a step:                                  run.steps
        y ~ student( . | x)                                   engine.sample
        A_t = log teacher(y_t) - log student(y_t)             graded: the reverse divergence, token by token
        one step on -r A, r the ratio to the student as it was when it answered

The gradient is that of KL(student || teacher) at each token given what came before it (arXiv:2306.13649 with on-policy data
and the reverse divergence, less what a token does to the divergence of those after it). A student learns what to do in the
places it gets to itself, where learning from the teacher's answers teaches it about the teacher's. Both are taken at the
sampling temperature, so where they agree there is nothing to learn at any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ..custom_code import load_loss
from ..data import Prompt, render_prompts
from ..defaults import rates_for
from ..engine import Engine, Example, LossFn, Sampling, Totals
from ..health import watch
from ..losses import Objective, policy_loss
from ..reference import Frozen, load_teacher
from ..rollouts import Rollout, describe_completions, trajectory_of
from ..run import Run

_EVAL_ROWS = 256


def train(engine: Engine, run: Run) -> None:
    """Evaluate, distil, evaluate."""
    settings, state = run.settings, run.state
    room = settings.max_length - settings.max_completion_tokens
    prompts, dropped = render_prompts(run.rows["train"], engine.tokenizer, room)
    held_out, _ = render_prompts(run.rows["eval"], engine.tokenizer, room) if run.rows.get("eval") else ([], 0)
    if dropped:
        run.log.emit("notice", message=f"{dropped} prompts leave no room for a completion and are left out")
    teacher, loss = load_teacher(engine, run), load_loss(run)

    if held_out and not state.eval_before:
        state.eval_before = run.report_eval("before", evaluate(engine, run, teacher, held_out))
    for indices in run.steps(rows=len(prompts), batch=settings.batch_size // settings.group_size):
        rollout = answers(engine, run, [prompts[index] for index in indices], indices, settings.group_size)
        update = imitate(engine, run, graded(engine, run, teacher, rollout), loss)
        run.end_step(watch(run, describe_completions(rollout)) | update, tokens=rollout.sampled_tokens)
    if held_out:
        state.eval_after = run.report_eval("after", evaluate(engine, run, teacher, held_out))


def answers(
    engine: Engine,
    run: Run,
    prompts: Sequence[Prompt],
    rows: Sequence[int],
    group_size: int,
    generator: torch.Generator | None = None,
) -> Rollout:
    """The student's own completions of these prompts, which are those of `rows`."""
    sampling = Sampling(run.settings.max_completion_tokens, run.settings.temperature)
    with run.meter.phase("rollout"):
        groups = engine.sample(
            [prompt.tokens for prompt in prompts], sampling, group_size=group_size, generator=generator
        )
    rollout = Rollout(
        [
            [trajectory_of(prompt, row, completion) for completion in group]
            for prompt, row, group in zip(prompts, rows, groups, strict=True)
        ]
    )
    run.meter.count(prefill=sum(len(prompt.tokens) for prompt in prompts), sampled=rollout.sampled_tokens)
    return rollout


def graded(engine: Engine, run: Run, teacher: Frozen, rollout: Rollout) -> list[Example]:
    """Rows whose advantages are how much likelier the teacher finds each token than the student did."""
    examples = [each.as_example(group=index) for index, group in enumerate(rollout.groups) for each in group]
    with run.meter.phase("update"):
        told = teacher.forward(examples, temperature=run.settings.temperature)
        own = students(engine, run, examples)
    return [
        replace(example, old_logprobs=student, advantages=[a - b for a, b in zip(by_teacher, student, strict=True)])
        for example, by_teacher, student in zip(examples, told, own, strict=True)
    ]


def students(engine: Engine, run: Run, examples: Sequence[Example]) -> list[list[float]]:
    """The student's log-probabilities, asked again only where another program drew."""
    if engine.samples_exactly:
        return [list(example.sampled_logprobs) for example in examples]
    return engine.forward(examples, temperature=run.settings.temperature)


def imitate(engine: Engine, run: Run, examples: Sequence[Example], loss: LossFn | None) -> dict[str, float]:
    """One optimizer step. `reverse_kl`: nats a token, the student's log-probability less the teacher's."""
    settings, rates = run.settings, rates_for("distillation", run.spec.model)
    totals, rate = Totals.of(examples), run.learning_rate(rates.learning_rate)
    with run.meter.phase("update"):
        loss = loss or partial(policy_loss, objective=Objective("importance_sampling"))
        metrics = engine.forward_backward(examples, loss, temperature=settings.temperature, totals=totals)
        taken = engine.optim_step(
            rate, settings.max_grad_norm or rates.max_grad_norm, weight_decay=settings.weight_decay
        )
    run.meter.count(trained=totals.tokens)
    run.count_skipped(taken.applied, "the gradient of the distillation loss")
    return {"reverse_kl": reverse_kl(examples), **metrics, "grad_norm": taken.grad_norm, "learning_rate": rate}


def reverse_kl(examples: Sequence[Example]) -> float:
    return -math.fsum(value for each in examples for value in each.token_advantages) / Totals.of(examples).tokens


def evaluate(engine: Engine, run: Run, teacher: Frozen, prompts: Sequence[Prompt]) -> dict[str, float]:
    """`eval_loss`: the reverse divergence on held-out prompts, nats a token; drawn with the same numbers each time."""
    examples: list[Example] = []
    chance = torch.Generator().manual_seed(run.spec.seed)
    for start in range(0, len(prompts), _EVAL_ROWS):
        part = prompts[start : start + _EVAL_ROWS]
        rollout = answers(engine, run, part, range(start, start + len(part)), 1, chance)
        examples += graded(engine, run, teacher, rollout)
    return {"eval_loss": reverse_kl(examples)}
