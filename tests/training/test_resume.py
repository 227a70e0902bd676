"""A run that was killed ends with the same bits as one that was not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The reward kills the training worker once, at its 7th call, when checkpoint 5 is whole.
KILLS_THE_WORKER_ONCE = """
import os, signal, time
from pathlib import Path

def score(completions, answer, **kw):
    calls = Path(os.environ["MARKS"]) / "calls"
    made = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(made))
    if made == int(os.environ["KILL_AT"]):
        while not Path(os.environ["MICROTUNING_ML_ROOT"], "checkpoints/step-5/manifest.json").exists():
            time.sleep(0.002)
        os.kill(os.getppid(), signal.SIGKILL)
    return [sum(x == y for x, y in zip(c, a)) / len(a) - abs(len(c) - len(a)) / 9 for c, a in zip(completions, answer)]
"""
GRPO = {
    "type": "grpo",
    "batch_size": 16,
    "group_size": 4,
    "max_completion_tokens": 6,
    "epochs": 3,
    "learning_rate": 1e-3,
}
SFT = {"type": "sft", "batch_size": 4, "epochs": 3, "learning_rate": 1e-3}


@pytest.fixture
def grpo_boxes(tmp_path: Path, rows: Callable[..., Any]) -> Callable[..., Any]:
    """Two boxes of the same GRPO run: 16 rows, 4 prompts a step, so 12 steps with an epoch's end every 4."""

    def make(make_box: Callable[..., Any], **changes: Any) -> list[Any]:
        boxes = []
        for name, kill_at in (("calm", 0), ("killed", 7)):
            (tmp_path / f"marks-{name}").mkdir()
            box = make_box(name=name, algorithm=GRPO, code={"rewards.py": KILLS_THE_WORKER_ONCE},
                           reward={"entry": "rewards:score"}, rows=rows(16), **changes)  # fmt: skip
            box.environment = {"MARKS": str(tmp_path / f"marks-{name}"), "KILL_AT": str(kill_at)}
            boxes.append(box)
        return boxes

    return make


@pytest.mark.parametrize("kind", ["a_box", "a_lora_box"])
def test_a_grpo_worker_killed_at_step_7_gives_the_same_final_weights_to_the_bit(
    kind: str, grpo_boxes: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    calm, killed = grpo_boxes(request.getfixturevalue(kind), spec={"checkpoint": {"every_steps": 5}})
    assert calm.work() == 0
    done = killed.supervise()
    assert done.returncode == 0, done.stderr
    assert killed.steps == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12]
    assert killed.weights_sha256 == calm.weights_sha256
    assert (killed.manifest(12)["final"], killed.manifest(12)["epoch"]) == (True, 3)
    (restart,) = killed.progress["restarts"]
    assert restart["cause"] == "killed by signal 9"
    assert 0 < restart["restore_ms"] < 5000
    assert 0 < restart["first_step_ms"] < 5000


@pytest.mark.parametrize("settings", [SFT, GRPO], ids=["sft", "grpo"])
@pytest.mark.parametrize("kind", ["a_box", "a_lora_box"])
def test_a_supervisor_killed_in_mid_run_goes_on_in_a_new_process_to_the_same_bits(
    kind: str, settings: dict[str, Any], rows: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    make = request.getfixturevalue(kind)
    settings = settings | {"epochs": 10}
    plan = {"micro_batch_size": None}  # the engine chooses, and must choose alike
    calm, killed = (
        make(name=name, algorithm=settings, rows=rows(16), eval_rows=rows(4, seed=2), plan=plan)
        for name in ("calm", "killed")
    )
    assert calm.work() == 0
    with killed.start() as process:
        killed.wait_for_step(9, process)
        worker = children_of(process.pid)[0]
        process.kill()
        process.communicate()
    assert ends_within_2_s(worker), "the worker outlived its supervisor"
    seen = len(killed.steps)
    assert 9 <= seen < 40
    done = killed.supervise()
    assert done.returncode == 0, done.stderr
    assert killed.steps[-1] == 40
    assert killed.steps[seen] > 4, "it began from nothing"
    assert killed.weights_sha256 == calm.weights_sha256
    assert last_of_each_step(killed) == last_of_each_step(calm)
    assert measured(killed, 40) == measured(calm, 40)


RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"type": "sft"},
    "dpo": {"type": "dpo"},
    "dpo, precomputed": {"type": "dpo", "reference": "precomputed"},
    "kto": {"type": "kto"},
    "orpo": {"type": "orpo"},
    "reward": {"type": "reward"},
}
ADAPTERS = {"LoRA": {"rank": 4}, "LoRA with dropout": {"rank": 4, "dropout": 0.1}, "all weights": {"adapter": "none"}}


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        *((recipe, "preset") for recipe in RECIPES if recipe != "dpo, precomputed"),
        *((recipe, "LoRA with dropout") for recipe in RECIPES),
        ("dpo", "LoRA"),
        *((recipe, "all weights") for recipe in ("dpo", "kto", "reward")),
    ],
)
def test_a_supervised_or_preference_run_stopped_in_mid_run_ends_with_the_same_bits(
    recipe: str, kind: str, a_box: Callable[..., Any], a_lora_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    """Distillation, episodes and loops of the user's have the like in their own tests."""
    settings = RECIPES[recipe] | {"batch_size": 3, "epochs": 2, "learning_rate": 1e-3, "max_length": 32}
    make = a_box if kind == "preset" else a_lora_box
    model = {} if kind == "preset" else {"model": {"base": "tests/tiny"} | ADAPTERS[kind]}
    data = {"rows": as_asked(recipe, rows(7)), "eval_rows": as_asked(recipe, rows(3, seed=2))}
    calm, stopped = (make(name=name, algorithm=settings, **data, **model) for name in ("calm", "stopped"))
    assert calm.work() == 0
    last = calm.steps[-1]
    assert stopped.work(stop=lambda: len(stopped.steps) == last // 2) == 128 + signal.SIGTERM
    assert stopped.work() == 0
    assert stopped.steps == calm.steps
    assert last_of_each_step(stopped) == last_of_each_step(calm)
    assert measured(stopped, last) == measured(calm, last)
    assert stopped.weights_sha256 == calm.weights_sha256


def as_asked(recipe: str, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """As pairs, where the recipe learns from them; kto makes two rows of each."""
    if recipe == "sft":
        return rows
    return [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1] + "!"} for row in rows]


def test_a_run_resumed_exactly_at_an_epoch_end_makes_6_steps_and_sees_each_row_3_times(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    case = json.loads((Path(__file__).parents[1] / "cases" / "c41_epoch_boundary.json").read_text("utf-8"))
    settings = SFT | {"batch_size": case["batch"], "epochs": case["epochs"]}
    calm, stopped = (
        a_box(name=name, algorithm=settings, rows=rows(case["rows"]), spec={"checkpoint": {"every_steps": 100}})
        for name in ("calm", "stopped")
    )
    assert calm.work() == 0
    assert stopped.work(stop=lambda: len(stopped.steps) == case["stop_after_step"]) == 128 + signal.SIGTERM
    assert stopped.checkpoints == ["step-2"]
    assert stopped.work() == 0
    assert stopped.steps == [1, 2, 3, 4, 5, 6] == calm.steps
    assert [each["epoch"] for each in stopped.of("metrics")] == [1, 1, 2, 2, 3, 3]
    assert stopped.weights_sha256 == calm.weights_sha256


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 5])
def test_a_warm_started_run_stopped_anywhere_ends_with_the_same_bits(
    stop_after: int, a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    warm_start = {"data": "s3://bucket/warm.jsonl", "steps": 3, "batch_size": 8, "learning_rate": 3e-3}
    settings = GRPO | {"epochs": 1, "warm_start": warm_start}

    def make(name: str) -> Any:
        return a_box(
            name=name, algorithm=settings, rows=rows(16), warm_rows=rows(20, seed=1), eval_rows=rows(4, seed=2)
        )

    calm, stopped = make("calm"), make("stopped")
    asked = iter(range(1000))
    assert calm.work() == 0
    assert stopped.work(stop=lambda: next(asked) >= stop_after) == 128 + signal.SIGTERM
    assert stopped.work() == 0
    assert stopped.weights_sha256 == calm.weights_sha256
    assert stopped.steps == [1, 2, 3, 4]
    assert len([each for each in stopped.of("phase") if "warm_steps" in each]) <= 2


def test_a_damaged_checkpoint_is_passed_over_and_the_result_is_the_same(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    calm, broken = (a_box(name=name, algorithm=SFT, rows=rows(16)) for name in ("calm", "broken"))
    assert calm.work() == 0
    assert broken.work(stop=lambda: len(broken.steps) == 9) == 143
    assert broken.checkpoints == ["step-8", "step-9"]
    weights = broken.tree.checkpoints / "step-9" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert broken.work() == 0
    assert "step-9 is not used: model/model.safetensors has other contents" in json.dumps(broken.of("notice"))
    assert broken.steps == [*range(1, 10), 9, 10, 11, 12]
    assert broken.weights_sha256 == calm.weights_sha256


def test_the_newest_checkpoint_is_the_highest_number_and_hand_made_names_are_ignored(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    box = a_box(algorithm=SFT, rows=rows(16))
    assert box.work(stop=lambda: len(box.steps) == 9) == 143
    good = box.tree.checkpoints / "step-9"
    for name in ("step-best", "step-", "step-7x", "handpicked", "step-99-copy"):
        shutil.copytree(good, box.tree.checkpoints / name)
    shutil.copytree(box.tree.checkpoints / "step-8", box.tree.checkpoints / "step-08")
    assert box.work() == 0
    assert box.of("phase")[1]["checkpoint"] == "step-9"


def test_a_checkpoint_under_another_steps_name_is_passed_over(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    box = a_box(algorithm=SFT, rows=rows(16))
    assert box.work(stop=lambda: len(box.steps) == 9) == 143
    (box.tree.checkpoints / "step-8").rename(box.tree.checkpoints / "step-80")
    assert box.work() == 0
    assert "step-80 is not used: its manifest is that of step 8" in json.dumps(box.of("notice"))
    assert box.steps == list(range(1, 13))


def test_another_base_model_than_the_checkpoints_is_refused_by_name(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    box = a_box(algorithm=SFT, rows=rows(16))
    assert box.work(stop=lambda: len(box.steps) == 3) == 143
    spec = json.loads((box.tree.channel("config") / "spec.json").read_text("utf-8"))
    spec["model"] = {"arch": "tiny-decoder"}
    (box.tree.channel("config") / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert "model is tiny-decoder, but checkpoint step-3 was made from Transformer" in box.failure["message"]


def test_a_finished_job_started_again_trains_nothing_and_leaves_the_same_model(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    box = a_box(algorithm=SFT, rows=rows(16))
    assert box.work() == 0
    first = box.weights_sha256
    shutil.rmtree(box.tree.model)
    assert box.work() == 0
    assert box.weights_sha256 == first
    assert box.steps == list(range(1, 13))


def test_the_resume_channel_counts_only_while_the_lineage_has_no_checkpoint(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    calm = a_box(name="calm", algorithm=SFT, rows=rows(16))
    assert calm.work() == 0
    first = a_box(name="first", algorithm=SFT, rows=rows(16))
    assert first.work(stop=lambda: len(first.steps) == 6) == 143
    second = a_box(name="second", algorithm=SFT, rows=rows(16), plan={"lineage": 2, "attempt": 2})
    shutil.copytree(first.tree.checkpoints / "step-6", second.tree.channel("resume"))
    assert second.work(stop=lambda: len(second.steps) == 2) == 143
    assert second.steps == [7, 8]
    assert second.work() == 0
    assert second.steps == [*range(7, 13)]
    assert second.weights_sha256 == calm.weights_sha256
    assert second.manifest(12)["lineage"] == 2


def test_a_cadence_that_never_saves_is_shortened_and_sigterm_at_step_4_saves(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    case = json.loads((Path(__file__).parents[1] / "cases" / "c51_spot_nockpt.json").read_text("utf-8"))
    settings = {"type": "grpo", "batch_size": 60, "group_size": 4, "max_completion_tokens": 6}
    slow = "import time\ndef score(completions, **kw):\n    time.sleep(0.3)\n    return list(map(len, completions))\n"
    cadence = {"checkpoint": {"every_steps": case["save_steps"], "every_epoch": False}}
    box = a_box(
        algorithm=settings,
        rows=rows(case["rows"]),
        code={"rewards.py": slow},
        reward={"entry": "rewards:score"},
        spec=cadence,
    )
    with box.start() as process:
        box.wait_for_step(4, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert box.checkpoints in (["step-2", "step-4"], ["step-4", "step-5"])  # every 2 steps of 6, and at the signal
    assert box.work() == 0
    assert box.steps == [1, 2, 3, 4, 5, 6]


def test_a_worker_that_dies_at_the_same_place_again_and_again_ends_the_job_as_platform(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    dies = {"rewards.py": "import os, signal\ndef score(**kw):\n    os.kill(os.getppid(), signal.SIGKILL)\n"}
    box = a_box(algorithm=GRPO, rows=rows(16), code=dies, reward={"entry": "rewards:score"})
    done = box.supervise()
    assert done.returncode == 1
    assert box.failure["class"] == "platform"
    assert "killed by signal 9 4 times without a newer checkpoint" in box.failure["message"]


def measured(box: Any, step: int) -> dict[str, float]:
    """What the final checkpoint says of the model; how fast the machine was is another matter."""
    return {name: value for name, value in box.manifest(step)["metrics"].items() if name != "tokens_per_s"}


def last_of_each_step(box: Any) -> dict[int, tuple[float, float]]:
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in box.of("metrics")}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ends_within_2_s(pid: int) -> bool:
    ends_at_s = time.monotonic() + 2
    while is_running(pid) and time.monotonic() < ends_at_s:
        time.sleep(0.01)
    return not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


def test_the_tests_leave_no_process() -> None:
    """Of a session that runs other tests, too: only processes of training jobs count, wherever the cloud's are."""
    assert not [pid for pid in children_of(os.getpid()) if is_running(pid) and belongs_to_a_job(pid)]


def belongs_to_a_job(pid: int) -> bool:
    try:
        return b"MICROTUNING_ML_ROOT=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
