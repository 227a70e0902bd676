"""Whole jobs of two workers: they are one run to whoever looks, also when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASE = json.loads((Path(__file__).parents[1] / "cases" / "c42_resume_changed_batch.json").read_text("utf-8"))
TWO = {"compute": {"processes": 2}}
SFT = {"type": "sft", "batch_size": 5, "epochs": 4, "learning_rate": 1e-3}
GRPO = {
    "type": "grpo",
    "batch_size": 16,
    "group_size": 4,
    "max_completion_tokens": 6,
    "epochs": 2,
    "learning_rate": 1e-3,
}


def of_each_step(box: Any) -> dict[int, list[float]]:
    return {event["step"]: [event["loss"], event["grad_norm"]] for event in box.of("metrics")}


def close(found: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, abs=1e-5, rel=1e-5)


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_workers_of_which_one_is_killed_end_with_the_same_bits_and_dropout(
    a_lora_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    model = {"base": "tests/tiny", "rank": 4, "alpha": 8, "dropout": 0.3}
    calm, killed = (
        a_lora_box(name=name, algorithm=SFT, model=model, rows=rows(16), spec=TWO | {"checkpoint": {"every_steps": 3}})
        for name in ("calm", "killed")
    )
    done = calm.supervise()
    assert done.returncode == 0, done.stderr
    with killed.start() as process:
        killed.wait_for_step(9, process)
        os.kill(workers_of(process.pid)[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert 16 <= len(killed.steps) < 24  # none twice where checkpoint 9 was whole already
    assert of_each_step(killed) == of_each_step(calm)
    assert killed.weights_sha256 == calm.weights_sha256
    (restart,) = killed.progress["restarts"]
    assert restart["cause"] == "killed by signal 9"
    assert killed.manifest(16)["world_size"] == 2
    assert {"random.rank1.json", "random.rank1.safetensors"} <= {file["path"] for file in killed.manifest(16)["files"]}
    assert killed.of("metrics")[-1]["bytes_sent"] == pytest.approx(4 * 15_360, abs=64)


def test_two_workers_with_spread_weights_stop_at_the_same_step_and_one_goes_on_from_there(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    alone, together = (
        a_box(name=name, algorithm=GRPO | {"epochs": 10}, rows=rows(16), spec=changes)
        for name, changes in (("alone", {}), ("together", TWO))
    )
    assert alone.work() == 0
    with together.start(MICROTUNING_SHARD="1") as process:
        together.wait_for_step(3, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    stopped_at = together.steps[-1]
    assert 3 <= stopped_at < 40
    assert together.manifest(stopped_at)["world_size"] == 2
    assert together.work() == 0
    assert together.steps == list(range(1, 41)), "a step was made twice, or reported by both"
    close(of_each_step(together), of_each_step(alone))
    assert "bytes_sent" in together.of("metrics")[0] and "bytes_sent" not in together.of("metrics")[-1]
    assert "made by 2 and goes on with 1 processes" in json.dumps(together.of("notice"))


def test_a_reward_that_fails_ends_both_workers_with_one_failure_of_the_user(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    """Spread weights, too, for they are where a worker could wait for the other for ever."""
    code = {"rewards.py": "def score(completions, **kw):\n    return 1 / 0\n"}
    box = a_box(algorithm=GRPO, rows=rows(16), code=code, reward={"entry": "rewards:score"}, spec=TWO)
    done = box.supervise(MICROTUNING_SHARD="1")
    assert done.returncode == 1
    assert box.failure["class"] == "user"
    assert "rewards.py" in (box.failure["file"] or "")


# --- C42: resumed with something changed -----------------------------------------------------------------------------


def stopped_and_resumed(a_box: Callable[..., Any], rows: Callable[..., Any], part: str) -> Any:
    """The case's first job up to its stop, then the job it is resumed as."""
    first, second = CASE["first"], CASE[part]
    batches = [each["per_device"] * each["accumulation"] for each in (first, second)]

    def job(name: str, batch: int, micro_batch: int) -> Any:
        settings = {"type": "sft", "batch_size": batch, "epochs": CASE["epochs"], "learning_rate": 1e-3}
        return a_box(name=name, algorithm=settings, rows=rows(CASE["rows"]), plan={"micro_batch_size": micro_batch})

    box = job("job", batches[0], first["per_device"])
    assert box.work(stop=lambda: len(box.steps) == first["stop_after_step"]) == 143
    return job("job", batches[1], second["per_device"])


def test_c42_another_cut_of_the_same_batch_makes_8_steps_with_each_row_once(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    box = stopped_and_resumed(a_box, rows, "second")
    assert box.work() == 0
    assert box.steps == list(range(1, CASE["want"]["total_steps"] + 1))
    uncut = a_box(name="uncut", algorithm=SFT | {"batch_size": 4, "epochs": 1}, rows=rows(CASE["rows"]))
    assert uncut.work() == 0
    close(of_each_step(box), of_each_step(uncut))  # the same rows in each step, or the losses would differ


def test_c42_another_batch_size_is_refused_by_name_with_both_values(
    a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    box = stopped_and_resumed(a_box, rows, "third")
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert "algorithm.batch_size is 2, but checkpoint step-3 was made with 4" in box.failure["message"]


def test_c42_a_state_of_another_optimizer_is_refused_and_not_half_loaded() -> None:
    import torch

    from training_container.engine.optimizer_state import load_optimizer_tensors
    from training_container.failures import UserFailure

    weights = {"layer": torch.nn.Parameter(torch.zeros(2))}
    adam = torch.optim.AdamW(weights.values())
    for strange in ("layer|momentum_buffer", "elsewhere|exp_avg"):
        with pytest.raises(UserFailure, match=r"optimizer state does not fit this run's AdamW"):
            load_optimizer_tensors(weights, adam, {strange: torch.ones(2)})
    with pytest.raises(UserFailure, match="does not fit"):
        load_optimizer_tensors(weights, adam, {"layer|exp_avg": torch.ones(3)})
    assert not adam.state


@pytest.mark.parametrize(
    "source",
    [
        "def score(completions, completion_ids, answer, log_extra):\n"
        "    log_extra('seen', [f'{c}/{a}' for c, a in zip(completions, answer)])\n"
        "    return [float(sum(ids)) for ids in completion_ids]\n",
        "def score(completion, completion_ids, answer):\n"
        "    return {'reward': float(sum(completion_ids)), 'seen': f'{completion}/{answer}'}\n",
    ],
    ids=["batch", "one"],
)
def test_two_workers_ask_the_reward_once_and_give_each_completion_its_own_score(
    source: str, a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    alone, together = (
        a_box(name=name, algorithm=GRPO | {"max_train_steps": 2}, rows=rows(16), spec=changes,
              code={"rewards.py": source}, reward={"entry": "rewards:score"})
        for name, changes in (("alone", {}), ("together", TWO))
    )  # fmt: skip
    assert alone.work() == 0
    done = together.supervise()
    assert done.returncode == 0, done.stderr
    answers = {f"train.jsonl:{line}": row["answer"] for line, row in enumerate(rows(16), start=1)}
    for step in (1, 2):
        of_one, of_two = (
            (box.tree.checkpoints / "rollouts" / f"step-{step}.jsonl").read_text("utf-8").splitlines()
            for box in (alone, together)
        )
        one, two = ([json.loads(line) for line in lines] for lines in (of_one, of_two))
        assert len(one) == len(two) == 16
        for first, second in zip(one, two, strict=True):
            names = ("row", "completion", "reward", "notes")
            assert [first[name] for name in names] == [second[name] for name in names]
            said = re.sub(r"<\w+>", "", second["completion"])  # the reward sees no special tokens
            assert second["notes"] == {"reward/seen": f"{said}/{answers[second['row']]}"}
