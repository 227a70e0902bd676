"""Group-relative policy optimisation: draw a group of completions a prompt, and make the better ones likelier.

    for prompts x of a rollout:                               run.steps
        y_1 … y_G ~ q( . | x), r_i = reward(x, y_i)           draw, roll_out (further rows for groups that teach nothing)
        A_i = r_i less its group's mean, …                    advantages.py
        for each pass, for each minibatch:                    run.updates
            one step on the loss of (y, A, q, reference)      policy_update, losses/policy.py

As the paper's (arXiv:2402.03300, algorithm 1) with its family by settings. By default it is on-policy: one step a rollout,
so that the ratio to the sampler is 1 and its clip guards only against a sampler that computes differently; no divergence
from a reference is paid for. The reference is never replaced: it is the model as it was before any training of this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from microtuning_core.domain.algorithms import RewardSpec

from ..custom_code import load_loss
from ..data import Prompt, render_prompts
from ..engine import Completion, Engine, Sampling
from ..failures import UserFailure
from ..reference import reference_of
from ..rewards import Question, Rewards, Scores, open_rewards
from ..rollouts import Rollout, Trajectory, recall_or_draw, roll_out, rollout_log, told, trajectory_of, window
from ..run import Run
from .policy import give_up_if_constant, objective_of, policy_update, say_if_nothing_was_learned, with_logprobs
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
    loss, objective, reference = load_loss(run), objective_of(engine, run), reference_of(engine, run)
    groups, updates = window(settings)

    log = rollout_log(run)

    with reward_function(run) as reward:

        def answers(indices: Sequence[int]) -> Rollout:
            return draw(engine, run, reward, [prompts[index] for index in indices], indices, sampling)

        def tell(rollout: Rollout) -> None:
            told(run, rollout, log, [prompt.row for prompt in prompts], partial(texts_of, engine.tokenizer, prompts))

        def scored_rollout(indices: Sequence[int]) -> Rollout:
            rollout = roll_out(run, indices, answers, rows=len(prompts), tell=tell)
            return with_logprobs(engine, run, rollout, objective, reference=reference, loss=loss)

        warm_start(engine, run)
        if held_out and not state.eval_before:
            state.eval_before = run.report_eval("before", evaluate(engine, run, reward, held_out))
        for indices in run.steps(rows=len(prompts), batch=groups, updates=updates):
            rollout = recall_or_draw(run, indices, scored_rollout)
            for _ in run.updates():
                update = policy_update(engine, run, rollout, objective, loss=loss)
                run.end_step({**rollout.metrics, **update}, tokens=rollout.sampled_tokens // updates)
                give_up_if_constant(run, rollout)
        say_if_nothing_was_learned(run)
        if held_out:
            state.eval_after = run.report_eval("after", evaluate(engine, run, reward, held_out))


def draw(
    engine: Engine, run: Run, reward: Rewards, prompts: Sequence[Prompt], rows: Sequence[int], sampling: Sampling
) -> Rollout:
    """A scored group of completions for each of these prompts, which are those of `rows`."""
    groups, scores = complete(engine, run, reward, prompts, sampling, run.settings.group_size)
    each = iter(range(len(scores.values)))
    return Rollout(
        groups=[
            [answered(prompt, row, completion, scores, next(each)) for completion in group]
            for prompt, row, group in zip(prompts, rows, groups, strict=True)
        ],
        counts=scores.counts(),
        means=scores.metrics(),
        why_unscored=scores.why_unscored,
    )


def answered(prompt: Prompt, row: int, completion: Completion, scores: Scores, index: int) -> Trajectory:
    return replace(
        trajectory_of(prompt, row, completion),
        reward=scores.values[index],
        components={name: values[index] for name, values in scores.components.items()},
        notes={name: values[index] for name, values in scores.notes.items() if values[index] is not None},
    )


def texts_of(tokenizer: Any, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[tuple[Any, str]]:
    """Prompt and completion of each, for a person to read: special tokens are shown."""
    completions = tokenizer.batch_decode([each.completion for each in trajectories])
    return [
        (prompts[each.row].row.values["prompt"], text) for each, text in zip(trajectories, completions, strict=True)
    ]


def complete(
    engine: Engine, run: Run, reward: Rewards, prompts: Sequence[Prompt], sampling: Sampling, group_size: int
) -> tuple[Groups, Scores]:
    """Completions of each prompt, and their scores in the same order."""
    with run.meter.phase("rollout"):
        groups = engine.sample([prompt.tokens for prompt in prompts], sampling, group_size=group_size)
    with run.meter.phase("reward"):
        scores = reward.score(question_about(engine.tokenizer, prompts, groups), step=run.state.step + 1)
    run.meter.count(
        prefill=sum(len(prompt.tokens) for prompt in prompts),
        sampled=sum(len(completion.tokens) for group in groups for completion in group),
    )
    return groups, scores


# --- scoring ---------------------------------------------------------------------------------------------------------


def reward_function(run: Run) -> Rewards:
    """All parts of the run's reward, loaded and ready; for a `with`."""
    return open_rewards(
        run.reward,
        run.job.tree.code,
        seed=run.spec.seed,
        log=run.log,
        model_channel=run.job.tree.channel,
        device=run.engine.device,
        keep=run.job.tree.checkpoints,
        world=run.engine.world,
    )


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


def evaluate(engine: Engine, run: Run, reward: Rewards, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Greedy completions of held-out prompts: mean reward of the scored ones, and the share of all that are right.

    Raises:
        UserFailure: not one was scored, so there is nothing to compare the model by.
    """
    greedy = Sampling(run.settings.max_completion_tokens, greedy=True)
    longest = max(len(prompt.tokens) for prompt in prompts) + greedy.max_new_tokens
    size = max(1, min(_EVAL_ROWS, _EVAL_TOKENS // longest))
    parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    scores = Scores.joined([complete(engine, run, reward, part, greedy, 1)[1] for part in parts])
    if not scores.scored:
        raise UserFailure(
            f"The reward {named(run.reward)} scored none of the {len(prompts)} held-out completions: "
            f"{scores.why_unscored}. It must give a number for some of data.eval."
        )
    return {"eval_reward": scores.mean, "eval_accuracy": share_right(scores.values, run.reward.success_at)}


def named(reward: RewardSpec) -> str:
    """The reward as its owner knows it."""
    return reward.entry or ", ".join(reward.parts)


def share_right(values: Sequence[float], success_at: float) -> float:
    """Unscored completions are not right."""
    return sum(value >= success_at for value in values) / len(values)
