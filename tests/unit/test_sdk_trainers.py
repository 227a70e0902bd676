"""What each trainer makes of its settings: rewards in every form, losses, environments and loops, packed together."""

from __future__ import annotations

from typing import Any

import boto3
import pytest

from microtuning_core.domain.errors import InvalidCode, InvalidData, InvalidSpec, RunWouldFail
from microtuning_core.domain.names import StackNames
from microtuning_sdk import (
    DistillationTrainer,
    DPOTrainer,
    Judge,
    KTOTrainer,
    LoopTrainer,
    ORPOTrainer,
    RewardTrainer,
    RLTrainer,
    SFTTrainer,
    Stage,
)
from microtuning_sdk._preflight import Preflight, preflight
from microtuning_sdk._rewards import reward_document

ROWS = [{"prompt": f"{number}>", "answer": str(number)} for number in range(8)]
PAIRS = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]


@pytest.fixture
def stage() -> Stage:
    return Stage(StackNames("local", "000000000000", "us-east-1"), boto3.Session(region_name="us-east-1"))


def exact(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def short(completion: str) -> float:
    return -len(completion) / 10


def loss(logprobs: Any, inputs: Any) -> Any:
    return -logprobs.sum(), {}


class Guess:
    def __init__(self, highest: int = 9) -> None:
        self.highest = highest

    def reset(self, prompt: str) -> str:
        return prompt

    def step(self, action: str) -> tuple[str, float, bool]:
        return "no", 0.0, False


def looked_at(trainer: RLTrainer, rows: Any = ROWS) -> Preflight:
    return preflight(trainer._draft(trainer._connected(), rows, None, None, None, None))


def level_of(found: Preflight, about: str) -> str:
    return next(each.level for each in found.findings if each.about == about)


@pytest.mark.parametrize(
    ("trainer", "kind"),
    [(DPOTrainer, "dpo"), (ORPOTrainer, "orpo"), (RewardTrainer, "reward"), (KTOTrainer, "kto")],
)
def test_pairs_train_every_preference_algorithm(stage: Stage, trainer: Any, kind: str) -> None:
    assert trainer("Transformer", stage=stage).check(PAIRS).algorithm.type == kind


def test_a_loss_by_its_name_is_a_setting_and_a_function_is_packed(stage: Stage) -> None:
    assert DPOTrainer("Transformer", loss="ipo", stage=stage).check(PAIRS).algorithm.loss == "ipo"
    own = DPOTrainer("Transformer", loss=loss, stage=stage).check(PAIRS)
    assert own.loss and own.loss.entry.endswith((":loss", "loss.pkl"))
    assert own.code


def test_a_loss_of_the_wrong_form_is_refused_by_what_it_takes(stage: Stage) -> None:
    with pytest.raises(InvalidCode, match=r"called with \(logprobs, inputs\)"):
        SFTTrainer("Transformer", loss=short, stage=stage).check([{"text": "a"}])


def test_several_rewards_keep_their_names_and_weights() -> None:
    document, pieces = reward_document([exact, (short, 0.1), (short, 0)])
    assert list(document["parts"]) == ["exact", "short", "short_2"]
    assert [part.get("weight") for part in document["parts"].values()] == [None, 0.1, 0]
    assert list(pieces) == [f"reward.parts.{name}.entry" for name in document["parts"]]


def test_rewards_that_lie_elsewhere_are_named_as_they_are() -> None:
    judge = Judge(base_url="https://x/v1", model="m", prompt="{completion}")
    document, pieces = reward_document({"gym": "reasoning_gym:leg_counting", "judge": (judge, 0.5)})
    assert document["parts"]["gym"] == {"entry": "reasoning_gym:leg_counting"}
    assert document["parts"]["judge"]["judge"]["base_url"] == "https://x/v1"
    assert document["parts"]["judge"]["weight"] == 0.5
    assert not pieces


def test_a_reward_a_loss_and_an_environment_travel_in_one_archive(stage: Stage) -> None:
    trainer = RLTrainer(
        "Transformer", reward_func=exact, loss=loss, environment=Guess, env_config={"max_steps": 3, "highest": 5},
        stage=stage,
    )  # fmt: skip
    spec = trainer.check(ROWS)
    assert spec.algorithm.type == "multi_turn"
    assert (spec.environment.max_steps, spec.environment.options) == (3, {"highest": 5})
    assert spec.reward and spec.reward.entry and spec.loss and spec.environment.entry


def test_an_environment_needs_no_reward_and_grpo_does(stage: Stage) -> None:
    assert RLTrainer("Transformer", environment=Guess, stage=stage).check(ROWS).reward is None
    with pytest.raises(InvalidSpec, match="grpo needs a reward"):
        RLTrainer("Transformer", stage=stage).check(ROWS)


def test_a_loop_is_checked_by_its_arguments(stage: Stage) -> None:
    def train(engine: Any, run: Any) -> None: ...

    spec = LoopTrainer(train, model_arch="Transformer", options={"k": 2}, stage=stage).check(ROWS)
    assert spec.algorithm.type == "custom"
    assert spec.algorithm.options == {"k": 2}
    with pytest.raises(InvalidCode, match=r"called with \(engine, run\)"):
        LoopTrainer(short, model_arch="Transformer", stage=stage).check(ROWS)


def test_a_teacher_of_the_hub_is_named(stage: Stage) -> None:
    trainer = DistillationTrainer(model="a/b-0.5B", teacher="a/b-1.5B", stage=stage)
    assert trainer.check(ROWS).algorithm.teacher.base == "a/b-1.5B"  # type: ignore[union-attr]


def test_a_number_of_rows_without_a_task_is_refused(stage: Stage) -> None:
    with pytest.raises(InvalidData, match="reasoning_gym"):
        RLTrainer("Transformer", reward_func=exact, stage=stage).check(5)


def test_preflight_tries_a_reward_on_rows_of_the_data(stage: Stage) -> None:
    found = looked_at(RLTrainer("Transformer", reward_func=exact, stage=stage))
    assert level_of(found, "reward") == "ok"
    assert "exact" in next(each.found for each in found.findings if each.about == "data.train")
    found.raise_if_broken()


@pytest.mark.parametrize(("recovery", "instead"), [("cheap", "fast"), ("fast", "cheap")])
def test_preflight_says_what_the_chosen_recovery_costs_and_what_the_other_would(
    stage: Stage, recovery: str, instead: str
) -> None:
    found = looked_at(RLTrainer("Transformer", reward_func=exact, stage=stage, compute={"recovery": recovery}))
    (line,) = [each.found for each in found.findings if each.about == "recovery"]
    assert line.startswith(f"{recovery}: on-demand at 0.115 USD an hour") and f". Instead {instead}: " in line


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda completions, answr: [0.0], "answr"),
        (lambda completions: [1.0], "rewards for"),
        (lambda completions: [float("nan")] * len(completions), "nan"),
        (lambda completions: [1 / 0], "ZeroDivisionError"),
    ],
)
def test_a_reward_that_would_end_the_run_fails_before_it(stage: Stage, reward: Any, says: str) -> None:
    with pytest.raises(RunWouldFail, match=says):
        looked_at(RLTrainer("Transformer", reward_func=reward, stage=stage)).raise_if_broken()


def test_rewards_that_never_differ_are_a_warning(stage: Stage) -> None:
    found = looked_at(RLTrainer("Transformer", reward_func=lambda completions: [0.5] * len(completions), stage=stage))
    assert level_of(found, "reward") == "warning"


def test_prompts_without_room_are_counted_and_all_of_them_end_the_run(stage: Stage) -> None:
    trainer = RLTrainer("Transformer", reward_func=exact, max_length=68, stage=stage)
    found = looked_at(trainer, [*ROWS, {"prompt": "9" * 40, "answer": "9"}])
    assert any("1 rows (11.1%) leave no room" in each.found for each in found.findings if each.level == "warning")
    with pytest.raises(RunWouldFail, match="leave no room"):
        looked_at(trainer, [{"prompt": "9" * 40, "answer": "9"}]).raise_if_broken()


def test_an_environment_is_begun_and_given_an_action(stage: Stage) -> None:
    found = looked_at(RLTrainer("Transformer", environment=Guess, stage=stage))
    assert level_of(found, "environment") == "ok"
