"""The forms a reward function may have, several rewards together, and what reaches the metrics."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from microtuning_core.domain.algorithms import RewardSpec
from training_container.failures import UserFailure
from training_container.metrics import EventLog
from training_container.rewards import Question, Rewards, Scores, open_rewards
from training_container.rewards.functions import is_async, scores_one
from training_container.rewards.scores import Answer, Answers, combined

NAN = math.nan


def asked(*completions: Any, **columns: list[Any]) -> Question:
    return Question(["q"] * len(completions), list(completions), [[7]] * len(completions), columns)


def plain(values: list[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


Opened = Callable[..., Rewards]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """The rewards of a spec, in real processes, over this source as user.py."""
    every: list[Rewards] = []

    def make(source: str, *, world: Any = None, **spec: Any) -> Rewards:
        (tmp_path / "user.py").write_text(source, encoding="utf-8")
        around: dict[str, Any] = {
            "seed": 0,
            "log": EventLog(tmp_path / "log.jsonl", 1),
            "model_channel": tmp_path.joinpath,
        }
        every.append(open_rewards(RewardSpec(**({"entry": "user:score"} | spec)), tmp_path, world=world, **around))
        return every[-1]

    yield make
    for rewards in every:
        rewards.close()


# --- one completion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "one"),
    [
        (lambda completion, answer: 0, True),
        (lambda prompt, completion, **row: 0, True),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, True),
        (functools.partial(lambda completion, weight: 0, weight=1), True),
        (lambda completions, completion: 0, False),
        (lambda prompts, completions, **columns: 0, False),
        (lambda **columns: 0, False),
        (len, False),
    ],
)
def test_a_function_of_one_completion_is_known_by_the_name_of_its_parameter(function: Any, one: bool) -> None:
    assert scores_one(function) is one


def test_a_function_of_one_completion_gets_its_rows_columns_and_scores_in_order(opened: Opened) -> None:
    source = "def score(completion, answer):\n    return completion == answer\n"
    rewards = opened(source)
    assert rewards.score(asked("a", "b", "c", answer=["a", "x", "c"]), step=1).values == [1.0, 0.0, 1.0]


def test_the_row_is_what_two_stars_take_and_nothing_else(opened: Opened) -> None:
    source = "def score(prompt, completion, **row):\n    return {'reward': 1, 'keys': ','.join(sorted(row))}\n"
    scores = opened(source).score(asked("a", completion=["of the row"], answer=["x"]), step=1)
    assert scores.notes == {"reward/keys": ["answer"]}


def test_verls_compute_score_reads_its_words_from_the_columns(opened: Opened) -> None:
    source = (
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': 1, 'pred': solution_str + data_source}\n"
    )
    chat = [{"role": "assistant", "content": "4"}]
    columns = {"data_source": ["gsm"] * 2, "reward_model": [{"style": "rule", "ground_truth": "4"}] * 2}
    scores = opened(source).score(asked(chat, "5", **columns), step=1)
    assert scores.values == [1.0, 0.0]
    assert scores.components == {"reward": [1.0, 0.0], "reward/acc": [1.0, 1.0]}
    assert scores.notes == {"reward/pred": ["4gsm", "5gsm"]}
    assert opened(source).score(asked("7", answer=["7"], data_source=["x"]), step=1).values == [1.0]


def test_async_functions_of_one_completion_wait_at_the_same_time(opened: Opened) -> None:
    source = (
        "import asyncio\nasync def score(completion):\n"
        "    await asyncio.sleep(0.3 * (completion != 'slow') + 9 * (completion == 'slow'))\n    return len(completion)\n"
    )
    began_s = time.monotonic()
    scores = opened(source, time_limit_s=2).score(asked(*["ab"] * 10, "slow"), step=1)
    assert plain(scores.values) == [2.0] * 10 + [None]
    assert scores.timed_out == 1
    assert time.monotonic() - began_s < 3


def test_an_async_object_is_known_as_one() -> None:
    class Judge:
        async def __call__(self, completion: str) -> float:
            return 0.0

    assert is_async(Judge()) and is_async(functools.partial(Judge())) and not is_async(len)


def test_what_hangs_in_a_function_of_one_completion_costs_one_limit_and_its_neighbours_nothing(opened: Opened) -> None:
    source = "import time\ndef score(completion):\n    time.sleep(60 if completion == 'x' else 0)\n    return 1.0\n"
    began_s = time.monotonic()
    scores = opened(source, time_limit_s=1).score(asked("a", "b", "x", "c", "x", "d"), step=1)
    assert plain(scores.values) == [1.0, 1.0, None, 1.0, None, 1.0]
    assert scores.counts() == {"reward_timed_out": 2}
    assert time.monotonic() - began_s < 6


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core alone")
def test_a_slow_function_of_one_completion_gets_a_process_a_core_and_the_same_numbers(opened: Opened) -> None:
    source = (
        "import os, random, time\ndef score(completion, wait):\n    time.sleep(wait)\n"
        "    return {'reward': random.random(), 'pid': os.getpid()}\n"
    )
    rewards = opened(source)
    slow, quick = (asked(*"abcdef", wait=[wait] * 6) for wait in (0.2, 0.0))
    alone, together = rewards.score(slow, step=1), rewards.score(quick, step=1)
    assert len(set(alone.components["reward/pid"])) == 1 < len(set(together.components["reward/pid"]))
    assert alone.values == together.values
    assert len(set(alone.values)) == 6


def test_an_exception_about_one_completion_has_the_users_file_and_line(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(UserFailure, match="KeyError: 'b'") as caught:
        opened("def score(completion):\n    return {'a': 1}[completion]\n").score(asked("a", "b"), step=1)
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "user.py"), 2)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0]", r"reward 1 is a list \(\[1.0\]\), not a number"),
        ("{'acc': 1}", r'reward 1 is a dict without "reward" or "score" \(it has acc\)'),
        ("{'score': 'x'}", r"reward 1 is a str \('x'\), not a number"),
    ],
)
def test_what_is_no_score_of_one_completion_is_refused_by_its_index(
    returned: str, message: str, opened: Opened
) -> None:
    source = f"def score(completion):\n    return 0.0 if completion == 'a' else {returned}\n"
    with pytest.raises(UserFailure, match=message):
        opened(source).score(asked("a", "b"), step=1)


# --- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_function_may_log_and_know_the_step_if_it_asks_by_name(opened: Opened) -> None:
    source = (
        "def score(completions, log_metric, log_extra, trainer_state):\n"
        "    log_metric('letters', 3); log_metric('letters', 5)\n"
        "    log_extra('upper', [c.upper() for c in completions])\n"
        "    return [trainer_state.global_step for _ in completions]\n"
    )
    scores = opened(source).score(asked("a", "b"), step=8)
    assert (scores.values, scores.logged) == ([7.0, 7.0], {"letters": 4.0})
    assert scores.notes == {"reward/upper": ["A", "B"]}
    assert scores.metrics() == {"letters": 4.0}


def test_a_batch_function_that_takes_all_columns_gets_columns_alone(opened: Opened) -> None:
    source = "def score(completions, **columns):\n    return [len(columns)] * len(completions)\n"
    assert opened(source).score(asked("a", answer=["x"]), step=1).values == [3.0]  # prompts, completion_ids, answer


def test_log_extra_of_a_wrong_length_is_refused(opened: Opened) -> None:
    source = "def score(completions, log_extra):\n    log_extra('x', [1])\n    return [0, 0]\n"
    with pytest.raises(UserFailure, match="gave log_extra 1 values of 'x' for 2 completions"):
        opened(source).score(asked("a", "b"), step=1)


@pytest.mark.parametrize(
    "name", ["loss", "reward", "accuracy", "step", "kl", "reward/style", "environment_x", "eval_x"]
)
def test_a_metric_that_the_run_reports_itself_is_refused_by_name_with_the_users_line(name: str, opened: Opened) -> None:
    source = f"def score(completions, log_metric):\n    log_metric({name!r}, 1)\n    return [0, 0]\n"
    with pytest.raises(
        UserFailure, match=f"the run itself reports '{name}'; name it otherwise, as 'my_{name}'"
    ) as caught:
        opened(source).score(asked("a", "b"), step=1)
    assert caught.value.line == 2
    fine = source.replace(name, f"my_{name}")
    assert opened(fine).score(asked("a", "b"), step=1).logged == {f"my_{name}": 1.0}


@pytest.mark.parametrize(
    "change", ["completions.clear()", "completions.append('c')", "del completions[0]; answer.pop()"]
)
@pytest.mark.parametrize(("count", "fails"), [(2, False), (1, True), (3, True)])
def test_a_function_that_changes_its_lists_in_place_is_held_to_what_it_was_asked(
    change: str, count: int, fails: bool, opened: Opened
) -> None:
    source = f"def score(completions, answer):\n    {change}\n    return [1.0] * {count}\n"
    rewards, question = opened(source), asked("a", "b", answer=["x", "y"])
    if fails:
        with pytest.raises(UserFailure, match=f"it returned {count} rewards for 2 completions"):
            rewards.score(question, step=1)
    else:
        assert rewards.score(question, step=1).values == [1.0, 1.0]


def test_dicts_in_a_batch_keep_their_components_apart(opened: Opened) -> None:
    source = "def score(completions):\n    return [{'reward': 1, 'form': 0.5, 'why': 'ok'}, 2, None]\n"
    scores = opened(source).score(asked("a", "b", "c"), step=1)
    assert plain(scores.values) == [1.0, 2.0, None]
    assert plain(scores.components["reward/form"]) == [0.5, None, None]
    assert scores.notes == {"reward/why": ["ok", None, None]}
    assert scores.metrics() == {"reward/form": 0.5}


# --- several rewards ---------------------------------------------------------------------------------------------------

THREE = (
    "def exact(completion, answer): return completion == answer\n"
    "def short(completions): return [None if c == 'skip' else -len(c) for c in completions]\n"
    "def hidden(completion): return {'reward': 0.25, 'detail': 7}\n"
)
PARTS = {
    "exact": {"entry": "user:exact", "weight": 2.0},
    "short": {"entry": "user:short", "weight": 0.1},
    "hidden": {"entry": "user:hidden", "weight": 0.0},
}


def test_several_rewards_are_summed_by_weight_and_kept_apart(opened: Opened) -> None:
    scores = opened(THREE, entry=None, parts=PARTS).score(asked("ab", "skip", answer=["ab", "skip"]), step=1)
    assert scores.values == pytest.approx([2.0 - 0.2, 2.0])
    assert {name: plain(values) for name, values in scores.components.items()} == {
        "exact": [1.0, 1.0], "short": [-2.0, None], "hidden": [0.25, 0.25], "hidden/detail": [7.0, 7.0],
    }  # fmt: skip
    assert scores.metrics() == pytest.approx(
        {
            "reward/exact": 1.0, "reward/short": -2.0, "reward/hidden": 0.25, "reward/hidden/detail": 7.0,
            "reward_heldout_gap": (2.0 * 1.0 + 0.1 * -2.0) / 2.1 - 0.25,
        }
    )  # fmt: skip


def total_of(*answers: Answer, weights: tuple[float, ...]) -> float | None:
    names = [f"part{index}" for index in range(len(answers))]
    parts = {name: Answers([each]) for name, each in zip(names, answers, strict=True)}
    return plain(combined(parts, dict(zip(names, weights, strict=True))).values)[0]


def test_who_abstains_leaves_the_total_to_the_others_and_who_fails_leaves_none() -> None:
    assert total_of(Answer(1.0), Answer(None), weights=(0.5, 9.0)) == 0.5
    assert total_of(Answer(1.0), Answer(NAN), weights=(0.5, 9.0)) == 0.5
    assert total_of(Answer(None), Answer(NAN), weights=(1.0, 1.0)) is None
    assert total_of(Answer(1.0), Answer(None, timed_out=True), weights=(1.0, -1.0)) is None
    assert total_of(Answer(1.0), Answer(math.inf), weights=(1.0, 1.0)) is None
    assert total_of(Answer(1.0), Answer(None, timed_out=True), weights=(1.0, 0.0)) == 1.0
    assert total_of(Answer(None), Answer(3.0), weights=(1.0, 0.0)) is None


@pytest.mark.parametrize("values", [(1e308, 1e308), (-1e308, -1e308), (1e308, -1e308)])
def test_a_sum_that_no_float_holds_is_no_reward(values: tuple[float, float]) -> None:
    parts = {name: Answers([Answer(value)]) for name, value in zip("ab", values, strict=True)}
    assert plain(combined(parts, {"a": 1.0, "b": 1.0}).values) == [None if sum(values) else 0.0]
    assert plain(combined(parts, {"a": 10.0, "b": 10.0}).values) == [None]


def test_scores_of_several_calls_are_joined_with_what_one_of_them_lacks() -> None:
    first = Scores([1.0], {"a": [1.0]}, {"note": ["x"]}, {"a": 1.0}, {"m": 1.0}, abstained=1)
    second = Scores([NAN, 3.0], {"a": [NAN, 3.0], "a/b": [5.0, NAN]}, {}, {"a": 1.0}, {"m": 2.0}, timed_out=1)
    both = Scores.joined([first, second])
    assert plain(both.values) == [1.0, None, 3.0]
    assert plain(both.components["a/b"]) == [None, 5.0, None]
    assert both.notes == {"note": ["x", None, None]}
    assert (both.mean, both.logged, both.counts()) == (2.0, {"m": 1.5}, {"reward_abstained": 1, "reward_timed_out": 1})


def test_a_part_that_does_not_load_closes_those_that_did(opened: Opened) -> None:
    with pytest.raises(UserFailure, match="user has no 'gone'"):
        opened(THREE, entry=None, parts=PARTS | {"gone": {"entry": "user:gone"}})


def test_only_the_main_process_asks_and_all_have_its_answer(opened: Opened) -> None:
    class Other:
        is_main = False

        def once(self, make: Callable[[], Any]) -> Any:
            return "what the main process has"

    rewards = opened("raise SystemExit('nobody loads this')", world=Other())
    assert rewards.score(asked("a"), step=1) == "what the main process has"


# --- reasoning-gym -----------------------------------------------------------------------------------------------------


@pytest.fixture
def entry() -> dict[str, Any]:
    gym = pytest.importorskip("reasoning_gym")
    found: dict[str, Any] = gym.create_dataset("leg_counting", size=1, seed=1)[0]
    return found


def test_a_task_of_reasoning_gym_scores_with_its_own_scorer(opened: Opened, entry: dict[str, Any]) -> None:
    answer = entry["answer"]
    said = [answer, f"I count. <answer> {answer} </answer>", "none", f"It is {answer}"]
    rewards = opened("", entry="reasoning_gym:leg_counting", time_limit_s=30)
    columns = {"entry": [json.loads(json.dumps(entry)), json.dumps(entry), entry, entry]}
    values = rewards.score(asked(*said, **columns), step=1).values
    assert values[:3] == [1.0, 1.0, 0.0] and 0 < values[3] < 1
    assert rewards.score(asked(answer, answer=[answer]), step=1).values == [1.0]


def test_an_unknown_task_and_a_row_without_an_answer_say_what_there_is(opened: Opened, entry: dict[str, Any]) -> None:
    with pytest.raises(UserFailure, match=r"reasoning-gym has no task 'leg_count'; it has .*leg_counting"):
        opened("", entry="reasoning_gym:leg_count")
    rewards = opened("", entry="reasoning_gym:leg_counting", time_limit_s=30)
    with pytest.raises(UserFailure, match=r"the row has neither a column `entry`.* nor `answer`; it has solution"):
        rewards.score(asked("a", solution=["x"]), step=1)
