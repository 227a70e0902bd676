"""How long a newcomer waits: from nothing to a deployed stack, and from fit() to the first training step.

    make bench-start        rounds of both in a fresh home; goals: under 5 s, and under 10 s

Each round starts from an empty folder: emulator, our SageMaker, every resource of the template. The first step is timed by
the container's own metrics line, so nothing of the client's polling is in it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from typing import Any

from microtuning_local import cloud
from microtuning_sdk import RLTrainer
from tests.benchmarks.report import median_row, show

ROUNDS = 5
DEPLOYED_GOAL_S, FIRST_STEP_GOAL_S = 5.0, 10.0
ROWS = [{"prompt": f"{a}{b}>", "answer": "".join(sorted(f"{a}{b}"))} for a in range(10) for b in range(10)]


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def one_round(number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="microtuning-bench-") as home:
        os.environ["MICROTUNING_HOME"] = home
        began = time.monotonic()
        cloud.up()
        deployed_s = time.monotonic() - began
        try:
            return {"round": number, "deployed_s": deployed_s, "first_step_s": first_step_s()}
        finally:
            cloud.reset()


def first_step_s() -> float:
    asked_at = datetime.now(UTC)
    trainer = RLTrainer(model_arch="Transformer", reward_func=reward, name="bench start", max_completion_tokens=4)
    run = trainer.fit(ROWS, max_steps=3, wait=False)
    while not (steps := run.metrics()):
        time.sleep(0.1)
    first_at = datetime.fromisoformat(steps[0]["time"])
    run.wait()
    return (first_at - asked_at).total_seconds()


def main() -> int:
    rows = [one_round(number) for number in range(1, ROUNDS + 1)]
    rows.append(median_row(rows, "median"))
    goals = {"deployed_goal_s": DEPLOYED_GOAL_S, "first_step_goal_s": FIRST_STEP_GOAL_S}
    show("bench-start", rows, **goals)
    return 0 if rows[-1]["deployed_s"] < DEPLOYED_GOAL_S and rows[-1]["first_step_s"] < FIRST_STEP_GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
