"""docs/rewards.md: its functions score as it says, and its specs are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from microtuning_core.domain.algorithms import REWARD_ENTRY, RewardSpec
from training_container.metrics import EventLog
from training_container.remote.lambda_reward import answers_in
from training_container.rewards import Question, open_rewards

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(
    ("name", "values", "components"),
    [
        ("exact", [1.0, 0.0], {}),
        ("close", [1.0, 0.5], {}),
        ("graded", [1.0, 0.1], {"reward/right": [1.0, 0.0], "reward/tidy": [1.0, 1.0]}),
    ],
)
def test_a_function_of_the_page_scores(name: str, values: list[float], components: Any, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    spec = RewardSpec(entry=f"my_rewards:{name}")
    question = Question(["2+2="] * 2, ["4", "5"], [[7]] * 2, {"answer": ["4", "4"]})
    log = EventLog(tmp_path / "log.jsonl", 1)
    with open_rewards(spec, tmp_path, seed=0, log=log, model_channel=tmp_path.joinpath) as rewards:
        scores = rewards.score(question, step=1)
    assert scores.values == values
    assert scores.components == {"reward": values} | components


def test_the_specs_of_the_page_are_valid() -> None:
    for text in blocks("yaml"):
        RewardSpec(**yaml.safe_load(text)["reward"])
    inline = [yaml.safe_load(text) for text in re.findall(r"`reward: (\{.*?\})`", PAGE)]
    assert len(inline) == 4 and all(re.match(REWARD_ENTRY, each["entry"].replace("…", "x")) for each in inline)


def test_the_request_and_the_answer_of_the_page_belong_together() -> None:
    request, answer = blocks("json")
    (found,) = answers_in(answer.encode(), json.loads(request))
    assert (found.value, found.components) == (1.0, {"accuracy": 1.0})
