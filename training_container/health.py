"""Signs that a run goes wrong, whatever its reward does: numbers of every rollout, a sentence when one crosses its line.

A sign is judged by the mean of the last 5 rollouts, so that one odd batch says nothing. It is told when the line is
crossed, again only after it was back on the good side, and 3 times a run at most. What a run looked like at its start
(`first`) is the mean of its first 5 rollouts. All of it is part of a checkpoint: a resumed run says what it would have.

To add a sign: its number in the metrics of a rollout (rollouts.py) or in `compared`, and its line in SIGNS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .run import Run

ROLLOUTS, MOST_TIMES, SOLVED_AT = 5, 3, 0.95
_OF_SUCCESS, _SLACK = 0.25, 0.9

# Metric compared with its first value -> the name of what comes of it, and how.
_RATIOS = {"completion_tokens": "length_drift", "entropy": "entropy_drift"}
_DIFFERENCES = {"reward_heldout_gap": "reward_heldout_drift"}


@dataclass(frozen=True)
class Sign:
    """A metric's line, and what it means to cross it. after_success: also where nearly all completions are right."""

    metric: str
    message: str
    above: float = math.inf
    below: float = -math.inf
    after_success: bool = True


SIGNS = (
    Sign(
        "frac_truncated",
        "{value:.0%} of the completions were cut at max_completion_tokens {max_completion_tokens}, and are scored as they "
        "stand. Raise it, or set overlong_penalty_tokens or mask_truncated",
        above=0.5,
    ),
    Sign(
        "frac_zero_variance_groups",
        "in {value:.0%} of the groups every completion got the same reward, which teaches nothing. Take prompts the model "
        "gets right now and then, grade more finely, or raise group_size or sampling_rounds",
        above=0.8,
        after_success=False,
    ),
    Sign(
        "frac_duplicate_completions",
        "{value:.0%} of the completions repeat another one of their group: the model hardly tries anything any more. Raise "
        "temperature, lower learning_rate, or hold it with kl_coef",
        above=0.5,
        after_success=False,
    ),
    Sign(
        "entropy_drift",
        "the entropy of a token has fallen to {value:.0%} of what it was: the model hardly tries anything any more. Raise "
        "clip_high or temperature, or lower learning_rate",
        below=0.1,
        after_success=False,
    ),
    Sign(
        "length_drift",
        "completions are {value:.1f} times as long as at the start. See whether the reward pays for length, in what "
        "`microtuning runs rollouts` shows",
        above=2.0,
    ),
    Sign(
        "length_drift",
        "completions have shrunk to {value:.0%} of their length at the start. See whether the reward pays for saying less, "
        "in what `microtuning runs rollouts` shows",
        below=0.4,
    ),
    Sign(
        "reward_heldout_drift",
        "the reward that is trained on has gained {value:.2f} more than the held-out one (weight 0): it may be paying for "
        "something else than what is wanted. Compare both in what `microtuning runs rollouts` shows",
        above=0.2,
    ),
)  # fmt: skip


def watch(run: Run, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a rollout with those that compare it with the start; says so once when one crosses its line."""
    state = run.state.health = _noted(run.state.health, metrics)
    found = {**metrics, **compared(state["first"], metrics)}
    smoothed = {name: _mean(values) for name, values in _recent(state, found).items() if len(values) == ROLLOUTS}
    if run.settings.max_completion_tokens == 1:
        smoothed.pop("frac_truncated", None)  # an answer of one token is whole without a token that ends it
    for sign in SIGNS:
        _judge(run, sign, smoothed)
    return found


def compared(first: Mapping[str, list[float]], metrics: Mapping[str, float]) -> dict[str, float]:
    """length_drift and entropy_drift as shares of the start, reward_heldout_drift as the gap's growth since then."""
    known = {name: _mean(values) for name, values in first.items() if values and name in metrics}
    ratios = {new: metrics[name] / known[name] for name, new in _RATIOS.items() if known.get(name)}
    return ratios | {new: metrics[name] - known[name] for name, new in _DIFFERENCES.items() if name in known}


def _noted(state: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """What is known of the start, with this rollout where it is one of the first."""
    first = {name: list(values) for name, values in state.get("first", {}).items()}
    for name in (*_RATIOS, *_DIFFERENCES):
        if name in metrics and math.isfinite(metrics[name]) and len(first.setdefault(name, [])) < ROLLOUTS:
            first[name].append(metrics[name])
    return {"told": {}, "beyond": {}, "recent": {}, **state, "first": first}


def _recent(state: dict[str, Any], metrics: Mapping[str, float]) -> dict[str, list[float]]:
    """The last few values of everything that is judged, this rollout's included."""
    names = {"accuracy", *(sign.metric for sign in SIGNS)}
    for name in sorted(names & metrics.keys()):
        if math.isfinite(metrics[name]):
            state["recent"][name] = [*state["recent"].get(name, []), metrics[name]][-ROLLOUTS:]
    recent: dict[str, list[float]] = state["recent"]
    return recent


def _judge(run: Run, sign: Sign, smoothed: Mapping[str, float]) -> None:
    if sign.metric not in smoothed:
        return
    state, value = run.state.health, smoothed[sign.metric]
    key = f"{sign.metric} {'above' if sign.above < math.inf else 'below'}"
    was_beyond = state["beyond"].get(key, False)
    # Once told, it has to go back a tenth before it counts as gone: a value that hovers at the line says nothing new.
    slack = _SLACK if was_beyond else 1.0
    beyond = not _comes_of_success(sign, value, smoothed) and (value > sign.above * slack or value < sign.below / slack)
    crossed = beyond and not was_beyond
    state["beyond"][key] = beyond
    if crossed and state["told"].get(key, 0) < MOST_TIMES:
        state["told"][key] = state["told"].get(key, 0) + 1
        message = sign.message.format(value=value, max_completion_tokens=run.settings.max_completion_tokens)
        run.log.emit(
            "notice",
            step=run.state.step + 1,
            warning=sign.metric,
            value=value,
            message=f"in the last {ROLLOUTS} rollouts {message}",
        )


def _comes_of_success(sign: Sign, value: float, smoothed: Mapping[str, float]) -> bool:
    """Right answers are alike: a share of repeated ones not far above the share of right ones is theirs."""
    accuracy = smoothed.get("accuracy", 0.0)
    natural = sign.above < math.inf and value <= accuracy + _OF_SUCCESS
    return not sign.after_success and (accuracy >= SOLVED_AT or (accuracy > 0 and natural))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
