"""Signs of a run that goes wrong: when they are told, how often, and that a resumed run tells the same."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from training_container.health import watch


def a_run() -> Any:
    events: list[dict[str, Any]] = []
    return SimpleNamespace(
        state=SimpleNamespace(health={}, step=0),
        settings=SimpleNamespace(max_completion_tokens=64),
        log=SimpleNamespace(emit=lambda event, **fields: events.append({"event": event, **fields})),
        events=events,
    )


def feed(run: Any, name: str, values: list[float], **others: float) -> list[int]:
    """One rollout a value; the steps at which something was told."""
    for value in values:
        watch(run, {name: value, **others})
        run.state.step += 1
    return [event["step"] for event in run.events]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("frac_truncated", 0.6, "60% of the completions were cut at max_completion_tokens 64"),
        ("frac_zero_variance_groups", 0.9, "in 90% of the groups every completion got the same reward"),
        ("frac_duplicate_completions", 0.75, "75% of the completions repeat another one of their group"),
    ],
)
def test_a_share_beyond_its_line_is_told_once_it_held_for_5_rollouts(name: str, value: float, words: str) -> None:
    run = a_run()
    assert feed(run, name, [value] * 20) == [5]
    assert words in run.events[0]["message"]
    assert (run.events[0]["event"], run.events[0]["warning"]) == ("notice", name)


def test_answers_of_one_token_have_no_room_for_an_end_and_are_not_called_cut() -> None:
    run = a_run()
    run.settings.max_completion_tokens = 1
    assert feed(run, "frac_truncated", [1.0] * 20) == []


def test_one_odd_rollout_says_nothing() -> None:
    assert feed(a_run(), "frac_truncated", [0.1] * 5 + [1.0] + [0.1] * 9) == []


def test_a_sign_is_told_again_only_after_it_was_gone_and_3_times_at_most() -> None:
    assert feed(a_run(), "frac_truncated", ([1.0] * 5 + [0.0] * 5) * 6) == [5, 13, 23]  # 3 of 5 make a mean of 0.6


def test_lengths_are_compared_with_the_first_5_rollouts() -> None:
    run = a_run()
    assert feed(run, "completion_tokens", [8, 12, 10, 9, 11]) == []
    assert watch(run, {"completion_tokens": 25})["length_drift"] == 2.5
    assert feed(run, "completion_tokens", [25] * 4) == [8]  # the fourth of them: (1.1 + 4 x 2.5) / 5 is above 2
    assert "as long as at the start" in run.events[0]["message"]
    assert feed(run, "completion_tokens", [3] * 6)[-1] > 8
    assert "shrunk to" in run.events[-1]["message"]


def test_right_answers_that_repeat_each_other_are_no_sign() -> None:
    learning, collapsed = a_run(), a_run()
    assert feed(learning, "frac_duplicate_completions", [0.62] * 10, accuracy=0.5) == []
    assert feed(collapsed, "frac_duplicate_completions", [0.62] * 10, accuracy=0.1) == [5]


def test_a_value_that_hovers_at_its_line_is_told_once() -> None:
    assert feed(a_run(), "frac_truncated", [0.52, 0.48] * 20) == [5]


def test_a_fall_of_entropy_is_told_unless_nearly_everything_is_right() -> None:
    lost, solved = a_run(), a_run()
    assert feed(lost, "entropy", [2.0] * 5 + [0.1] * 10) != []
    assert feed(solved, "entropy", [2.0] * 5 + [0.1] * 10, accuracy=0.97) == []


def test_a_reward_that_leaves_the_held_out_one_behind_is_told() -> None:
    run = a_run()
    assert feed(run, "reward_heldout_gap", [0.1] * 5 + [0.2] * 5) == []  # the gap it began with is not held against it
    assert feed(run, "reward_heldout_gap", [0.4] * 5) == [13]  # the third: (2 x 0.1 + 3 x 0.3) / 5 is above 0.2
    assert "has gained 0." in run.events[0]["message"]


def test_a_run_that_was_resumed_tells_what_it_would_have_told() -> None:
    calm, resumed = a_run(), a_run()
    values = [0.1] * 4 + [0.9] * 5 + [0.1] * 5 + [0.9] * 5
    for value in values:
        assert watch(calm, {"frac_truncated": value, "entropy": value}) == watch(
            resumed, {"frac_truncated": value, "entropy": value}
        )
        resumed.state.health = json.loads(json.dumps(resumed.state.health))
    assert calm.events == resumed.events != []
