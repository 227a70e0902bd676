"""Whole runs of each recipe on the tiniest model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from training_container.engine.layouts import BY_NAME

CASES = Path(__file__).parents[1] / "cases"
GRPO = {"type": "grpo", "batch_size": 16, "group_size": 4, "max_completion_tokens": 6}
Box, Rows = Callable[..., Any], Callable[..., Any]


def numbers_of(events: list[dict[str, Any]]) -> list[float]:
    return [value for event in events for value in event.values() if isinstance(value, float)]


# --- sft -------------------------------------------------------------------------------------------------------------


def test_sft_lowers_the_held_out_loss_and_leaves_a_model_that_loads(a_box: Box, rows: Rows) -> None:
    box = a_box(algorithm={"type": "sft", "batch_size": 16, "epochs": 10}, rows=rows(64), eval_rows=rows(16, seed=1))
    assert box.work() == 0
    before, after = (event["eval_loss"] for event in box.of("eval"))
    assert before == pytest.approx(math.log(15), abs=0.3)  # 10 digits, >, and 3 special tokens, nearly uniform
    assert after < before - 0.5
    final = box.manifest(40)
    assert (final["final"], final["metrics"]["eval_loss_before"], final["metrics"]["eval_loss_after"]) == (
        True,
        before,
        after,
    )
    assert box.progress["metrics"]["eval_after"]["eval_loss"] == after
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(box.tree.model),
        AutoTokenizer.from_pretrained(box.tree.model),
    )
    assert model.generate(**tokenizer("12>", return_tensors="pt"), max_new_tokens=3).shape[1] <= 6


def test_an_adapter_run_leaves_the_adapter_and_the_tokenizer(a_lora_box: Box, rows: Rows) -> None:
    box = a_lora_box(algorithm={"type": "sft", "batch_size": 8}, rows=rows(16))
    assert box.work() == 0
    assert {path.name for path in box.tree.model.iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
    }


def test_chat_rows_train_a_model_with_a_template(a_lora_box: Box) -> None:
    chat = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "ok"}]} for n in range(8)
    ]
    box = a_lora_box(algorithm={"type": "sft", "batch_size": 4, "epochs": 4}, rows=chat)
    assert box.work() == 0
    losses = [event["loss"] for event in box.of("metrics")]
    assert losses[-1] < losses[0]


def test_chat_rows_for_a_preset_end_the_run_by_file_and_line(a_box: Box) -> None:
    box = a_box(rows=[{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}])
    assert box.work() == 1
    assert box.failure == {
        "class": "user", "file": "train.jsonl", "line": 1,
        "message": "train.jsonl, line 1: holds chat messages, and this model has no chat template. "
                   "Give prompt and completion as text.",
    }  # fmt: skip


def test_a_run_whose_rows_all_lose_their_labels_fails_and_does_not_end_well(a_box: Box) -> None:
    row = json.loads((CASES / "c30_truncated.jsonl").read_text("utf-8").splitlines()[0])
    box = a_box(algorithm={"type": "sft", "max_length": 64}, rows=[row])
    assert box.work() == 1
    assert "0 usable rows: cut to max_length 64" in box.failure["message"]


def test_checkpoints_come_every_5_steps_and_at_the_end_of_each_epoch_and_2_are_kept(a_box: Box, rows: Rows) -> None:
    settings = {"type": "sft", "batch_size": 4, "epochs": 3}
    box = a_box(
        algorithm=settings, rows=rows(14), spec={"checkpoint": {"every_steps": 5, "every_epoch": True, "keep": 2}}
    )
    assert box.work() == 0
    assert [event["step"] for event in box.of("checkpoint")] == [4, 5, 8, 10, 12]
    assert box.checkpoints == ["step-10", "step-12"]
    assert (box.manifest(10)["final"], box.manifest(12)["final"]) == (False, True)


def test_max_train_steps_caps_the_epochs(a_box: Box, rows: Rows) -> None:
    box = a_box(algorithm={"type": "sft", "batch_size": 4, "epochs": 9, "max_train_steps": 5}, rows=rows(16))
    assert box.work() == 0
    assert box.steps == [1, 2, 3, 4, 5]
    assert box.progress["total_steps"] == 5


def test_the_rate_rises_over_its_warm_up_and_then_stays(a_box: Box, rows: Rows) -> None:
    settings = {
        "type": "sft",
        "batch_size": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 4,
        "max_train_steps": 6,
        "epochs": 2,
    }
    box = a_box(algorithm=settings, rows=rows(16))
    assert box.work() == 0
    assert [event["learning_rate"] for event in box.of("metrics")] == pytest.approx(
        [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3]
    )


def test_losses_that_are_never_finite_end_the_run_as_numerics_after_6_steps(
    a_box: Box, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "training_container.recipes.sft.cross_entropy",
        lambda logprobs, batch: (logprobs.sum() * math.nan, {}),
    )
    box = a_box(algorithm={"type": "sft", "batch_size": 4, "epochs": 9}, rows=rows(16))
    assert box.work() == 1
    assert box.failure["class"] == "numerics"
    assert "in 6 steps in a row" in box.failure["message"]
    assert {event["loss"] for event in box.of("metrics")} == {None}


def test_running_out_of_memory_is_said_as_memory(a_box: Box, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    monkeypatch.setitem(BY_NAME, "plain", too_much)
    box = a_box(rows=rows(16))
    assert box.work() == 1
    assert box.failure["class"] == "memory"


# --- grpo ------------------------------------------------------------------------------------------------------------


def test_grpo_raises_the_reward_of_shorter_completions(a_box: Box, rows: Rows) -> None:
    code = {"rewards.py": "def short(completions, **kw):\n    return [-float(len(c)) for c in completions]\n"}
    settings = {
        "type": "grpo",
        "batch_size": 64,
        "group_size": 8,
        "max_completion_tokens": 8,
        "epochs": 8,
        "learning_rate": 3e-3,
    }
    box = a_box(algorithm=settings, rows=rows(32), eval_rows=rows(8, seed=1), code=code,
                reward={"entry": "rewards:short", "success_at": 0.0})  # fmt: skip
    assert box.work() == 0
    rewards = [event["reward"] for event in box.of("metrics")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 1.0
    before, after = box.of("eval")
    assert (before["when"], after["when"]) == ("before", "after")
    assert after["eval_reward"] >= before["eval_reward"]
    final = box.manifest(32)["metrics"]
    assert final["eval_accuracy_after"] == after["eval_accuracy"]
    assert final["eval_reward_before"] == before["eval_reward"]
    first = box.of("metrics")[0]
    assert first["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["sampler_gap"] == pytest.approx(0.0, abs=1e-5)
    assert 0 < first["frac_truncated"] <= 1
    assert box.progress["tokens"]["sampled"] > box.progress["tokens"]["prefill"] > 0


def test_progress_adds_up_to_the_time_that_passed(a_box: Box, rows: Rows) -> None:
    box = a_box(algorithm=GRPO | {"epochs": 2}, rows=rows(16))
    assert box.work() == 0
    phases = box.progress["phase_ms"]
    assert set(phases) == {"load", "rollout", "reward", "update", "checkpoint", "idle"}
    assert phases["rollout"] > 0 < phases["update"]
    assert phases["idle"] < 0.5 * sum(phases.values())
    assert box.progress["longest_step_ms"] > 0


def test_a_constant_reward_makes_5_counted_steps_without_an_update_and_the_weights_stay(a_box: Box) -> None:
    rows = [json.loads(line) for line in (CASES / "c24_constant_groups.jsonl").read_text("utf-8").splitlines()]
    code = {"user.py": (CASES / "c24_reward_constant.py").read_text("utf-8")}
    settings = GRPO | {"epochs": 99, "max_train_steps": 5}
    box = a_box(algorithm=settings, rows=rows, code=code, reward={"entry": "user:constant"})
    untrained = a_box(
        name="untrained",
        algorithm=settings | {"max_train_steps": 1},
        rows=rows,
        code=code,
        reward={"entry": "user:constant"},
    )
    assert (box.work(), untrained.work()) == (0, 0)
    steps = box.of("metrics")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5]
    assert {event["trainable_groups"] for event in steps} == {0}
    assert {event["grad_norm"] for event in steps} == {0.0}
    assert all(map(math.isfinite, numbers_of(steps)))
    assert box.weights_sha256 == untrained.weights_sha256
    assert box.checkpoints[-1] == "step-5"
    assert "learned nothing" in box.of("notice")[-1]["message"]


def test_a_reward_that_wakes_up_at_its_third_call_moves_the_weights_from_step_3_on(a_box: Box) -> None:
    rows = [json.loads(line) for line in (CASES / "c24_constant_groups.jsonl").read_text("utf-8").splitlines()]
    code = {"user.py": (CASES / "c24_reward_constant.py").read_text("utf-8")}
    box = a_box(
        algorithm=GRPO | {"epochs": 4},
        rows=rows,
        code=code,
        reward={"entry": "user:wakes_up"},
        spec={"checkpoint": {"keep": 9}},
    )
    assert box.work() == 0
    assert [event["trainable_groups"] for event in box.of("metrics")] == [0, 0, 4, 4]
    weights = [
        (box.tree.checkpoints / f"step-{step}" / "model" / "model.safetensors").read_bytes() for step in (1, 2, 3, 4)
    ]
    first, second, third, fourth = (hashlib.sha256(data).hexdigest() for data in weights)
    assert first == second != third != fourth


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("[0.7] * len(completions)", "every completion got 0.7. Make the reward tell better from worse"),
        ("[None] * len(completions)", "no completion was scored: 16 abstained (None)"),
        ("[float(p) for p in prompts]", "completions of the same prompt all got the same"),
    ],
)
def test_a_reward_without_any_spread_ends_the_run_after_max_constant_steps_with_its_cause(
    reward: str, cause: str, a_box: Box
) -> None:
    code = {"rewards.py": f"def score(prompts, completions, **kw):\n    return {reward}\n"}
    settings = GRPO | {"epochs": 99, "max_constant_steps": 3}
    rows = [{"prompt": str(number / 10)} for number in range(4)]
    box = a_box(algorithm=settings, rows=rows, code=code, reward={"entry": "rewards:score"})
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert "no spread within any group for 3 steps in a row (up to step 3)" in box.failure["message"]
    assert cause in box.failure["message"]
    assert (box.steps, box.progress["step"]) == ([1, 2, 3], 3)


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("[None] * len(completions)", "5 abstained (None)"),
        ("[math.nan] * len(completions)", "5 not finite (NaN or infinite)"),
        ("[[None, math.inf][len(p) % 2] for p in prompts]", "2 abstained (None), 3 not finite (NaN or infinite)"),
        ("[time.sleep(60)]", "5 timed out"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_evaluation_that_scores_nothing_ends_the_run_with_its_cause(
    reward: str, cause: str, when: str, a_box: Box, rows: Rows
) -> None:
    calls_scored = 0 if when == "before" else 2  # the evaluation before, and the only step
    source = (
        "import math, os, time\nfrom pathlib import Path\nmarks = Path(os.environ['SM_OUTPUT_DATA_DIR'], 'marks')\n"
        "def score(prompts, completions):\n"
        "    made = len(marks.read_text()) if marks.exists() else 0\n    marks.write_text('x' * (made + 1))\n"
        f"    return list(map(len, completions)) if made < {calls_scored} else {reward}\n"
    )
    box = a_box(
        algorithm=GRPO | {"max_train_steps": 1},
        rows=rows(16),
        eval_rows=[{"prompt": "1" * length} for length in (1, 2, 3, 4, 5)],
        code={"rewards.py": source},
        reward={"entry": "rewards:score", "time_limit_s": 1},
    )
    box.environment = {"SM_OUTPUT_DATA_DIR": str(box.tree.output_data)}
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert f"rewards:score scored none of the 5 held-out completions: {cause}." in box.failure["message"]
    assert (box.steps, [event["when"] for event in box.of("eval")]) == (
        ([], []) if when == "before" else ([1], ["before"])
    )


def test_one_scored_row_is_an_evaluation(a_box: Box, rows: Rows) -> None:
    code = {"rewards.py": "def score(completions, **kw):\n    return [1.0] + [None] * (len(completions) - 1)\n"}
    box = a_box(
        algorithm=GRPO | {"max_train_steps": 1},
        rows=rows(16),
        eval_rows=rows(4, seed=2),
        code=code,
        reward={"entry": "rewards:score"},
    )
    assert box.work() == 0
    assert [(event["eval_reward"], event["eval_accuracy"]) for event in box.of("eval")] == [(1.0, 0.25)] * 2


def test_a_run_that_has_learned_everything_is_not_given_up(a_box: Box, rows: Rows) -> None:
    code = {"rewards.py": "def score(completions, **kw):\n    return [1.0] * len(completions)\n"}
    box = a_box(
        algorithm=GRPO | {"epochs": 2, "max_constant_steps": 2},
        rows=rows(16),
        code=code,
        reward={"entry": "rewards:score"},
    )
    assert box.work() == 0
    assert box.steps == list(range(1, 9))


def test_a_raising_reward_ends_the_run_with_the_users_file_and_line(a_box: Box, rows: Rows) -> None:
    code = {"rewards.py": "def score(completions, **kw):\n    return [int(c) / 0 for c in '12']\n"}
    box = a_box(algorithm=GRPO, rows=rows(16), code=code, reward={"entry": "rewards:score"})
    assert box.work() == 1
    assert box.failure == {
        "class": "user", "message": "The reward rewards:score: ZeroDivisionError: division by zero",
        "file": str(box.tree.code / "rewards.py"), "line": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("ValueError('half \\ud800')", r"ValueError: half \ud800"),
        ("type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "Mute: (its text cannot be had"),
    ],
)
def test_a_reward_that_raises_what_cannot_be_said_is_the_users_failure_all_the_same(
    raised: str, message: str, a_box: Box, rows: Rows
) -> None:
    code = {"rewards.py": f"def score(completions, **kw):\n    raise {raised}\n"}
    box = a_box(algorithm=GRPO, rows=rows(16), code=code, reward={"entry": "rewards:score"})
    assert box.work() == 1
    failure = box.failure
    assert (failure["class"], failure["file"], failure["line"]) == ("user", str(box.tree.code / "rewards.py"), 2)
    assert message in failure["message"]


def test_a_warm_start_is_a_phase_of_its_own_kept_as_checkpoint_0(a_box: Box, rows: Rows) -> None:
    warm_start = {"data": "s3://bucket/warm.jsonl", "steps": 20, "batch_size": 8}
    box = a_box(
        algorithm=GRPO | {"warm_start": warm_start},
        rows=rows(16),
        warm_rows=rows(64, seed=1),
        eval_rows=rows(4, seed=2),
        spec={"checkpoint": {"every_steps": 500, "keep": 9}},
    )
    assert box.work() == 0
    warm = [event["warm_loss"] for event in box.of("phase") if "warm_loss" in event]
    assert len(warm) == 2 and warm[1] < warm[0] < math.log(15)
    order = [event["event"] for event in box.events if event["event"] in ("checkpoint", "eval")]
    assert order == ["checkpoint", "eval", *["checkpoint"] * 3, "eval", "checkpoint"]  # 4 steps: one is saved each
    assert box.manifest(0)["metrics"] == {"warm_loss": pytest.approx(warm[1])}
    assert box.steps == [1, 2, 3, 4]


def test_chat_prompts_give_the_reward_message_lists(a_lora_box: Box) -> None:
    code = {"rewards.py": "def score(prompts, completions, **kw):\n    assert prompts[0][0]['role'] == 'user'\n"
                          "    return [float(len(c[0]['content'])) for c in completions]\n"}  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(4)]
    box = a_lora_box(algorithm=GRPO, rows=rows, code=code, reward={"entry": "rewards:score"})
    assert box.work() == 0
    assert 4 < box.of("metrics")[0]["reward"] <= 6


@pytest.mark.parametrize("change", [{"top_p": 0.8}, {"temperature": 0.5}, {"advantage": "group_mean"}])
def test_every_way_to_sample_begins_at_a_ratio_of_1(change: dict[str, Any], a_box: Box, rows: Rows) -> None:
    box = a_box(algorithm=GRPO | change | {"max_train_steps": 1}, rows=rows(16))
    assert box.work() == 0
    assert box.of("metrics")[0]["ratio"] == pytest.approx(1.0, abs=1e-4)


def test_every_recipe_of_the_registry_is_an_algorithm_of_the_spec() -> None:
    from microtuning_core.domain.algorithms import ALGORITHMS
    from training_container.recipes import RECIPES, load_recipe

    assert set(RECIPES) == set(ALGORITHMS)
    assert all(hasattr(load_recipe(name), "run_script" if name == "script" else "train") for name in RECIPES)
