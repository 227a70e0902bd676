"""The demo's claim: greedy held-out accuracy from under 0.5 to over 0.9 for each of the seeds 0 to 4, in under 3 minutes.

    make bench-demo

Each seed is the whole of examples/sort_digits.py against one local cloud: data, warm start, reinforcement, evaluation.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from microtuning_local import cloud
from tests.benchmarks.report import show

SEEDS = range(5)
BEFORE_BELOW, AFTER_ABOVE, WITHIN_S = 0.5, 0.9, 180.0


def one_seed(seed: int) -> dict[str, Any]:
    from sort_digits import train

    began = time.monotonic()
    run = train(seed)
    seconds = time.monotonic() - began
    record = run.record
    return {
        "seed": seed,
        "accuracy_before": record.metrics.eval_before["eval_accuracy"],
        "accuracy_after": record.metrics.eval_after["eval_accuracy"],
        "steps": record.liveness.step if record.liveness else 0,
        "seconds": seconds,
        "cost_usd": str(run.cost().total_usd),
    }


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    with tempfile.TemporaryDirectory(prefix="microtuning-bench-") as home:
        os.environ["MICROTUNING_HOME"] = home
        try:
            rows = [one_seed(seed) for seed in SEEDS]
        finally:
            cloud.reset()
    show("bench-demo", rows, before_below=BEFORE_BELOW, after_above=AFTER_ABOVE, within_s=WITHIN_S)
    return 0 if all(_holds(row) for row in rows) else 1


def _holds(row: dict[str, Any]) -> bool:
    return bool(
        row["accuracy_before"] < BEFORE_BELOW and row["accuracy_after"] > AFTER_ABOVE and row["seconds"] < WITHIN_S
    )


if __name__ == "__main__":
    sys.exit(main())
