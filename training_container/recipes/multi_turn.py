"""Policy optimisation over episodes of several turns in the user's environment.

    for rows x of a rollout:                                  run.steps
        G episodes of each, all of them at once:              environments/play.py
            the model says its turn, token by token
            the environment answers: observation, reward
        r_i = the sum of an episode's rewards                 draw
        the rest is grpo's: advantages, loss, updates         policy.py

Token in, token out: a turn's context is the ids so far and those of the observation, nothing is tokenized twice, and the
loss is on the sampled tokens alone, each with the advantage of its episode's whole return. The episodes of a group begin
with the same seed, so their environments have the same chance, and what differs is what the model did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from microtuning_core.domain.datasets import Row

from ..custom_code import load_loss
from ..data import prompt_tokens
from ..engine import Engine, Sampling
from ..environments.play import Stage, open_stage, play
from ..environments.pool import episode_seed
from ..environments.transcript import Transcript
from ..failures import UserFailure
from ..reference import reference_of
from ..rewards import NOT_SCORED, Question, Rewards, Scores
from ..rollouts import Rollout, Trajectory, recall_or_draw, roll_out, rollout_log, success_at, told, window
from ..run import Run
from .grpo import reward_function, share_right
from .policy import give_up_if_constant, objective_of, policy_update, say_if_nothing_was_learned, with_logprobs
from .supervised import warm_start


def train(engine: Engine, run: Run) -> None:
    """Warm start (if asked for), evaluate, reinforce, evaluate."""
    settings, state = run.settings, run.state
    rows, held_out = usable_rows(engine, run), run.rows.get("eval") or []
    sampling = Sampling(settings.max_completion_tokens, settings.temperature, settings.top_p)
    loss, reference = load_loss(run), reference_of(engine, run)
    objective = objective_of(engine, run)
    groups, updates = window(settings)

    log = rollout_log(run)

    with open_stage(engine, run) as stage, optional_reward(run) as reward:

        def episodes(indices: Sequence[int]) -> Rollout:
            return draw(stage, run, reward, {index: rows[index] for index in indices}, sampling)

        def tell(rollout: Rollout) -> None:
            told(run, rollout, log, rows, partial(texts_of, engine.tokenizer))

        def scored_rollout(indices: Sequence[int]) -> Rollout:
            rollout = roll_out(run, indices, episodes, rows=len(rows), tell=tell)
            return with_logprobs(engine, run, rollout, objective, reference=reference, loss=loss)

        warm_start(engine, run)
        if held_out and not state.eval_before:
            state.eval_before = run.report_eval("before", evaluate(stage, run, reward, held_out))
        for indices in run.steps(rows=len(rows), batch=groups, updates=updates):
            rollout = recall_or_draw(run, indices, scored_rollout)
            for _ in run.updates():
                update = policy_update(engine, run, rollout, objective, loss=loss)
                run.end_step({**rollout.metrics, **update}, tokens=rollout.sampled_tokens // updates)
                give_up_if_constant(run, rollout)
        say_if_nothing_was_learned(run)
        if held_out:
            state.eval_after = run.report_eval("after", evaluate(stage, run, reward, held_out))


def usable_rows(engine: Engine, run: Run) -> list[Row]:
    """Rows whose prompt leaves room for a turn; what reset adds to it is seen only when it is played.

    Raises:
        UserFailure: none does.
    """
    rows, room = run.rows["train"], run.settings.max_length - run.settings.max_completion_tokens
    usable = [row for row in rows if not row.values.get("prompt") or len(prompt_tokens(row, engine.tokenizer)) <= room]
    if not usable:
        raise UserFailure(f"Every prompt is longer than the {room} tokens that max_length leaves it. Raise max_length.")
    if dropped := len(rows) - len(usable):
        run.log.emit("notice", message=f"{dropped} prompts leave no room for a turn and are left out")
    return usable


@contextmanager
def optional_reward(run: Run) -> Iterator[Rewards | None]:
    """The reward function that scores whole episodes beside their environment, where the spec names one."""
    if run.spec.reward is None:
        yield None
        return
    with reward_function(run) as reward:
        yield reward


# --- rollouts --------------------------------------------------------------------------------------------------------


def draw(stage: Stage, run: Run, reward: Rewards | None, rows: Mapping[int, Row], sampling: Sampling) -> Rollout:
    """A scored group of episodes for each of these rows (by index). An episode's chance follows from step and row."""
    size = run.settings.group_size
    seeds = [episode_seed(run.spec.seed, f"{run.state.step}/{index}") for index in rows]
    with run.meter.phase("rollout"):
        transcripts = play(stage, list(rows.values()), seeds, sampling, group_size=size)
    scores = score(stage, run, reward, transcripts)
    worth = totals(transcripts, scores)
    of_rows = [index for index in rows for _ in range(size)]
    trajectories = [
        as_trajectory(transcript, row, value, parts)
        for transcript, row, value, parts in zip(
            transcripts, of_rows, worth, components(transcripts, scores), strict=True
        )
    ]
    run.meter.count(
        prefill=sum(each.prompt_tokens for each in transcripts),
        sampled=sum(each.sampled_tokens for each in transcripts),
    )
    timed_out = sum(each.timed_out for each in transcripts)
    return Rollout(
        groups=[trajectories[start : start + size] for start in range(0, len(trajectories), size)],
        counts=({"episodes_timed_out": timed_out} if timed_out else {}) | (scores.counts() if scores else {}),
        means=per_episode(transcripts) | (scores.metrics() if scores else {}),
        why_unscored=why_unscored(transcripts, scores),
    )


def as_trajectory(transcript: Transcript, row: int, reward: float, parts: Mapping[str, float]) -> Trajectory:
    start = transcript.prompt_tokens
    return Trajectory(
        row=row,
        prompt=transcript.tokens[:start],
        completion=transcript.tokens[start:],
        sampled=transcript.sampled[start:],
        logprobs=transcript.logprobs,
        truncated=not transcript.finished,
        reward=reward,
        components=parts,
    )


def per_episode(transcripts: Sequence[Transcript]) -> dict[str, float]:
    """Means over the episodes: turns, and the environment's own metrics, each the sum over an episode's turns."""
    found: dict[str, float] = {"turns": sum(each.turns for each in transcripts)}
    for each in transcripts:
        for name, value in each.metrics.items():
            found[f"environment_{name}"] = found.get(f"environment_{name}", 0.0) + value
    return {name: value / len(transcripts) for name, value in found.items()}


def texts_of(tokenizer: Any, trajectories: Sequence[Trajectory]) -> list[tuple[Any, str]]:
    """How each began and how it went on, for a person to read: special tokens are shown."""
    began = tokenizer.batch_decode([each.prompt for each in trajectories])
    return list(zip(began, tokenizer.batch_decode([each.completion for each in trajectories]), strict=True))


# --- scoring ---------------------------------------------------------------------------------------------------------


def score(stage: Stage, run: Run, reward: Rewards | None, transcripts: Sequence[Transcript]) -> Scores | None:
    """What the reward function says of whole episodes; None where there is none.

    Raises:
        UserFailure: nothing rewards: neither the environment nor a function; or there was no turn to reward.
    """
    if reward is None:
        if not any(each.turns or each.timed_out for each in transcripts):
            raise UserFailure(
                f"No episode had room for a turn: what the model is shown first has more than the {stage.room} tokens that "
                "algorithm.max_length leaves beside max_completion_tokens. Raise it, or let reset show less."
            )
        if all(each.total is None for each in transcripts):
            raise UserFailure(
                f"The environment {run.spec.environment.entry} gave no reward for any turn or episode, and the spec has no "
                "reward function: there is nothing to learn from."
            )
        return None
    with run.meter.phase("reward"):
        return reward.score(question_about(stage, transcripts), step=run.state.step + 1)


def question_about(stage: Stage, transcripts: Sequence[Transcript]) -> Question:
    """Whole episodes as the reward is asked about them: messages, or for plain rows the text after the prompt."""

    def text(ids: Sequence[int]) -> str:
        return str(stage.engine.tokenizer.decode(ids, skip_special_tokens=True))

    names = {name: None for each in transcripts for name in each.row.values if name != "prompt"}
    return Question(
        prompts=[
            each.messages[: each.prompt_messages] if each.is_chat else text(each.tokens[: each.prompt_tokens])
            for each in transcripts
        ],
        completions=[
            each.messages[each.prompt_messages :] if each.is_chat else text(each.tokens[each.prompt_tokens :])
            for each in transcripts
        ],
        completion_ids=[each.tokens[each.prompt_tokens :] for each in transcripts],
        columns={name: [each.row.values.get(name) for each in transcripts] for name in names},
    )


def totals(transcripts: Sequence[Transcript], scores: Scores | None) -> list[float]:
    """What each episode is worth: its environment's rewards and the function's score, NaN where either is not to be had."""
    if scores is None:
        return [NOT_SCORED if each.total is None else each.total for each in transcripts]
    return [(each.total or 0.0) + value for each, value in zip(transcripts, scores.values, strict=True)]


def components(transcripts: Sequence[Transcript], scores: Scores | None) -> list[dict[str, float]]:
    """What an episode's worth is made of, where it is made of more than its environment's rewards."""
    if scores is None:
        return [{} for _ in transcripts]
    return [
        {"environment": each.total or 0.0} | {name: values[index] for name, values in scores.components.items()}
        for index, each in enumerate(transcripts)
    ]


def why_unscored(transcripts: Sequence[Transcript], scores: Scores | None) -> str:
    """As a sentence says it."""
    timed_out = sum(each.timed_out for each in transcripts)
    unrewarded = sum(each.total is None for each in transcripts) if scores is None else 0
    not_finite = sum(math.isnan(each.total or 0.0) for each in transcripts) - timed_out
    causes = {
        "episodes timed out": timed_out,
        "had no reward": unrewarded,
        "had a reward that is not finite": not_finite,
    }
    parts = [f"{count} {cause}" for cause, count in causes.items() if count]
    return ", ".join([*parts, *([scores.why_unscored] if scores and scores.why_unscored else [])])


def evaluate(stage: Stage, run: Run, reward: Rewards | None, rows: Sequence[Row]) -> dict[str, float]:
    """One episode of each held-out row, the likeliest token each time, and the same chance every time it is asked.

    Raises:
        UserFailure: not one was scored, so there is nothing to compare the model by.
    """
    greedy = Sampling(run.settings.max_completion_tokens, greedy=True)
    seeds = [episode_seed(run.spec.seed, f"eval/{index}") for index in range(len(rows))]
    with run.meter.phase("rollout"):
        transcripts = play(stage, rows, seeds, greedy)
    scores = score(stage, run, reward, transcripts)
    values = totals(transcripts, scores)
    scored = [value for value in values if not math.isnan(value)]
    if not scored:
        raise UserFailure(
            f"None of the {len(rows)} held-out episodes was scored: {why_unscored(transcripts, scores)}. "
            "The environment must give a reward for some of data.eval."
        )
    return {
        "eval_reward": math.fsum(scored) / len(scored),
        "eval_accuracy": share_right(values, success_at(run)),
        "eval_turns": sum(each.turns for each in transcripts) / len(transcripts),
    }
