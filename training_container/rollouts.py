"""What was drawn for some prompts and how it was scored: drawn, kept and cut into updates alike by every recipe that draws.

One trajectory, as a checkpoint inside a window of several updates keeps it:

    {"row": 3, "prompt": [11, 5], "completion": [7, 9, 1], "sampled": [true, true, true], "logprobs": [-1.5, -0.25, -3.0],
     "truncated": false, "reward": 0.5, "components": {"format": 1.0}, "notes": {}, "old_logprobs": [],
     "reference_logprobs": []}

Log-probabilities are float32, which Python's floats and JSON hold exactly: a rollout that was read back trains to the same
bits. A reward of NaN stands for "not scored", and is null in JSON.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from microtuning_core.domain.algorithms import RewardSpec
from microtuning_core.domain.datasets import Row

from .advantages import group_advantages, has_spread
from .data import Prompt
from .engine import Completion, Example
from .health import watch
from .rollout_log import RolloutLog, Said
from .run import Run

NOT_SCORED = math.nan


@dataclass(frozen=True)
class Trajectory:
    """One completion of a prompt: what the model said and, in several turns, what it was told between.

    row: index of the prompt's row. completion: all tokens after the prompt; sampled: which of them the model drew.
    logprobs, old_logprobs, reference_logprobs: one a drawn token, in order: under the distribution it was drawn from, and
        (where they are needed) under the policy before the rollout's first update and under the reference.
    truncated: it did not end by itself. reward: NaN when not scored. components, notes: numbers and texts beside the
        reward, for showing; notes are not kept in checkpoints.
    """

    row: int
    prompt: list[int]
    completion: list[int]
    sampled: list[bool]
    logprobs: list[float]
    truncated: bool = False
    reward: float = NOT_SCORED
    components: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    old_logprobs: list[float] = field(default_factory=list)
    reference_logprobs: list[float] = field(default_factory=list)

    @property
    def sampled_tokens(self) -> int:
        return sum(self.sampled)

    def as_example(self, advantage: float | Sequence[float] = 0.0, *, group: int | None = None) -> Example:
        """The ids themselves, never text tokenized again, with a loss on those the model drew."""
        return Example(
            tokens=[*self.prompt, *self.completion],
            trained=[False] * len(self.prompt) + self.sampled,
            advantages=advantage,
            sampled_logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            reference_logprobs=self.reference_logprobs,
            group=group,
        )


def trajectory_of(prompt: Prompt, row: int, completion: Completion) -> Trajectory:
    """A completion of one turn, not scored yet."""
    return Trajectory(
        row=row,
        prompt=prompt.tokens,
        completion=completion.tokens,
        sampled=[True] * len(completion.tokens),
        logprobs=completion.logprobs,
        truncated=not completion.finished,
    )


Group = list[Trajectory]
Texts = tuple[Any, Any]


@dataclass(frozen=True)
class Rollout:
    """Groups of trajectories, one group a prompt and all of one size, and what there is to say of how they came about.

    counts, means: numbers that are added up, or averaged, when rollouts are joined. why_unscored: as a sentence says it; ""
    when everything was scored. metrics: what every step made of this rollout reports.
    """

    groups: list[Group]
    counts: Mapping[str, float] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)
    why_unscored: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [each for group in self.groups for each in group]

    @property
    def sampled_tokens(self) -> int:
        return sum(each.sampled_tokens for each in self.trajectories)

    @property
    def scored(self) -> list[float]:
        return [each.reward for each in self.trajectories if not math.isnan(each.reward)]

    def as_json(self) -> dict[str, Any]:
        return {
            "groups": [[_without_nan(asdict(each) | {"notes": {}}) for each in group] for group in self.groups],
            "counts": _without_nan(self.counts),
            "means": _without_nan(self.means),
            "why_unscored": self.why_unscored,
            "metrics": _without_nan(self.metrics),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Rollout:
        groups = [[Trajectory(**_with_nan(each)) for each in group] for group in saved["groups"]]
        numbers = {name: _with_nan(saved[name]) for name in ("counts", "means", "metrics")}
        return cls(groups, why_unscored=saved["why_unscored"], **numbers)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN. A log-probability is never one, so lists go as they are."""
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if value != value else value


def _with_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_nan(item) for name, item in value.items()}
    return NOT_SCORED if value is None else value


# --- drawing -----------------------------------------------------------------------------------------------------------


def window(settings: Any) -> tuple[int, int]:
    """Groups of a rollout, and optimizer steps made of it."""
    return settings.batch_size // settings.group_size * settings.minibatches, settings.minibatches * settings.passes


def recall_or_draw(run: Run, indices: Sequence[int], draw: Callable[[Sequence[int]], Rollout]) -> Rollout:
    """The rollout this window began with: drawn, unless the run was resumed inside it; kept while more is made of it."""
    if run.memory is not None:
        return Rollout.from_json(run.memory)
    rollout = draw(indices)
    if window(run.settings)[1] > 1:
        run.memory = rollout.as_json()
    return rollout


def roll_out(
    run: Run,
    indices: Sequence[int],
    draw: Callable[[Sequence[int]], Rollout],
    *,
    rows: int,
    tell: Callable[[Rollout], None] | None = None,
) -> Rollout:
    """A group for each of these rows; further rows in place of groups that teach nothing, in `sampling_rounds` at most.

    As in DAPO (arXiv:2503.14476, sec. 3.2), but bounded: when the rounds or the rows are at an end, groups without spread
    fill the places that are left, and count as they always do. Each round draws as many groups as are missing. Metrics are
    of all that was drawn, for what was kept has been chosen by its rewards.

    Args:
        draw: gives scored groups for these of the data's `rows` rows.
        tell: is told of all that was drawn (`told`).
    """
    parts = [draw(indices)]
    spread = [_spread(run, parts[0])]
    missing = len(indices) - sum(spread[0])
    while missing and len(parts) < run.settings.sampling_rounds and (further := run.more(rows, missing)):
        parts.append(draw(further))
        spread.append(_spread(run, parts[-1]))
        missing -= sum(spread[-1])
    drawn = joined(parts)
    teaches = [flag for part in spread for flag in part]
    kept = sorted(range(len(teaches)), key=lambda index: not teaches[index])[: len(indices)]
    metrics = {**describe_rewards(run, drawn), **describe_completions(drawn), **drawn.means, **drawn.counts}
    if run.settings.sampling_rounds > 1:
        metrics |= {"sampling_rounds": len(parts), "empty_rounds": sum(not any(part) for part in spread)}
    if tell:
        tell(drawn)
    return replace(drawn, groups=[drawn.groups[index] for index in kept], metrics=watch(run, metrics))


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Several rollouts as one."""
    counts = dict.fromkeys(name for part in parts for name in part.counts)
    means = dict.fromkeys(name for part in parts for name in part.means)
    return Rollout(
        groups=[group for part in parts for group in part.groups],
        counts={name: sum(part.counts.get(name, 0) for part in parts) for name in counts},
        means={name: _mean_over(parts, name) for name in means},
        why_unscored=next((part.why_unscored for part in reversed(parts) if part.why_unscored), ""),
    )


def _mean_over(parts: Sequence[Rollout], name: str) -> float:
    """Weighted by completions; a part that has no such number does not count."""
    found = [(part.means.get(name, NOT_SCORED), len(part.trajectories)) for part in parts]
    known = [(value, count) for value, count in found if not math.isnan(value)]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else NOT_SCORED


def _spread(run: Run, rollout: Rollout) -> list[bool]:
    flags: list[bool] = has_spread(rewards_P_G(run, rollout)).tolist()
    return flags


# --- rewards -----------------------------------------------------------------------------------------------------------


def rewards_P_G(run: Run, rollout: Rollout) -> Tensor:
    """What the advantages are taken from: each completion's reward, less its penalty for length. Shape [P, G]."""
    penalised = [[each.reward + length_penalty(run, each.sampled_tokens) for each in group] for group in rollout.groups]
    return torch.tensor(penalised, dtype=torch.float64)


def length_penalty(run: Run, tokens: int) -> float:
    """0 to within overlong_penalty_tokens of the longest there may be, then falling to -1 there (DAPO, eq. 13)."""
    soft = run.settings.overlong_penalty_tokens
    return max(-1.0, min(0.0, (longest(run) - soft - tokens) / soft)) if soft else 0.0


def longest(run: Run) -> int:
    """Tokens that a completion may have: of one turn, or of all turns of an episode."""
    turns = run.spec.environment.max_steps if run.settings.type == "multi_turn" else 1
    return int(run.settings.max_completion_tokens) * turns


def describe_rewards(run: Run, rollout: Rollout) -> dict[str, float]:
    """Means over what was scored; a completion that was not is not right either."""
    all_of_them, scored = rollout.trajectories, rollout.scored
    spread = _spread(run, rollout)
    found = {
        "reward": sum(scored) / len(scored) if scored else NOT_SCORED,
        "accuracy": sum(value >= success_at(run) for value in scored) / len(all_of_them),
        "groups": len(rollout.groups),
        "trainable_groups": sum(spread),
        "frac_zero_variance_groups": 1 - sum(spread) / len(spread),
    }
    if run.settings.overlong_penalty_tokens:
        penalties = [length_penalty(run, each.sampled_tokens) for each in all_of_them]
        found["length_penalty"] = sum(penalties) / len(penalties)
    return found


def success_at(run: Run) -> float:
    """From which reward on a completion is right; an environment may give rewards where the spec names none."""
    return float(run.spec.reward.success_at if run.spec.reward else RewardSpec.model_fields["success_at"].default)


def describe_completions(rollout: Rollout) -> dict[str, float]:
    """entropy: nats a token, estimated from the drawn tokens' log-probabilities under the distribution they come from."""
    all_of_them = rollout.trajectories
    tokens = max(1, rollout.sampled_tokens)
    repeated = sum(len(group) - len({tuple(each.completion) for each in group}) for group in rollout.groups)
    return {
        "completion_tokens": rollout.sampled_tokens / len(all_of_them),
        "frac_truncated": sum(each.truncated for each in all_of_them) / len(all_of_them),
        "frac_duplicate_completions": repeated / len(all_of_them),
        "entropy": -math.fsum(value for each in all_of_them for value in each.logprobs) / tokens,
    }


def told(
    run: Run,
    rollout: Rollout,
    log: RolloutLog,
    rows: Sequence[Row],
    texts: Callable[[Sequence[Trajectory]], list[Texts]],
) -> None:
    """Put every completion of the coming step into the rollout log, with its scores and its advantage.

    Args:
        rows: of the data; a trajectory's `row` is an index into them.
        texts: prompt and completion of each trajectory, as a person reads them.
    """
    if not run.engine.world.is_main or not log_share(run):
        return
    advantages_P_G = group_advantages(rewards_P_G(run, rollout), run.settings.advantage)
    each = zip(rollout.trajectories, texts(rollout.trajectories), advantages_P_G.flatten().tolist(), strict=True)
    log.write(
        run.state.step + 1,
        [
            Said(
                row=f"{rows[one.row].file}:{rows[one.row].line}",
                prompt=prompt,
                completion=completion,
                reward=one.reward,
                components=one.components,
                notes=one.notes,
                advantage=advantage,
                truncated=one.truncated,
                tokens=one.sampled_tokens,
            )
            for one, (prompt, completion), advantage in each
        ],
    )


def rollout_log(run: Run) -> RolloutLog:
    return RolloutLog(run.job.tree.checkpoints, seed=run.spec.seed, share=log_share(run))


def log_share(run: Run) -> float:
    return float(run.spec.reward.log_share if run.spec.reward else RewardSpec.model_fields["log_share"].default)


# --- updates -----------------------------------------------------------------------------------------------------------


def minibatch(run: Run, rollout: Rollout) -> list[int]:
    """Which groups the coming update of the window trains on: each pass deals all of them out, in an order of its own.

    It follows from the seed, the step at which the window began and the pass, so there is nothing to save. Where a rollout
    has fewer groups than minibatches (an epoch's last rows), some of the updates get none.
    """
    settings, state = run.settings, run.state
    groups = len(rollout.groups)
    if settings.minibatches == settings.passes == 1:
        return list(range(groups))
    number, part = divmod(state.update, settings.minibatches)
    digest = hashlib.sha256(f"{run.spec.seed}/{state.step - state.update}/{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    order: list[int] = torch.randperm(groups, generator=generator).tolist()
    return sorted(order[part :: settings.minibatches])
