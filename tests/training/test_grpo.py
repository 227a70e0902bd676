"""Policy optimisation: what settings do to a rollout, whole runs, and exact resume inside a window of several updates."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microtuning_core.domain.algorithms import GrpoSettings
from microtuning_core.domain.spec import ModelSpec
from training_container.engine import OptimStep
from training_container.losses import Objective
from training_container.recipes.policy import objective_of, policy_update, with_logprobs
from training_container.reference import reference_of
from training_container.rewards.functions import RESERVED, RESERVED_PREFIXES
from training_container.rollouts import Rollout, Trajectory, length_penalty, minibatch, recall_or_draw, roll_out

GRPO = {"type": "grpo", "batch_size": 8, "group_size": 4, "max_completion_tokens": 6, "learning_rate": 1e-3}
WINDOW = GRPO | {"minibatches": 2, "passes": 2, "epochs": 2}
Box, Rows = Callable[..., Any], Callable[..., Any]
NAN = math.nan


def trace(box: Any) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step, as last reported."""
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in box.of("metrics")}


# --- parts ---------------------------------------------------------------------------------------------------------------


def a_group(*rewards: float, lengths: Sequence[int] | None = None, truncated: Sequence[bool] = ()) -> list[Trajectory]:
    """Completions of the prompt 5 6; their tokens tell them apart."""
    lengths = lengths or [2] * len(rewards)
    return [
        Trajectory(
            row=0, prompt=[5, 6], completion=[10 + at] * length, sampled=[True] * length, logprobs=[-0.5] * length,
            truncated=bool(truncated and truncated[at]), reward=reward,
        )
        for at, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]  # fmt: skip


class Recorder:
    """An engine that trains nothing and remembers what it was asked."""

    samples_exactly = True

    def __init__(self) -> None:
        self.examples: list[Any] = []
        self.totals: Any = None
        self.steps = 0

    def forward_backward(self, examples: list[Any], _: Any, *, temperature: float, totals: Any) -> dict[str, float]:
        self.examples, self.totals = examples, totals
        return {"loss": 1.0, "sampler_gap": 0.0}

    def optim_step(self, *_: Any, **__: Any) -> OptimStep:
        self.steps += 1
        return OptimStep(1.0, True)

    def forward(self, examples: list[Any], **_: Any) -> list[list[float]]:
        return [[-0.75] * example.trained_tokens for example in examples]


def a_run(**settings: Any) -> Any:
    """What the parts of a policy step need of a run: `more` gives rows from 100 on, forever."""
    defaults = {"batch_size": 8, "group_size": 4, "max_completion_tokens": 8}
    events: list[Any] = []
    run = SimpleNamespace(
        settings=GrpoSettings(**(defaults | settings)), memory=None, events=events, asked=[],
        spec=SimpleNamespace(seed=0, model=ModelSpec(arch="tiny-decoder"), reward=None),
        state=SimpleNamespace(step=0, update=0, health={}),
        log=SimpleNamespace(emit=lambda event, **fields: events.append(fields)),
        meter=SimpleNamespace(phase=lambda _: torch.no_grad(), count=lambda **_: None),
        learning_rate=lambda default: default, count_skipped=lambda *_: None,
    )  # fmt: skip

    def more(rows: int, batch: int) -> list[int]:
        begin = 100 + sum(run.asked)
        run.asked.append(batch)
        return list(range(begin, begin + batch))

    run.more = more
    return run


def test_a_rollout_comes_back_from_json_to_the_bit() -> None:
    logprobs = (-torch.rand(50, generator=torch.Generator().manual_seed(1)) * 40).tolist()
    one = Trajectory(
        3,
        [1, 2],
        [4] * 50,
        [True, False] * 25,
        logprobs,
        True,
        NAN,
        {"style": NAN, "exact": 0.1},
        {},
        logprobs,
        logprobs,
    )
    rollout = Rollout(
        [[one, one]], {"reward_abstained": 2}, {"reward/style": NAN}, "2 abstained", {"reward": NAN, "groups": 1}
    )
    text = json.dumps(rollout.as_json(), allow_nan=False)
    back = Rollout.from_json(json.loads(text))
    assert json.dumps(back.as_json(), allow_nan=False) == text
    found = back.groups[0][0]
    assert math.isnan(found.reward) and math.isnan(found.components["style"]) and math.isnan(back.metrics["reward"])
    for name in ("logprobs", "old_logprobs", "reference_logprobs"):
        assert torch.equal(torch.tensor(getattr(found, name)), torch.tensor(logprobs))


def test_each_pass_deals_out_every_group_once_in_an_order_of_its_own() -> None:
    run = a_run(minibatches=3, passes=2)
    rollout = Rollout([a_group(0.0, 1.0)] * 8)
    dealt = []
    for update in range(6):
        run.state.step = run.state.update = update
        dealt.append(minibatch(run, rollout))
    assert [len(part) for part in dealt] == [3, 3, 2, 3, 3, 2]
    assert sorted(chain(*dealt[:3])) == sorted(chain(*dealt[3:])) == list(range(8))
    assert dealt[:3] != dealt[3:]
    run.state.step, run.state.update = 6, 0  # the next window
    assert minibatch(run, rollout) != dealt[0]
    run.state.step, run.state.update = 4, 4  # a run resumed there
    assert minibatch(run, rollout) == dealt[4]


def test_rows_without_an_advantage_are_left_out_and_counted() -> None:
    engine, run = Recorder(), a_run()
    policy_update(engine, run, Rollout([a_group(1.0, 0.0, NAN, 0.5), a_group(0.5, 0.5, 0.5, 0.5)]), Objective())
    assert [example.tokens[2] for example in engine.examples] == [
        10,
        11,
    ]  # 0.5 is the mean of the three that are scored
    assert (engine.totals.tokens, engine.totals.rows) == (16, 8)


@pytest.mark.parametrize("objective", [Objective(kl_coef=0.1), Objective("dro")])
def test_rows_without_an_advantage_stay_where_they_have_a_gradient(objective: Objective) -> None:
    engine, run = Recorder(), a_run()
    policy_update(engine, run, Rollout([a_group(1.0, 0.0, NAN, 0.5), a_group(0.5, 0.5, 0.5, 0.5)]), objective)
    assert len(engine.examples) == 8
    assert {example.group for example in engine.examples} == {0, 1}


def test_no_step_is_made_where_no_group_has_any_spread_a_reference_or_not() -> None:
    engine, run = Recorder(), a_run()
    found = policy_update(engine, run, Rollout([a_group(0.5, 0.5), a_group(NAN, NAN)]), Objective(kl_coef=0.1))
    assert (found, engine.steps) == ({"loss": 0.0, "grad_norm": 0.0}, 0)


def test_truncated_completions_are_neither_trained_on_nor_counted_when_masked_and_still_are_the_others_measure() -> (
    None
):
    # Rewards 1, 0, 0: mean 1/3. The second, truncated, is left out of tokens (5 + 1) and rows, not of the mean.
    group = a_group(1.0, 0.0, 0.0, lengths=[5, 8, 1], truncated=[False, True, False])
    engine, run = Recorder(), a_run(mask_truncated=True, advantage="group_mean")
    policy_update(engine, run, Rollout([group]), Objective())
    assert [example.advantages for example in engine.examples] == pytest.approx([2 / 3, -1 / 3])
    assert (engine.totals.tokens, engine.totals.rows) == (6, 2)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (120, -1.0)]
)
def test_the_penalty_for_length_falls_from_0_to_minus_1_over_the_last_tokens(tokens: int, penalty: float) -> None:
    assert length_penalty(a_run(max_completion_tokens=100, overlong_penalty_tokens=40), tokens) == penalty


def test_without_its_setting_no_length_is_penalised() -> None:
    assert length_penalty(a_run(), 1000) == 0.0


# --- dynamic sampling ----------------------------------------------------------------------------------------------------


def drawing(run: Any, flat: Callable[[int], bool]) -> tuple[Rollout, list[list[int]]]:
    """A rollout of 4 groups where the rows that are `flat` have no spread, and what was drawn round by round."""
    rounds: list[list[int]] = []

    def draw(indices: Sequence[int]) -> Rollout:
        rounds.append(list(indices))
        rewards = [(0.5, 0.5) if flat(index) else (0.0, 1.0) for index in indices]
        groups = [[replace(one, row=row) for one in a_group(*pair)] for row, pair in zip(indices, rewards, strict=True)]
        return Rollout(groups, counts={"reward_abstained": 1}, means={"reward/style": len(rounds)})

    return roll_out(run, [0, 1, 2, 3], draw, rows=1000), rounds


def rows_of(rollout: Rollout) -> list[int]:
    return [group[0].row for group in rollout.groups]


def test_groups_that_teach_nothing_are_replaced_by_as_many_others() -> None:
    run = a_run(sampling_rounds=5)
    rollout, rounds = drawing(run, lambda row: row in (1, 3, 100))
    assert rounds == [[0, 1, 2, 3], [100, 101], [102]]
    assert rows_of(rollout) == [0, 2, 101, 102]


def test_sampling_ends_after_its_rounds_and_groups_without_spread_fill_the_places() -> None:
    run = a_run(sampling_rounds=3)
    rollout, rounds = drawing(run, lambda row: row != 2)
    assert [len(part) for part in rounds] == [4, 3, 3]
    assert rows_of(rollout) == [2, 0, 1, 3]
    assert (rollout.metrics["sampling_rounds"], rollout.metrics["empty_rounds"]) == (3, 2)
    assert (rollout.metrics["groups"], rollout.metrics["trainable_groups"]) == (10, 1)  # of all that were drawn
    assert rollout.metrics["reward_abstained"] == 3
    assert rollout.metrics["reward/style"] == pytest.approx((4 * 1 + 3 * 2 + 3 * 3) / 10)


def test_one_round_is_all_there_is_by_default() -> None:
    run = a_run()
    rollout, rounds = drawing(run, lambda row: row != 2)
    assert (len(rounds), run.asked, rows_of(rollout)) == (1, [], [2, 0, 1, 3])
    assert "sampling_rounds" not in rollout.metrics


def test_sampling_ends_where_the_data_does() -> None:
    run = a_run(sampling_rounds=50)
    run.more = lambda rows, batch: []
    assert len(drawing(run, lambda row: True)[1]) == 1


# --- log-probabilities that are asked again ------------------------------------------------------------------------------


def test_the_trainer_is_asked_again_about_tokens_that_another_program_drew_and_only_then() -> None:
    rollout = Rollout([a_group(0.0, 1.0), a_group(0.5, 0.5)])
    engine, run = Recorder(), a_run()
    assert with_logprobs(engine, run, rollout, Objective(), reference=None, loss=None) is rollout
    engine.samples_exactly = False
    found = with_logprobs(engine, run, rollout, Objective(), reference=None, loss=None)
    assert [each.old_logprobs for each in found.trajectories] == [[-0.75] * 2] * 2 + [
        []
    ] * 2  # the second teaches nothing
    everything = with_logprobs(engine, run, rollout, Objective("dro"), reference=engine.forward, loss=None)
    assert all(each.old_logprobs == each.reference_logprobs == [-0.75] * 2 for each in everything.trajectories)


def test_a_rollout_is_remembered_only_where_more_than_one_step_is_made_of_it() -> None:
    once, often = a_run(), a_run(passes=2)
    for run in (once, often):
        recall_or_draw(run, [0], lambda _: Rollout([a_group(0.0, 1.0)]))
    assert once.memory is None
    assert recall_or_draw(often, [0], lambda _: pytest.fail("drawn again")).groups == [a_group(0.0, 1.0)]


def test_without_a_coefficient_no_reference_is_loaded_or_asked() -> None:
    engine, run = Recorder(), a_run(kl_coef=0.0)
    assert reference_of(engine, run) is None  # type: ignore[arg-type]
    assert objective_of(engine, run).kl_coef == 0.0  # type: ignore[arg-type]


def test_every_setting_of_the_loss_reaches_it() -> None:
    given = {
        "loss": "gspo", "clip_low": 0.11, "clip_high": 0.22, "dro_beta": 0.33, "normalise": "constant", "kl_coef": 0.44,
        "kl_estimator": "k2", "off_policy_cap": 5.5,
    }  # fmt: skip
    engine, run = Recorder(), a_run(**given, max_completion_tokens=77)
    assert vars(objective_of(engine, run)) == given | {"max_tokens": 77, "off_policy_cap": None}  # type: ignore[arg-type]
    engine.samples_exactly = False
    assert objective_of(engine, run).off_policy_cap == 5.5  # type: ignore[arg-type]


# --- whole runs ----------------------------------------------------------------------------------------------------------


def test_a_foreign_sampler_is_corrected_and_its_gap_reported(
    a_box: Box, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training_container.engine.Engine.samples_exactly", property(lambda _: False))
    box = a_box(algorithm=GRPO | {"max_train_steps": 2, "passes": 2}, rows=rows(8))
    assert box.work() == 0
    first, second = box.of("metrics")
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["sampler_gap"] == second["sampler_gap"] == pytest.approx(0.0, abs=1e-5)
    assert second["ratio"] != 1.0


def test_a_full_model_is_held_to_a_frozen_copy_of_what_it_was(a_lora_box: Box, rows: Rows) -> None:
    settings = GRPO | {"kl_coef": 0.1, "learning_rate": 1e-2, "max_train_steps": 4, "epochs": 4}
    box = a_lora_box(model={"base": "tests/tiny", "adapter": "none"}, algorithm=settings, rows=rows(8))
    assert box.work() == 0
    divergence = [event["kl"] for event in box.of("metrics") if "kl" in event]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[-1] > 1e-3


def test_a_preset_has_nothing_to_be_held_to(a_box: Box, rows: Rows) -> None:
    box = a_box(algorithm=GRPO | {"kl_coef": 0.1}, rows=rows(8))
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert "begins from random weights. Leave kl_coef at 0" in box.failure["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "importance_sampling", "advantage": "leave_one_out"},
        {"loss": "cispo", "clip_high": 0.28, "advantage": "batch_std"},
        {"loss": "gspo", "normalise": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        {"loss": "dro", "normalise": "constant", "advantage": "group_mean"},
    ],
    ids=lambda change: change["loss"],
)
def test_every_member_of_the_family_learns_to_answer_briefly(change: dict[str, Any], a_box: Box, rows: Rows) -> None:
    code = {"rewards.py": "def short(completions, **kw):\n    return [-float(len(c)) for c in completions]\n"}
    settings = GRPO | {
        "batch_size": 32, "group_size": 8, "epochs": 6, "learning_rate": 3e-3, "max_completion_tokens": 8, "passes": 2,
    }  # fmt: skip
    box = a_box(algorithm=settings | change, rows=rows(16), code=code, reward={"entry": "rewards:short"})
    assert box.work() == 0
    rewards = [event["reward"] for event in box.of("metrics")]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.5


def test_completions_with_their_scores_are_in_the_rollout_log(a_box: Box, rows: Rows) -> None:
    reward = {"entry": None, "parts": {"sorted": {"entry": "rewards:share_sorted"},
                                       "held_out": {"entry": "rewards:length", "weight": 0.0}}}  # fmt: skip
    box = a_box(algorithm=GRPO | {"max_train_steps": 1}, rows=rows(8), reward=reward)
    assert box.work() == 0
    (file,) = (box.tree.checkpoints / "rollouts").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert len(lines) == 8
    assert lines[0]["components"].keys() == {"sorted", "held_out"}
    assert lines[0]["reward"] == lines[0]["components"]["sorted"]
    assert sum(line["advantage"] for line in lines[:4]) == pytest.approx(0.0, abs=1e-4)
    metrics = box.of("metrics")[0]
    assert metrics["reward/held_out"] == pytest.approx(sum(line["components"]["held_out"] for line in lines) / 8)
    assert metrics["reward_heldout_drift"] == 0.0


def test_no_name_that_the_loop_reports_is_free_for_a_reward_to_log(a_lora_box: Box, rows: Rows) -> None:
    source = (
        "def score(prompts, completions, log_metric, **kw):\n"
        "    log_metric('mine', 1)\n"
        "    return [None, float('inf'), *[float(len(c)) for c in completions[2:]]]\n"
    )
    reward = {
        "entry": None,
        "parts": {"one": {"entry": "rewards:score"}, "two": {"entry": "rewards:score", "weight": 0}},
    }
    settings = {"kl_coef": 0.1, "overlong_penalty_tokens": 1, "sampling_rounds": 2, "passes": 2, "max_train_steps": 2}
    box = a_lora_box(algorithm=GRPO | settings, rows=rows(8), eval_rows=rows(4, seed=1), reward=reward,
                     code={"rewards.py": source}, model={"base": "tests/tiny", "adapter": "none"})  # fmt: skip
    assert box.work() == 0
    reported = {name for each in (*box.of("metrics"), *box.of("eval")) for name in each} - {"when"}
    assert "mine" in reported
    assert {"kl", "length_penalty", "reward_abstained", "reward_not_finite", "reward_heldout_gap"} <= reported
    assert {name for name in reported if not name.startswith(RESERVED_PREFIXES)} - RESERVED == {"mine"}


def test_a_loss_of_the_users_sees_every_row_and_the_recipe_goes_on_as_ever(a_box: Box, rows: Rows) -> None:
    code = {
        "rewards.py": "def score(prompts, completions, **kw):\n"
                      "    return [float(i % 2) if i < 4 else 0.5 for i in range(len(completions))]\n",
        "losses.py": "def mine(logprobs, inputs):\n"
                     "    loss = -(logprobs * inputs.advantages_N).sum() / inputs.totals.tokens\n"
                     "    return loss, {'rows_seen': float(inputs.rows)}\n",
    }  # fmt: skip
    settings = GRPO | {"max_train_steps": 1}
    box = a_box(algorithm=settings, rows=rows(8), code=code, reward={"entry": "rewards:score"},
                spec={"loss": {"entry": "losses:mine"}})  # fmt: skip
    assert box.work() == 0
    assert box.of("metrics")[0]["rows_seen"] == 8.0


# --- exact resume --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "model"),
    [
        ("a_box", WINDOW, None),
        (
            "a_lora_box",
            WINDOW | {"kl_coef": 0.1, "top_p": 0.9, "sampling_rounds": 2},
            {"base": "tests/tiny", "rank": 4, "dropout": 0.2},
        ),
    ],
    ids=["full", "an adapter with dropout, a reference, old log-probabilities and further rounds"],
)
def test_a_run_stopped_after_every_single_step_ends_with_the_same_bits_though_a_window_is_4_updates(
    kind: str, settings: dict[str, Any], model: Any, rows: Rows, request: pytest.FixtureRequest
) -> None:
    make = request.getfixturevalue(kind)
    calm, stopped = (
        make(name=name, algorithm=settings, rows=rows(4), **({"model": model} if model else {}))
        for name in ("calm", "stopped")
    )
    assert calm.work() == 0
    assert calm.steps == list(range(1, 9))  # 2 rollouts of 4 prompts, 4 updates each
    for step in range(1, 8):
        assert stopped.work(stop=lambda: True) == 128 + signal.SIGTERM
        assert stopped.steps[-1] == step
    assert stopped.work() == 0
    assert stopped.steps == calm.steps
    assert trace(stopped) == trace(calm)
    assert stopped.weights_sha256 == calm.weights_sha256


# It waits for the checkpoint that is being written beside the training: what a kill loses otherwise is another test's.
KILLS_THE_WORKER_AT_CALL_2 = """
import os, signal, time
from pathlib import Path

def score(completions, answer, **kw):
    calls = Path(os.environ["MARKS"])
    made = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(made))
    if made == 2:
        while not Path(os.environ["MICROTUNING_ML_ROOT"], "checkpoints/step-3/manifest.json").exists():
            time.sleep(0.002)
        os.kill(os.getppid(), signal.SIGKILL)
    return [sum(x == y for x, y in zip(c, a)) / len(a) - abs(len(c) - len(a)) / 9 for c, a in zip(completions, answer)]
"""


def test_a_worker_killed_in_its_second_rollout_goes_on_inside_the_first_to_the_same_bits(
    a_box: Box, rows: Rows, tmp_path: Path
) -> None:
    """Step 3 of 4 of the first window was kept, with the rollout; the reward is not asked about it again."""
    spec = {"checkpoint": {"every_steps": 3, "every_epoch": False, "keep": 9}}
    calm, killed = (
        a_box(name=name, algorithm=WINDOW, rows=rows(4), spec=spec, reward={"entry": "rewards:score"},
              code={"rewards.py": KILLS_THE_WORKER_AT_CALL_2.replace("made == 2", f"made == {call}")})
        for name, call in (("calm", 0), ("killed", 2))
    )  # fmt: skip
    for box in (calm, killed):
        box.environment = {"MARKS": str(tmp_path / f"marks-{box.tree.root.name}")}
    assert calm.work() == 0
    done = killed.supervise()
    assert done.returncode == 0, done.stderr
    assert killed.steps == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert (tmp_path / "marks-killed").read_text() == "3"  # two rollouts, and the one that was killed
    assert trace(killed) == trace(calm)
    assert killed.weights_sha256 == calm.weights_sha256
