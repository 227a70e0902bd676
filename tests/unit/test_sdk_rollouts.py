"""The rollout log as people see it: which lineage counts, the order, and a line a completion."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from microtuning_core.domain.layout import rollout_file, rollouts_prefix
from microtuning_sdk._rollouts import in_order, read_rollouts, standing
from microtuning_sdk.cli import _rollouts

RUN_ID = "default-sort-digits-0z3k8q5m1c7t"


def a_rollout(**changed: Any) -> dict[str, Any]:
    plain = {
        "step": 1, "index": 0, "row": "train.jsonl:1", "prompt": "4+4=", "completion": "8", "reward": 1.0,
        "components": {"reward": 1.0}, "notes": {}, "advantage": None, "truncated": False, "tokens": 1,
    }  # fmt: skip
    return plain | changed


class Objects:
    """Stands for the stage's bucket: `logs` is {lineage: {step: completions}}."""

    def __init__(self, logs: dict[int, dict[int, list[str]]]) -> None:
        self._bodies = {
            rollouts_prefix(RUN_ID, lineage) + rollout_file(step): "".join(
                json.dumps(a_rollout(step=step, completion=said)) + "\n" for said in completions
            ).encode()
            for lineage, steps in logs.items()
            for step, completions in steps.items()
        }

    def walk(self, prefix: str) -> Any:
        return [SimpleNamespace(key=k, bytes=len(v)) for k, v in self._bodies.items() if k.startswith(prefix)]

    def read(self, key: str) -> bytes | None:
        return self._bodies.get(key)


def said(objects: Objects, step: int | None = None) -> list[str]:
    found = read_rollouts(objects, RUN_ID, 2, step)  # type: ignore[arg-type]
    return [each["completion"] for each in found]


def test_the_newest_step_is_shown_and_any_other_on_request() -> None:
    objects = Objects({1: {1: ["a"], 9: ["b"], 10: ["c", "d"]}})
    assert said(objects) == ["c", "d"]
    assert (said(objects, 9), said(objects, 4)) == (["b"], [])
    assert said(Objects({})) == []


def test_what_was_said_before_a_rollback_counts_up_to_there_and_not_after() -> None:
    objects = Objects({1: {1: ["old 1"], 2: ["old 2"], 3: ["old 3"], 4: ["old 4"]}, 2: {3: ["new 3"]}})
    assert said(objects) == ["new 3"]
    assert (said(objects, 2), said(objects, 3), said(objects, 4)) == (["old 2"], ["new 3"], [])
    assert standing({1: {1: 9}, 2: {}}) == {1: 1}


def test_a_step_whose_lines_had_to_go_is_not_the_newest() -> None:
    assert said(Objects({1: {1: ["a"], 2: []}})) == ["a"]


def test_best_and_worst_come_first_and_what_was_not_scored_last() -> None:
    rewards = [0.5, None, 1.0, 0.5, -1.0]
    rollouts = [a_rollout(index=index, reward=reward) for index, reward in enumerate(rewards)]
    assert [each["index"] for each in in_order(rollouts, "best")] == [2, 0, 3, 4, 1]
    assert [each["index"] for each in in_order(rollouts, "worst")] == [4, 0, 3, 2, 1]
    assert in_order(rollouts, "written") == rollouts


def test_a_line_shows_every_part_and_the_texts_on_one_line() -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "4+4\n\x1b[2J"}]
    rollout = a_rollout(
        prompt=chat, completion=[{"role": "assistant", "content": "x" * 100}], reward=None, truncated=True,
        tokens=64, advantage=0.25,
        components={"exact": 1.0, "style": None},
    )  # fmt: skip
    names = _rollouts.components_of([a_rollout(), rollout])
    assert names == ["exact", "style"]
    assert _rollouts.cells(rollout, names) == [
        None, "1", None, "0.25", "64 cut", "train.jsonl:1", "system: be brief user: 4+4⏎\\x1b[2J", "x" * 80 + "… +20",
    ]  # fmt: skip
    assert _rollouts.cells(a_rollout(prompt="a" * 50), [])[-2] == "…" + "a" * 39


def test_what_was_said_several_times_to_a_prompt_and_scored_alike_is_shown_once() -> None:
    rollouts = [a_rollout(index=index, completion=said) for index, said in enumerate("abaa")]
    rollouts += [
        a_rollout(index=4, completion="a", reward=0.0),
        a_rollout(index=5, completion="a", row="train.jsonl:2"),
    ]
    shown = [(each["index"], times) for each, times in _rollouts.counted(rollouts)]
    assert shown == [(0, 3), (1, 1), (4, 1), (5, 1)]


def test_the_summary_counts_what_was_not_scored_and_what_was_cut_off() -> None:
    rollouts = [a_rollout(reward=reward, truncated=reward == 2) for reward in (0.0, 2.0, None)]
    assert _rollouts.in_short(rollouts) == (
        "step 1: 3 completions, reward 0 to 2, 1 on average, 1 not scored, 1 cut off"
    )


@pytest.mark.parametrize("flags", [["--best", "--worst"], ["--step", "0"], ["--limit", "none"]])
def test_a_mistake_in_the_options_ends_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from microtuning_sdk import cli

    with pytest.raises(SystemExit) as ended:
        cli.main(["runs", "rollouts", RUN_ID, *flags])
    assert ended.value.code == 2
    assert "usage: microtuning runs rollouts" in capsys.readouterr().err
