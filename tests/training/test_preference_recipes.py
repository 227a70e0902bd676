"""Whole runs of dpo, kto, orpo and reward: what they learn and report, and what becomes of data that do not fit."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.errors import InvalidData
from training_container.data import render_marked, render_pairs
from training_container.engine.presets import character_tokenizer
from training_container.rewards.model import ModelReward
from training_container.rewards.scores import Question

Box = Callable[..., Any]
CASES = Path(__file__).parents[1] / "cases"
LOG2 = math.log(2)

SORTED = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "max_length": 64}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo"},
    "dpo smoothed": {"type": "dpo", "label_smoothing": 0.1},
    "dpo ipo": {"type": "dpo", "loss": "ipo"},
    "dpo hinge": {"type": "dpo", "loss": "hinge"},
    "kto": {"type": "kto"},
    "orpo": {"type": "orpo"},
    "reward": {"type": "reward"},
    "reward centred": {"type": "reward", "center_coef": 0.1},
}
OF_PAIRS = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")} | {
    "logps/chosen", "logps/rejected"
}  # fmt: skip
METRICS = {
    "dpo": OF_PAIRS,
    "kto": {"kl", "rewards/chosen", "rewards/rejected"},
    "orpo": OF_PAIRS | {"nll_loss", "log_odds_ratio", "log_odds_chosen"},
    "reward": {"accuracy", "margin", "mean_reward"},
}


def pairs(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Digits in order (chosen) and in reverse (rejected)."""
    chance = random.Random(seed)
    drawn = ["".join(chance.choice("0123456789") for _ in range(4)) for _ in range(count)]
    return [
        {"prompt": f"{text}>", "chosen": "".join(sorted(text)) + ".", "rejected": "".join(sorted(text))[::-1] + "!"}
        for text in drawn
    ]


def as_chat(row: dict[str, str], *, with_prompt: bool) -> dict[str, Any]:
    """The row as messages, the prompt in a field of its own or as the beginning of both conversations."""
    asked = [{"role": "user", "content": row["prompt"]}]
    said = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    return {"prompt": asked} | said if with_prompt else {name: asked + answer for name, answer in said.items()}


def marked(count: int, *, good: Callable[[int], bool] = lambda index: index % 3 > 0) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if good(index) else "rejected"], "label": good(index)}
        for index, row in enumerate(pairs(count))
    ]


def a_run(make: Box, algorithm: str, settings: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A whole run that ends well."""
    box = make(algorithm=SORTED | ALGORITHMS[algorithm] | (settings or {}), **({"rows": pairs(24)} | changes))
    assert box.work() == 0, box.failure
    return box


def losses(box: Any) -> list[float]:
    return [event["loss"] for event in box.of("metrics")]


def notices(box: Any) -> str:
    return "\n".join(event["message"] for event in box.of("notice"))


# --- what is learned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("a_box", name) for name in ALGORITHMS), *(("a_lora_box", name) for name in METRICS)],
)
def test_held_out_loss_falls_and_accuracy_rises(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    box = a_run(request.getfixturevalue(kind), name, eval_rows=pairs(8, seed=1))
    before, after = box.of("eval")
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accuracy"] > max(0.5, before["eval_accuracy"])
    assert METRICS[name.split()[0]] <= box.of("metrics")[0].keys()
    last = box.steps[-1]
    assert box.manifest(last)["metrics"]["eval_accuracy_after"] == after["eval_accuracy"]


@pytest.mark.parametrize("kind", ["a_box", "a_lora_box"])
@pytest.mark.parametrize(("name", "start"), [("dpo", LOG2), ("dpo ipo", 25.0), ("dpo hinge", 1.0), ("kto", 0.5)])
def test_a_run_begins_at_its_reference(name: str, start: float, kind: str, request: pytest.FixtureRequest) -> None:
    """Log-ratios of 0: nothing has been learned, and nothing of it is preferred."""
    box = a_run(request.getfixturevalue(kind), name, {"max_train_steps": 1}, eval_rows=pairs(4, seed=1))
    assert losses(box)[0] == pytest.approx(start, abs=1e-4)
    assert box.of("eval")[0]["eval_loss"] == pytest.approx(start, abs=1e-4)


@pytest.mark.parametrize("name", ["dpo", "dpo ipo", "kto"])
def test_a_reference_asked_at_each_step_and_one_asked_beforehand_are_the_same(name: str, a_lora_box: Box) -> None:
    each_step, before = (
        a_run(a_lora_box, name, {"reference": reference}, name=reference, rows=pairs(8), eval_rows=pairs(4, seed=1))
        for reference in ("adapter_off", "precomputed")
    )
    assert losses(each_step) == pytest.approx(losses(before), abs=1e-5)
    assert [event["eval_loss"] for event in each_step.of("eval")] == pytest.approx(
        [event["eval_loss"] for event in before.of("eval")], abs=1e-5
    )


def test_without_an_adapter_the_reference_is_the_base_model_as_it_was(a_lora_box: Box) -> None:
    """All weights are trained; the loss of ties and of the first step is that of a log-ratio of 0."""
    box = a_run(a_lora_box, "dpo", model={"base": "tests/tiny", "adapter": "none"}, eval_rows=pairs(8, seed=1))
    before, after = box.of("eval")
    assert losses(box)[0] == pytest.approx(LOG2, abs=1e-6)
    assert after["eval_loss"] < before["eval_loss"] == pytest.approx(LOG2, abs=1e-6)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_conversations_with_a_prompt_of_their_own_and_without_give_the_same_run(name: str, a_lora_box: Box) -> None:
    with_prompt, without = (
        a_run(a_lora_box, name, {"epochs": 1}, name=str(given), rows=[as_chat(row, with_prompt=given) for row in pairs(8)])
        for given in (True, False)
    )  # fmt: skip
    assert losses(with_prompt) == losses(without)


# --- kto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("good", "missing"), [(True, "rewards/rejected"), (False, "rewards/chosen")])
def test_kto_learns_from_answers_of_one_kind_alone(good: bool, missing: str, a_box: Box) -> None:
    box = a_run(a_box, "kto", {"epochs": 4}, rows=marked(12, good=lambda _: good))
    assert not any(missing in event for event in box.of("metrics"))
    assert losses(box)[-1] < losses(box)[0]


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_kto_takes_batches_of_any_size_and_a_last_one_that_is_not_full(batch_size: int, a_box: Box) -> None:
    box = a_run(a_box, "kto", {"batch_size": batch_size, "epochs": 1}, rows=marked(7))
    assert len(losses(box)) == -(-7 // batch_size)
    assert all(math.isfinite(loss) for loss in losses(box))
    assert all(event["kl"] >= 0 for event in box.of("metrics"))


def test_kto_with_a_single_prompt_has_no_divergence_to_estimate(a_box: Box) -> None:
    rows = [{"prompt": "12>", "completion": text, "label": text < "3"} for text in ("12", "21", "31")]
    box = a_run(a_box, "kto", rows=rows)
    assert [event["kl"] for event in box.of("metrics")] == [0.0] * 2


def test_two_workers_make_the_same_run_of_kto(a_box: Box) -> None:
    """Batches of 3: one worker may have rows of one kind alone, and the divergence is of the whole step."""
    settings = {"batch_size": 3, "epochs": 1}
    data = {"rows": marked(7), "eval_rows": marked(4)}
    alone = a_run(a_box, "kto", settings, name="alone", **data)
    spec = {"compute": {"processes": 2}}
    together = a_box(name="together", algorithm=SORTED | ALGORITHMS["kto"] | settings, spec=spec, **data)
    done = together.supervise()
    assert done.returncode == 0, done.stderr
    for found, expected in zip(together.of("metrics"), alone.of("metrics"), strict=True):
        names = {"loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected"} & expected.keys()
        assert {name: found[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, abs=1e-5
        )
    evals = [[event["eval_loss"], event["eval_accuracy"]] for event in together.of("eval")]
    assert evals == [
        pytest.approx([event["eval_loss"], event["eval_accuracy"]], abs=1e-5) for event in alone.of("eval")
    ]


# --- the reward model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["preset", "all weights", "merged adapter"])
def test_the_model_that_reward_leaves_scores_alike_in_plain_transformers(
    kind: str, a_box: Box, a_lora_box: Box
) -> None:
    models = {
        "all weights": {"base": "tests/tiny", "adapter": "none"},
        "merged adapter": {"base": "tests/tiny", "rank": 4, "merge": True},
    }
    held_out = pairs(8, seed=1)
    box = (
        a_run(a_box, "reward", eval_rows=held_out)
        if kind == "preset"
        else a_run(a_lora_box, "reward", model=models[kind], eval_rows=held_out)
    )
    folder = box.tree.model / "merged" if kind == "merged adapter" else box.tree.model
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chosen, rejected = plain_scores(model, tokenizer, held_out)
    assert box.of("eval")[1]["eval_loss"] == pytest.approx(loss_of(chosen, rejected), abs=1e-5)
    as_reward = ModelReward(folder)
    for name, scores in (("chosen", chosen), ("rejected", rejected)):
        asked = Question([row["prompt"] for row in held_out], [row[name] for row in held_out], [], {})
        assert [answer.value for answer in as_reward.score(asked, step=1).each] == pytest.approx(scores, abs=1e-5)


def test_an_adapter_of_reward_scores_alike_in_plain_peft(a_lora_box: Box) -> None:
    held_out = pairs(8, seed=1)
    box = a_run(a_lora_box, "reward", eval_rows=held_out)
    path = box.tree.model / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    assert config["base_model_name_or_path"] == "tests/tiny"  # which here is a directory
    path.write_text(json.dumps(config | {"base_model_name_or_path": str(box.tree.channel("model"))}), "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(box.tree.model)
    model = AutoPeftModelForSequenceClassification.from_pretrained(
        box.tree.model, num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    scores = plain_scores(model, tokenizer, held_out)
    assert box.of("eval")[1]["eval_loss"] == pytest.approx(loss_of(*scores), abs=1e-5)


def plain_scores(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Of chosen and rejected, as anybody would ask a sequence classifier: a text at a time, an end token behind it."""

    def score(text: str) -> float:
        with torch.no_grad():
            scores_B_1 = model.eval()(**tokenizer(text + tokenizer.eos_token, return_tensors="pt")).logits
        assert scores_B_1.shape == (1, 1)
        return float(scores_B_1)

    chosen, rejected = ([score(row["prompt"] + row[name]) for row in rows] for name in ("chosen", "rejected"))
    return chosen, rejected


def loss_of(chosen: list[float], rejected: list[float]) -> float:
    return sum(math.log1p(math.exp(bad - good)) for good, bad in zip(chosen, rejected, strict=True)) / len(chosen)


# --- a loss of the user's own ----------------------------------------------------------------------------------------

OWN = """
import torch
from torch.nn.functional import logsigmoid

def same_as_dpo(logprobs, inputs):
    ratio = inputs.per_row(logprobs) - inputs.per_row(inputs.reference_logprobs_N)
    pairs = inputs.totals.rows / 2
    return -logsigmoid(0.1 * (ratio[0::2] - ratio[1::2])).sum() / pairs, {}

def by_label(logprobs, inputs):
    sign = 2 * inputs.label_B - 1
    return -(sign * torch.tanh(inputs.per_row(logprobs))).sum() / inputs.totals.rows, {"seen": inputs.label_B.sum()}
"""


def test_a_users_own_loss_that_is_dpos_gives_the_weights_of_dpo(a_lora_box: Box) -> None:
    same = a_run(a_lora_box, "dpo", name="same")
    own = a_run(a_lora_box, "dpo", name="own", code={"losses.py": OWN}, spec={"loss": {"entry": "losses:same_as_dpo"}})
    assert losses(own) == pytest.approx(losses(same), rel=1e-6)  # the same sum in another order
    theirs, ours = (load_file(box.tree.model / "adapter_model.safetensors") for box in (own, same))
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_a_users_own_loss_sees_the_labels_of_pairs(name: str, a_box: Box) -> None:
    assert [event["seen"] for event in own_run(name, a_box).of("metrics")] == [4] * 6


def test_a_users_own_loss_sees_the_labels_of_single_answers(a_box: Box) -> None:
    seen = [event["seen"] for event in own_run("kto", a_box, rows=marked(12)).of("metrics")]
    assert sum(seen) == 8


def own_run(name: str, make: Box, **changes: Any) -> Any:
    spec = {"loss": {"entry": "losses:by_label"}}
    return a_run(make, name, {"epochs": 1}, code={"losses.py": OWN}, spec=spec, **changes)


# --- C32: what does not fit ------------------------------------------------------------------------------------------


@pytest.fixture
def c32(tmp_path: Path) -> list[dict[str, str]]:
    out = tmp_path / "c32.jsonl"
    subprocess.run([sys.executable, CASES / "c32_dpo_long.py", out], check=True)
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def as_rows(values: list[dict[str, Any]]) -> list[Row]:
    return [Row(each, "c32.jsonl", line) for line, each in enumerate(values, 1)]


def test_each_answer_has_the_room_that_its_prompt_leaves_whatever_the_others_length(c32: list[Any]) -> None:
    tokenizer = character_tokenizer(["abcdefghijklmnopqrstuvwxyz "])
    found = render_pairs(as_rows(c32), tokenizer, 64)
    assert (len(found.pairs), found.dropped, found.cut, found.ties) == (3, 1, 2, 1)
    for pair, row in zip(found.pairs, [c32[0], c32[1], c32[3]], strict=True):
        prompt = len(row["prompt"])
        assert list(pair.chosen.tokens[:prompt]) == list(pair.rejected.tokens[:prompt])
        for example, answer in zip(pair.examples, (row["chosen"], row["rejected"]), strict=True):
            assert example.first_trained == prompt
            assert example.trained_tokens == min(len(answer) + 1, 64 - prompt)  # with its end token


def test_answers_marked_good_or_bad_have_the_same_room_and_so_have_the_mismatched(c32: list[Any]) -> None:
    found = render_marked(as_rows(c32[:3]), character_tokenizer(["abcdefghijklmnopqrstuvwxyz "]), 64)
    assert (len(found.rows), found.dropped) == (4, 2)
    assert all(1 <= len(each.example.tokens) <= 64 for each in found.rows)
    assert all(each.example.trained_tokens for each in found.rows)


@pytest.mark.parametrize("name", ["dpo", "dpo ipo", "kto", "orpo", "reward"])
def test_a_run_of_c32_leaves_out_what_has_no_room_says_so_and_is_finite(name: str, c32: list[Any], a_box: Box) -> None:
    box = a_run(a_box, name, {"batch_size": 1, "epochs": 1}, rows=c32[:3])
    count = 4 if name == "kto" else 2
    assert len(losses(box)) == count
    assert all(math.isfinite(value) for event in box.of("metrics") for value in event.values() if type(value) is float)
    assert "have no room after their prompt and are left out" in notices(box)
    assert "are cut to max_length 64, prompt included" in notices(box)


def test_a_row_whose_answers_are_the_same_is_refused_by_its_line(c32: list[Any], a_box: Box) -> None:
    box = a_box(algorithm=SORTED | {"type": "dpo"}, rows=c32)
    assert box.work() == 1
    assert "line 4: has the same chosen and rejected, so it prefers nothing" in box.failure["message"]


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_answers_that_are_the_same_once_cut_cost_log_2_pull_nowhere_and_are_told(name: str, a_box: Box) -> None:
    rows = [{"prompt": "p", "chosen": "same" * 20 + "a", "rejected": "same" * 20 + "b"}]
    box = a_run(a_box, name, {"epochs": 1}, rows=rows)
    assert losses(box) == [pytest.approx(LOG2, abs=1e-6)]
    assert box.of("metrics")[0]["grad_norm"] == pytest.approx(0.0, abs=1e-5)
    assert "1 pairs prefer nothing: chosen and rejected are the same within max_length" in notices(box)


@pytest.mark.parametrize("name", METRICS)
def test_a_run_in_which_no_prompt_leaves_room_fails(name: str, c32: list[Any], a_box: Box) -> None:
    box = a_box(algorithm=SORTED | ALGORITHMS[name], rows=c32[2:3])
    assert box.work() == 1
    assert "holds 0 usable rows: no prompt leaves room for an answer within max_length 64" in box.failure["message"]


# --- data ------------------------------------------------------------------------------------------------------------


def test_an_answer_of_which_the_template_shows_nothing_is_left_out() -> None:
    tokenizer = character_tokenizer(["abc"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    asked = [{"role": "user", "content": "ab"}]
    silent, speaks = ([{"role": "assistant", "content": text}] for text in ("", "c"))
    good, bad = ({"prompt": asked, "chosen": speaks, "rejected": answer} for answer in ([*speaks, *speaks], silent))
    found = render_pairs(as_rows([good, bad]), tokenizer, 64)
    assert (len(found.pairs), found.dropped) == (1, 1)


def test_conversations_whose_answers_are_to_different_prompts_are_refused_by_line() -> None:
    tokenizer = character_tokenizer(["abc"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    user, assistant = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    row = {"prompt": [user], "chosen": [assistant], "rejected": [user, assistant]}
    with pytest.raises(InvalidData, match="line 1: chosen and rejected do not both begin with the assistant's message"):
        render_pairs(as_rows([row]), tokenizer, 64)


def test_a_mismatched_answer_is_of_the_nearest_row_before_with_another_prompt() -> None:
    rows = as_rows(
        [
            {"prompt": prompt, "completion": said, "label": True}
            for prompt, said in (("a", "d"), ("a", "e"), ("b", "f"), ("c", "g"), ("c", "h"), ("a", "i"))
        ]
    )
    tokenizer = character_tokenizer(["abcdefghi"])
    texts = [tokenizer.decode(each.mismatched.tokens) for each in render_marked(rows, tokenizer, 64).rows]  # type: ignore[union-attr]
    assert [text.removesuffix("<eos>") for text in texts] == ["ah", "ah", "be", "cf", "cf", "ah"]
