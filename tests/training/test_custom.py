"""A user's own loss in a recipe, and a user's own loop: what works, and whose fault it is when it does not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from training_container.custom_code import checked
from training_container.user_code import Refusal

Box, Rows = Callable[..., Any], Callable[..., Any]
DOCS = Path(__file__).parents[2] / "docs"
SFT = {"type": "sft", "batch_size": 4}
CUSTOM = {"type": "custom", "entry": "loop:train", "batch_size": 4}


@pytest.fixture(autouse=True)
def the_users_modules_end_with_the_test() -> Iterator[None]:
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name in {"losses", "loop"} & (sys.modules.keys() - modules):
        del sys.modules[name]


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (1.0, "returned a float; return a pair"),
        ((1.0, {}), "returned a float as the loss"),
        ((torch.ones(3, requires_grad=True), {}), r"returned a loss of shape \[3\]; return one number"),
        ((torch.ones((), dtype=torch.long), {}), "returned a loss of type torch.int64"),
        ((torch.ones(()), {}), "a loss without a gradient"),
        ((torch.ones((), requires_grad=True), None), "returned a NoneType as metrics"),
        ((torch.ones((), requires_grad=True), {"kl": torch.ones(2)}), r"a tensor of shape \[2\] as the metric 'kl'"),
        ((torch.ones((), requires_grad=True), {"loss": 1.0}), "named a metric 'loss'"),
        ((torch.ones((), requires_grad=True), {3: 1.0}), "named a metric 3"),
    ],
)
def test_a_loss_of_another_form_is_refused_in_words(answer: Any, why: str) -> None:
    with pytest.raises(Refusal, match=why):
        checked(answer)


def test_a_list_a_loss_of_shape_1_and_plain_numbers_as_metrics_are_taken() -> None:
    loss, metrics = checked([torch.ones(1, requires_grad=True), {"a": 2, "b": torch.tensor([3.0])}])
    assert (loss.shape, float(metrics["a"]), float(metrics["b"])) == ((), 2.0, 3.0)


def examples_of(page: str) -> dict[str, str]:
    """The Python blocks of a page, by the file name in their first line."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    return dict(blocks)


SAME = """
def same(logprobs, inputs):
    assert inputs.target_N.shape == logprobs.shape
    return -logprobs.sum() / inputs.totals.tokens, {"rows": inputs.label_B.numel() / inputs.totals.rows}
"""


def with_loss(a_box: Box, rows: Rows, source: str, entry: str = "losses:same", **changes: Any) -> Any:
    return a_box(algorithm=SFT, rows=rows(16), code={"losses.py": source}, spec={"loss": {"entry": entry}}, **changes)


def test_a_loss_that_is_the_recipes_own_gives_its_bits_and_its_metrics_are_reported(a_box: Box, rows: Rows) -> None:
    box, same = with_loss(a_box, rows, SAME, name="mine"), a_box(name="sft", algorithm=SFT, rows=rows(16))
    assert (box.work(), same.work()) == (0, 0)
    assert box.weights_sha256 == same.weights_sha256
    assert {event["rows"] for event in box.of("metrics")} == {1.0}


def test_the_loss_of_the_docs_trains_and_evaluation_stays_the_recipes(a_box: Box, rows: Rows) -> None:
    source = examples_of("custom.md")["losses.py"]
    box = with_loss(a_box, rows, source, "losses:focal", eval_rows=rows(4, seed=1))
    assert box.work() == 0
    before, after = box.of("eval")
    assert after["eval_loss"] < before["eval_loss"]
    assert all(0 <= event["sure"] <= 1 for event in box.of("metrics"))


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("def same(logprobs, inputs):\n    raise ValueError('no')\n", "The loss losses:same: ValueError: no", 2),
        ("\ndef same(logprobs, inputs):\n    return 1.0\n", "The loss losses:same returned a float; return a pair", 2),
    ],
)
def test_what_a_loss_does_wrong_is_the_users_with_file_and_line(
    a_box: Box, rows: Rows, source: str, message: str, line: int
) -> None:
    box = with_loss(a_box, rows, source)
    assert box.work() == 1
    assert (box.failure["class"], box.failure["line"]) == ("user", line)
    assert box.failure["message"].startswith(message)
    assert box.failure["file"] == str(box.tree.code / "losses.py")


def test_a_loss_that_is_never_finite_ends_the_run_as_numerics(a_box: Box, rows: Rows) -> None:
    nan = "def same(logprobs, inputs):\n    return logprobs.sum() * float('nan'), {}\n"
    box = a_box(algorithm=SFT, rows=rows(32), code={"losses.py": nan}, spec={"loss": {"entry": "losses:same"}})
    assert box.work() == 1
    assert box.failure["class"] == "numerics"
    assert len(box.steps) < 8


# --- loops -----------------------------------------------------------------------------------------------------------


LOOP = """
from training_container.api import losses, render_supervised

def train(engine, run):
    examples = render_supervised(run.rows["train"], engine.tokenizer, run.settings.max_length).examples
    for indices in run.steps(rows=len(examples), batch=run.settings.batch_size):
        batch = [examples[index] for index in indices]
        metrics = engine.forward_backward(batch, losses.cross_entropy)
        taken = engine.optim_step(run.learning_rate(run.settings.options["rate"]), max_grad_norm=1.0)
        run.end_step({**metrics, "grad_norm": taken.grad_norm}, tokens=sum(e.trained_tokens for e in batch))
"""


def with_loop(a_box: Box, rows: Rows, source: str, **changes: Any) -> Any:
    algorithm = CUSTOM | {"options": {"rate": 3e-3}} | changes.pop("algorithm", {})
    return a_box(algorithm=algorithm, rows=rows(16), code={"loop.py": source}, **changes)


def test_a_loop_that_is_sft_gives_the_bits_of_sft(a_box: Box, rows: Rows) -> None:
    box = with_loop(a_box, rows, LOOP, name="loop")
    same = a_box(name="sft", algorithm=SFT, rows=rows(16))
    assert (box.work(), same.work()) == (0, 0)
    assert box.steps == [1, 2, 3, 4]
    assert [event["loss"] for event in box.of("metrics")] == [event["loss"] for event in same.of("metrics")]
    assert box.weights_sha256 == same.weights_sha256


def test_a_stopped_loop_goes_on_to_the_same_bits(a_box: Box, rows: Rows) -> None:
    whole, stopped = (with_loop(a_box, rows, LOOP, name=name) for name in ("whole", "stopped"))
    assert whole.work() == 0
    assert stopped.work(stop=lambda: bool(stopped.steps) and stopped.steps[-1] == 2) == 143
    assert stopped.work() == 0
    assert stopped.steps == [1, 2, 3, 4]
    assert stopped.weights_sha256 == whole.weights_sha256


def test_a_loop_without_steps_keeps_its_model_and_the_log_says_so(a_box: Box, rows: Rows) -> None:
    box = with_loop(a_box, rows, "def train(engine, run):\n    pass\n")
    assert box.work() == 0
    assert box.manifest(0)["final"]
    assert (box.tree.model / "config.json").is_file()
    assert any("never called run.end_step" in event["message"] for event in box.of("notice"))


def test_a_loop_that_counts_its_own_steps_is_kept_at_the_last(a_box: Box, rows: Rows) -> None:
    own = "def train(engine, run):\n    for _ in range(3):\n        run.end_step({'x': 1.0}, tokens=0)\n"
    box = with_loop(a_box, rows, own)
    assert box.work() == 0
    assert (box.steps, box.manifest(3)["final"]) == ([1, 2, 3], True)


ASKS = """
from training_container.api import Sampling, open_reward, question_about, render_prompts

def train(engine, run):
    prompts, _ = render_prompts(run.rows["train"], engine.tokenizer, 100)
    with open_reward(run) as reward:
        for indices in run.steps(rows=len(prompts), batch=run.settings.batch_size):
            chosen = [prompts[index] for index in indices]
            groups = engine.sample([prompt.tokens for prompt in chosen], Sampling(3), group_size=2)
            scores = reward.score(question_about(engine.tokenizer, chosen, groups), step=run.state.step + 1)
            run.end_step({"asked": len(scores.values), "reward": scores.mean}, tokens=0)
"""


API = "from training_container.api import Example, Sampling\ndef train(engine, run):\n"


def test_a_loop_may_ask_the_reward_of_the_spec(a_box: Box, rows: Rows) -> None:
    lengths = "def length(completion_ids, **kw):\n    return [float(len(ids)) for ids in completion_ids]\n"
    box = with_loop(a_box, rows, ASKS, reward={"entry": "rewards:length"})
    (box.tree.channel("code") / "rewards.py").write_text(lengths, encoding="utf-8")
    assert box.work() == 0
    assert {event["asked"] for event in box.of("metrics")} == {8}
    assert all(1 <= event["reward"] <= 3 for event in box.of("metrics"))


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("def train(engine, run):\n    x = 1\n    raise ValueError('not today')\n", "ValueError: not today", 3),
        ("def train(engine, run):\n    engine.sample(None, None)\n", "TypeError", 2),
        (API + "    engine.sample([[]], Sampling(2))\n", "ValueError: sample: prompts[0] is empty", 3),
        (API + "    engine.sample([[3]], Sampling(0))\n", "ValueError: Sampling: max_new_tokens is 0", 3),
        (API + "    Example([3, 4, 5], [False, True])\n", "ValueError: Example: trained has 2 flags for 3 tokens", 3),
        ("import nothing_of_the_kind\n", "ModuleNotFoundError", 1),
        ("def train(engine, run):\n    x = = 1\n", "SyntaxError", 2),
    ],
)
def test_what_a_loop_raises_is_the_users_with_file_and_line(
    a_box: Box, rows: Rows, source: str, message: str, line: int
) -> None:
    box = with_loop(a_box, rows, source)
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert box.failure["message"].startswith("The loop loop:train: ")
    assert message in box.failure["message"]
    assert (box.failure["file"], box.failure["line"]) == (str(box.tree.code / "loop.py"), line)


def test_a_pickled_loop_runs_and_its_error_names_the_line_it_was_written_at(a_box: Box, rows: Rows) -> None:
    def loop(engine: Any, run: Any) -> None:
        run.end_step({"options": run.settings.options["rate"]}, tokens=0)
        raise KeyError("missing")

    box = with_loop(a_box, rows, "", algorithm={"entry": "pickle:loop.pkl"})
    (box.tree.channel("code") / "loop.pkl").write_bytes(cloudpickle.dumps(loop))
    (box.tree.channel("code") / "loop.pkl.json").write_text('{"name": "loop", "file": "mine.py"}', encoding="utf-8")
    assert box.work() == 1
    assert box.of("metrics")[0]["options"] == 3e-3
    assert box.failure["message"] == "The loop loop (mine.py): KeyError: 'missing'"
    assert box.failure["file"] == "mine.py"
    assert box.failure["line"] == loop.__code__.co_firstlineno + 2


def test_a_name_that_is_not_there_is_the_users(a_box: Box, rows: Rows) -> None:
    box = with_loop(a_box, rows, "def trian(engine, run):\n    pass\n")
    assert box.work() == 1
    assert (box.failure["class"], box.failure["message"]) == ("user", "The loop loop:train: loop has no 'train'")


def test_a_full_disk_under_a_loop_is_the_machines(a_box: Box, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    box = with_loop(a_box, rows, LOOP, spec={"checkpoint": {"every_steps": 1}})
    monkeypatch.setattr("training_container.checkpoints._seal", full)
    assert box.work() == 1
    assert box.failure["class"] == "platform"
    assert box.failure["message"].startswith("The disk is full: checkpoint step-1 could not be written (")
    assert box.checkpoints == []


# --- docs/custom.md --------------------------------------------------------------------------------------------------


def test_the_loop_of_the_docs_raises_its_reward(a_box: Box, rows: Rows) -> None:
    algorithm = CUSTOM | {"options": {"tokens": 4}, "epochs": 4, "batch_size": 8}
    box = a_box(algorithm=algorithm, rows=rows(64), code={"loop.py": examples_of("custom.md")["loop.py"]})
    assert box.work() == 0
    rewards = [event["reward"] for event in box.of("metrics")]
    assert len(rewards) == 32
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])


def test_every_public_name_is_in_the_docs() -> None:
    from training_container import api

    page = (DOCS / "custom.md").read_text("utf-8")
    names = page.partition("### Names to import")[2]
    assert [name for name in api.__all__ if f"`{name}`" not in names] == []


# --- what a loss may get wrong in its gradient -----------------------------------------------------------------------

TWICE = (
    "def same(logprobs, inputs):\n    loss = -(logprobs * logprobs).sum()\n    loss.backward()\n    return loss, {}\n"
)
IN_PLACE = (
    "def same(logprobs, inputs):\n    p = logprobs.exp()\n    loss = -(p * logprobs).sum()\n    p.mul_(2)\n"
    "    return loss, {}\n"
)
WRONG_SHAPE = """
import torch

class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, pull):
        return pull.expand(3)

def same(logprobs, inputs):
    return Odd.apply(logprobs), {}
"""
APART = "import torch\ndef same(logprobs, inputs):\n    return torch.zeros((), requires_grad=True) * 1.0, {}\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TWICE, "backward through the graph a second time"),
        (IN_PLACE, "modified by an inplace operation"),
        (WRONG_SHAPE, "invalid gradient"),
        (APART, "does not depend on logprobs: nothing would be learned from it"),
        ("import sys\ndef same(logprobs, inputs):\n    sys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_what_goes_wrong_in_a_losss_gradient_is_the_users_with_a_line(
    a_box: Box, rows: Rows, source: str, message: str
) -> None:
    box = with_loss(a_box, rows, source)
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert message in box.failure["message"]
    assert box.failure["file"] == str(box.tree.code / "losses.py")
    assert box.failure["line"] >= 1


@pytest.mark.parametrize("name", ["step", "epoch", "event", "attempt", "time", "total_steps"])
def test_a_metric_named_like_a_field_of_the_log_takes_nobodys_place(a_box: Box, rows: Rows, name: str) -> None:
    source = f"def same(logprobs, inputs):\n    return -logprobs.sum() / inputs.totals.tokens, {{'{name}': 77.0}}\n"
    box = with_loss(a_box, rows, source)
    assert box.work() == 0
    assert box.steps == [1, 2, 3, 4]
    assert {event[name] for event in box.of("metrics")} != {77.0}


@pytest.mark.parametrize(
    "source",
    ["async def train(engine, run):\n    pass\n", "def train(engine, run):\n    yield run.end_step({}, tokens=0)\n"],
)
def test_a_loop_of_which_nothing_runs_is_refused(a_box: Box, rows: Rows, source: str) -> None:
    box = with_loop(a_box, rows, source)
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert "called, nothing of it runs. Write a plain def." in box.failure["message"]
