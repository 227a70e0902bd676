"""Distillation as whole runs: a student comes closer to its teacher, exactly resumed, and tokens must mean the same."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Box, Rows = Callable[..., Any], Callable[..., Any]
STUDENT = {"base": "tests/tiny", "adapter": "none"}
DISTIL = {
    "type": "distillation", "teacher": {"base": "tests/teacher"}, "batch_size": 32, "max_completion_tokens": 6,
    "learning_rate": 1e-3, "max_grad_norm": 1.0,
}  # fmt: skip


def make_teacher(folder: Path, student: Path) -> None:
    """The student's shape with a mind of its own: other weights, and answers that are far from uniform."""
    model = AutoModelForCausalLM.from_pretrained(student)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(student).save_pretrained(folder)


@pytest.fixture
def a_pair(a_lora_box: Box) -> Box:
    """A box with a student to train and, in its channel, a teacher."""

    def make(**changes: Any) -> Any:
        box = a_lora_box(**({"model": STUDENT, "algorithm": DISTIL} | changes))
        make_teacher(box.tree.channel("teacher"), box.tree.channel("model"))
        return box

    return make


def test_a_student_comes_closer_to_its_teacher_on_prompts_it_has_not_seen(a_pair: Box, rows: Rows) -> None:
    box = a_pair(rows=rows(64), eval_rows=rows(32, seed=1), algorithm=DISTIL | {"epochs": 10})
    assert box.work() == 0
    before, after = (event["eval_loss"] for event in box.of("eval"))
    assert 0 < after < 0.7 * before
    first = box.of("metrics")[0]
    assert first["loss"] == pytest.approx(first["reverse_kl"], abs=1e-5)  # ratio 1: the loss is the divergence itself
    assert first["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["sampler_gap"] == pytest.approx(0.0, abs=1e-5)
    final = box.manifest(20)["metrics"]
    assert (final["eval_loss_before"], final["eval_loss_after"]) == (before, after)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(a_lora_box: Box, rows: Rows) -> None:
    box = a_lora_box(model=STUDENT, algorithm=DISTIL | {"max_train_steps": 1}, rows=rows(8), eval_rows=rows(8, seed=1))
    AutoModelForCausalLM.from_pretrained(box.tree.channel("model")).save_pretrained(box.tree.channel("teacher"))
    AutoTokenizer.from_pretrained(box.tree.channel("model")).save_pretrained(box.tree.channel("teacher"))
    assert box.work() == 0
    assert box.of("eval")[0]["eval_loss"] == pytest.approx(0.0, abs=1e-5)
    assert box.of("metrics")[0]["grad_norm"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("model", [STUDENT, {"base": "tests/tiny", "rank": 4, "dropout": 0.1}], ids=["full", "adapter"])
def test_a_distillation_stopped_after_every_step_ends_with_the_same_bits(model: Any, a_pair: Box, rows: Rows) -> None:
    settings = DISTIL | {"batch_size": 8, "group_size": 2}
    calm, stopped = (
        a_pair(name=name, rows=rows(12), eval_rows=rows(4, seed=1), algorithm=settings, model=model)
        for name in ("calm", "stopped")
    )
    assert calm.work() == 0
    for _ in range(2):
        assert stopped.work(stop=lambda: True) == 128 + signal.SIGTERM
    assert stopped.work() == 0
    assert stopped.steps == calm.steps == [1, 2, 3]
    assert stopped.weights_sha256 == calm.weights_sha256
    assert [event["eval_loss"] for event in stopped.of("eval")] == [event["eval_loss"] for event in calm.of("eval")]


def test_the_evaluation_draws_with_the_same_numbers_and_leaves_the_training_as_it_is(a_pair: Box, rows: Rows) -> None:
    settings = DISTIL | {"learning_rate": 1e-12}
    with_eval = a_pair(name="with", rows=rows(64), eval_rows=rows(16, seed=1), algorithm=settings)
    without = a_pair(name="without", rows=rows(64), algorithm=settings)
    assert (with_eval.work(), without.work()) == (0, 0)
    before, after = (event["eval_loss"] for event in with_eval.of("eval"))
    assert before == pytest.approx(after, abs=1e-6)
    reverse_kl = [[event["reverse_kl"] for event in box.of("metrics")] for box in (with_eval, without)]
    assert reverse_kl[0] == reverse_kl[1]


def test_a_teacher_of_other_tokens_is_refused_with_the_first_that_differs(a_pair: Box, rows: Rows) -> None:
    from training_container.engine.presets import character_tokenizer

    box = a_pair(rows=rows(8))
    character_tokenizer(["0123456789>"]).save_pretrained(box.tree.channel("teacher"))
    assert box.work() == 1
    assert box.failure["class"] == "user"
    message = box.failure["message"]
    assert "The teacher 'tests/teacher' and the student have different vocabularies" in message
    assert "'\\n' is number 3 for the student, unknown for the teacher" in message
    assert "take a teacher of the student's family" in message


@pytest.mark.parametrize(
    ("which", "more", "message"),
    [
        ("teacher", -4, r"has \d+ tokens, and the tokenizer has the token \d+\. Take one whose vocabulary"),
        ("model", 640, r"has \d+ tokens, and the trained model drew the token \d+\. Take one whose vocabulary"),
    ],
    ids=["a teacher with fewer tokens than the tokenizer", "a student whose head is padded"],
)
def test_a_token_that_the_teacher_does_not_have_is_the_users(
    which: str, more: int, message: str, a_pair: Box, rows: Rows
) -> None:
    box = a_pair(rows=rows(8), algorithm=DISTIL | {"max_train_steps": 1, "batch_size": 8})
    folder = box.tree.channel(which)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + more)
    model.save_pretrained(folder)
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert re.search(message, box.failure["message"])


def test_a_teacher_whose_head_is_padded_grades_as_ever(a_pair: Box, rows: Rows) -> None:
    box = a_pair(rows=rows(8), algorithm=DISTIL | {"max_train_steps": 1, "batch_size": 8})
    folder = box.tree.channel("teacher")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 64)
    model.save_pretrained(folder)
    assert box.work() == 0
    assert box.of("metrics")[0]["reverse_kl"] > 0
