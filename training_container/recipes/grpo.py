"""Group-relative policy optimisation: draw a group of completions a prompt, and make the better ones likelier.

On-policy: every rollout is trained on once, so the ratio to the sampler starts at 1 and its clip only guards against a
sampler that computes differently. No KL term and no reference model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..advantages import group_advantages, has_spread
from ..data import Prompt, render_prompts
from ..defaults import rates_for
from ..engine import Completion, Engine, Example, Metrics, MicroBatch, Sampling, Totals
from ..failures import UserFailure
from ..losses import Objective, policy_loss
from ..rewards import Question, RewardFunction, Scores
from ..run import Run
from .supervised import warm_start

Groups = list[list[Completion]]

_EVAL_ROWS, _EVAL_TOKENS = 256, 32_768


def train(engine: Engine, run: Run) -> None:
    """Warm start (if asked for), evaluate, reinforce, evaluate."""
    settings, state = run.settings, run.state
    room = settings.max_length - settings.max_completion_tokens
    prompts, dropped = render_prompts(run.rows["train"], engine.tokenizer, room)
    held_out, _ = render_prompts(run.rows["eval"], engine.tokenizer, room) if run.rows.get("eval") else ([], 0)
    if dropped:
        run.log.emit("notice", message=f"{dropped} prompts leave no room for a completion and are left out")
    sampling = Sampling(settings.max_completion_tokens, settings.temperature, settings.top_p)

    with reward_function(run) as reward:
        warm_start(engine, run)
        if held_out and not state.eval_before:
            state.eval_before = run.report_eval("before", evaluate(engine, run, reward, held_out))
        for indices in run.steps(rows=len(prompts), batch=settings.batch_size // settings.group_size):
            chosen = [prompts[index] for index in indices]
            groups, scores = roll_out(engine, run, reward, chosen, sampling, settings.group_size)
            rewards_P_G = torch.tensor(scores.values).view(len(chosen), settings.group_size)
            update = improve(engine, run, chosen, groups, rewards_P_G)
            run.end_step(
                {**describe(run, groups, scores, rewards_P_G), **update},
                tokens=sum(len(completion.tokens) for group in groups for completion in group),
            )
            give_up_if_constant(run, scores, rewards_P_G)
        if 0 < run.state.step == run.state.constant_steps:
            run.log.emit("notice", message="no step had any spread of reward within a group: the model learned nothing")
        if held_out:
            state.eval_after = run.report_eval("after", evaluate(engine, run, reward, held_out))


def roll_out(
    engine: Engine, run: Run, reward: RewardFunction, prompts: Sequence[Prompt], sampling: Sampling, group_size: int
) -> tuple[Groups, Scores]:
    """Draw a group a prompt and score it."""
    with run.meter.phase("rollout"):
        groups = engine.sample([prompt.tokens for prompt in prompts], sampling, group_size=group_size)
    with run.meter.phase("reward"):
        scores = reward.score(question_about(engine.tokenizer, prompts, groups), step=run.state.step + 1)
    run.meter.count(
        prefill=sum(len(prompt.tokens) for prompt in prompts),
        sampled=sum(len(completion.tokens) for group in groups for completion in group),
    )
    return groups, scores


def improve(
    engine: Engine, run: Run, prompts: Sequence[Prompt], groups: Groups, rewards_P_G: Tensor
) -> dict[str, float]:
    """One optimizer step on the groups whose rewards differ; none at all when no group's do."""
    settings, rates = run.settings, rates_for("grpo", run.spec.model)
    advantages_P_G = group_advantages(rewards_P_G, settings.advantage)
    examples = [
        as_example(prompt, completion, advantage)
        for prompt, group, advantages in zip(prompts, groups, advantages_P_G.tolist(), strict=True)
        for completion, advantage in zip(group, advantages, strict=True)
        if advantage != 0.0
    ]
    if not examples:
        return {"loss": 0.0, "grad_norm": 0.0}

    objective = Objective(loss=settings.loss, clip_low=settings.clip_low, clip_high=settings.clip_high)

    def loss_fn(logprobs_N: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        # Under top_p the sampler drew from a cut distribution; its ratio to the whole one is not the policy's change.
        if settings.top_p < 1.0:
            batch = replace(batch, sampled_logprobs_N=logprobs_N.detach())
        return policy_loss(logprobs_N, batch, objective, trained=Totals.of(examples))

    with run.meter.phase("update"):
        # The mean is over all tokens drawn: leaving out rows without a gradient must not raise the others' weight.
        drawn = [completion for group in groups for completion in group]
        totals = Totals(sum(len(completion.tokens) for completion in drawn), len(drawn))
        metrics = engine.forward_backward(examples, loss_fn, temperature=settings.temperature, totals=totals)
        rate = run.learning_rate(rates.learning_rate)
        max_grad_norm = settings.max_grad_norm or rates.max_grad_norm
        taken = engine.optim_step(rate, max_grad_norm, weight_decay=settings.weight_decay)
    run.meter.count(trained=sum(example.trained_tokens for example in examples))
    run.count_skipped(taken.applied, "the gradient of the policy loss")
    return metrics | {"grad_norm": taken.grad_norm, "learning_rate": rate}


def as_example(prompt: Prompt, completion: Completion, advantage: float) -> Example:
    """The sampled ids themselves, never text tokenized again, with a loss on each of them."""
    return Example(
        tokens=[*prompt.tokens, *completion.tokens],
        trained=[False] * len(prompt.tokens) + [True] * len(completion.tokens),
        advantages=advantage,
        sampled_logprobs=completion.logprobs,
    )


# --- scoring ---------------------------------------------------------------------------------------------------------


def reward_function(run: Run) -> RewardFunction:
    reward = run.reward
    return RewardFunction(reward.entry or "", run.job.tree.code, time_limit_s=reward.time_limit_s, seed=run.spec.seed)


def question_about(tokenizer: object, prompts: Sequence[Prompt], groups: Groups) -> Question:
    """What the reward is asked, one entry a completion: texts without special tokens, or messages for chat rows."""
    flat = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    ids = [completion.tokens for _, completion in flat]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    names = {name: None for prompt in prompts for name in prompt.columns}
    return Question(
        prompts=[prompt.row.values["prompt"] for prompt, _ in flat],
        completions=[
            [{"role": "assistant", "content": text}] if prompt.row.is_chat else text
            for (prompt, _), text in zip(flat, texts, strict=True)
        ],
        completion_ids=ids,
        columns={name: [prompt.columns.get(name) for prompt, _ in flat] for name in names},
    )


def evaluate(engine: Engine, run: Run, reward: RewardFunction, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Greedy completions of held-out prompts: mean reward of the scored ones, and the share of all that are right.

    Raises:
        UserFailure: not one was scored, so there is nothing to compare the model by.
    """
    greedy = Sampling(run.settings.max_completion_tokens, greedy=True)
    longest = max(len(prompt.tokens) for prompt in prompts) + greedy.max_new_tokens
    size = max(1, min(_EVAL_ROWS, _EVAL_TOKENS // longest))
    parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    scores = Scores.joined([roll_out(engine, run, reward, part, greedy, 1)[1] for part in parts])
    if not scores.scored:
        raise UserFailure(
            f"The reward {run.reward.entry} scored none of the {len(prompts)} held-out completions: {scores.why_unscored}. "
            "It must give a number for some of data.eval."
        )
    return {"eval_reward": scores.mean, "eval_accuracy": share_right(scores.values, run.reward.success_at)}


def share_right(values: Sequence[float], success_at: float) -> float:
    """Unscored completions are not right."""
    return sum(value >= success_at for value in values) / len(values)


def describe(run: Run, groups: Groups, scores: Scores, rewards_P_G: Tensor) -> dict[str, float]:
    completions = [completion for group in groups for completion in group]
    return {
        "reward": scores.mean,
        "accuracy": share_right(scores.values, run.reward.success_at),
        "groups": len(groups),
        "trainable_groups": int(has_spread(rewards_P_G).sum()),
        "completion_tokens": sum(len(completion.tokens) for completion in completions) / len(completions),
        "frac_truncated": sum(not completion.finished for completion in completions) / len(completions),
        **scores.counts(),
    }


def give_up_if_constant(run: Run, scores: Scores, rewards_P_G: Tensor) -> None:
    """End a run that cannot learn because no group's rewards ever differ. All completions right is another matter.

    Raises:
        UserFailure: max_constant_steps steps in a row were so.
    """
    solved = bool(scores.scored) and min(scores.scored) >= run.reward.success_at
    state = run.state
    state.constant_steps = 0 if solved or has_spread(rewards_P_G).any() else state.constant_steps + 1
    if state.constant_steps >= run.settings.max_constant_steps:
        raise UserFailure(
            f"The reward had no spread within any group for {state.constant_steps} steps in a row "
            f"(up to step {state.step}), so there was nothing to learn: {_why_constant(scores)}."
        )


def _why_constant(scores: Scores) -> str:
    if not scores.scored:
        return f"no completion was scored: {scores.why_unscored}"
    low, high = min(scores.scored), max(scores.scored)
    if low == high:
        return f"every completion got {low:g}. Make the reward tell better from worse, or begin with a warm start"
    return "completions of the same prompt all got the same. Raise temperature or group_size, or grade more finely"
