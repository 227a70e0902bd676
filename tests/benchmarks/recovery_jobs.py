"""Jobs for bench_recovery: a tree as the container finds it, started under the supervisor or as a bare worker."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_container.supervisor import LIBRARIES

SFT_STEP = {"type": "sft", "batch_size": 128, "learning_rate": 1e-3}
PATIENCE_S = 120.0
BARE = """
import os, sys, time
from training_container.job import read_job, unpack_code
from training_container.worker import StopFlag, work
job = read_job(os.environ)
job.tree.make_outputs()
sys.exit(work(job, started_at_s=time.monotonic(), restart=None, stop=StopFlag()))
"""


@dataclass(frozen=True)
class Job:
    """A supervised run of so many steps; a step is about 50 ms on one core."""

    root: Path
    algorithm: dict[str, Any]
    steps: int
    every_steps: int

    def __post_init__(self) -> None:
        chance = random.Random(0)
        texts = ["".join(chance.choices("0123456789", k=6)) for _ in range(1024)]
        rows = [{"prompt": f"{text}>", "completion": "".join(sorted(text))} for text in texts]
        spec = {
            "name": "bench", "model": {"arch": "Transformer"}, "data": {"train": "s3://bucket/train.jsonl"},
            "algorithm": self.algorithm | {"epochs": 10_000, "max_train_steps": self.steps},
            "checkpoint": {"every_steps": self.every_steps, "every_epoch": False},
        }  # fmt: skip
        plan = {
            "run_id": "default-bench-0a1b2c3d4e5f", "attempt": 1, "lineage": 1, "instance_type": "ml.m5.large", "count": 1,
            "spot": False, "micro_batch_size": None, "max_runtime_s": 3600, "price_usd_per_hour": "0.115",
        }  # fmt: skip
        self._write("train/train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self._write("config/spec.json", json.dumps(spec))
        self._write("config/plan.json", json.dumps(plan))

    def _write(self, name: str, text: str) -> None:
        path = self.root / "input" / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def events(self) -> list[dict[str, Any]]:
        path = self.root / "output" / "data" / "metrics.jsonl"
        text = path.read_text("utf-8") if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def metrics(self) -> list[dict[str, Any]]:
        return [each for each in self.events() if each["event"] == "metrics"]

    def last_step(self) -> int:
        return max((each["step"] for each in self.metrics()), default=0)

    def restarts(self) -> int:
        return sum(each["event"] == "recovery" for each in self.events())

    def wait_for(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Until it holds of the last step's line."""
        deadline = time.monotonic() + PATIENCE_S
        while not ((found := self.metrics()) and holds(found[-1])):
            assert time.monotonic() < deadline, self.events()[-3:]
            time.sleep(0.02)


def environment_of(job: Job) -> dict[str, str]:
    own = {"MICROTUNING_ML_ROOT": str(job.root), "MICROTUNING_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | LIBRARIES | own


@contextmanager
def supervisor(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The job as SageMaker starts it; stopped when it is left."""
    with _running([sys.executable, "-m", "training_container.supervisor"], job) as process:
        yield process


@contextmanager
def bare_worker(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The worker alone, without anybody who watches it."""
    with _running([sys.executable, "-c", BARE], job) as process:
        yield process


@contextmanager
def _running(argv: list[str], job: Job) -> Iterator[subprocess.Popen[bytes]]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, env=environment_of(job), stdout=quiet, stderr=quiet) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()
