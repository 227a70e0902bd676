"""Whole runs, begun as a user begins them, on the local cloud of the test session."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_sdk import RLTrainer, Run, Stage, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from microtuning_local.cloud import LocalCloud

PATIENCE_S = 240  # for a run of a few steps on two busy cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")


@pytest.fixture(scope="session")
def stage(cloud: LocalCloud) -> Stage:
    return connect("local")


def sort_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    chance = random.Random(seed)
    drawn = ["".join(chance.choices("0123456789", k=3)) for _ in range(count)]
    return [
        {"prompt": f"{text}>", "answer": "".join(sorted(text)), "completion": "".join(sorted(text))} for text in drawn
    ]


def share_in_place(completions: list[str], answer: list[str]) -> list[float]:
    return [sum(x == y for x, y in zip(c, a, strict=False)) / len(a) for c, a in zip(completions, answer, strict=True)]


def slowly(completions: list[str], answer: list[str]) -> list[float]:
    """The same, but leaves the time to do something to the run in its middle."""
    import time

    time.sleep(0.4)
    return [sum(x == y for x, y in zip(c, a, strict=False)) / len(a) for c, a in zip(completions, answer, strict=True)]


def an_rl_trainer(stage: Stage, **settings: Any) -> RLTrainer:
    """A run of seconds: 8 completions a step, a checkpoint every second step."""
    vetted: dict[str, Any] = {
        "model_arch": "Transformer", "reward_func": share_in_place, "stage": stage, "group_size": 4,
        "max_completion_tokens": 4, "checkpoint": {"every_steps": 2, "every_epoch": False, "keep": 5},
    }  # fmt: skip
    return RLTrainer(**(vetted | settings))


def wait_until(is_so: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"no {what} in {timeout_s} s"
        time.sleep(0.1)
    return found


def wait_for_step(run: Run, step: int) -> None:
    wait_until(lambda: any(event["step"] >= step for event in run.metrics()), f"step {step} of {run.run_id}")
