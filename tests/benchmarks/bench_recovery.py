"""How fast a run comes back, and what it pays for that while nothing happens.

    make bench-recovery                  medians over 20 trials of each
    make bench-recovery TRIALS=5         a look

worker killed      SIGKILL to the training process -> the metrics line of the next step, in one job
machine killed     SIGKILL to every process of the job -> the next attempt's first step, on the local cloud; and of that
                   what is ours: the job's end -> understood -> the next job asked for
checkpoints        wall time of the same steps with an asynchronous checkpoint every 50 and with none, turn about
supervisor         wall time of the same steps under it and in a bare worker, turn about

Times come from the container's own lines, so nothing of a reader's polling is in them. What a machine of SageMaker's
takes to come cannot be measured here.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from microtuning_local import cloud as local
from tests.benchmarks.recovery_jobs import SFT_STEP, Job, bare_worker, supervisor
from tests.benchmarks.report import show
from tests.chaos.world import World

GOALS = {
    "worker killed -> first new step, s": 1.0,
    "machine killed -> first new step, s": 8.0,
    "of which detect + decide + resubmit, s": 1.0,
    "checkpoint every 50 steps, overhead %": 2.0,
    "supervisor, overhead %": 1.0,
}
STEPS, EVERY = 200, 50


def main() -> int:
    trials = int(os.environ.get("TRIALS", "20"))
    with tempfile.TemporaryDirectory(prefix="microtuning-bench-") as folder:
        found = measure(Path(folder), trials)
    rows = [row(name, found[name], goal) for name, goal in GOALS.items()]
    show("bench-recovery", rows, trials=trials, step_ms=round(found["step, ms"][0], 1))
    return 0 if all(each["reached"] for each in rows) else 1


def row(name: str, values: list[float], goal: float) -> dict[str, Any]:
    median = statistics.median(values)
    spread = {"trials": len(values), "least": min(values), "median": median, "most": max(values)}
    return {"what": name, **spread, "goal": goal, "reached": median <= goal}


def measure(folder: Path, trials: int) -> dict[str, list[float]]:
    found = {"worker killed -> first new step, s": worker_kills(folder, trials)}
    with_checkpoints, without, bare = walls(folder, trials)
    found["step, ms"] = [1000 * statistics.median(without) / STEPS]
    found["checkpoint every 50 steps, overhead %"] = overheads(with_checkpoints, without)
    found["supervisor, overhead %"] = overheads(without, bare)
    whole, ours = machine_kills(folder, trials)
    return found | {"machine killed -> first new step, s": whole, "of which detect + decide + resubmit, s": ours}


def overheads(with_it: list[float], without: list[float]) -> list[float]:
    """In %, of each turn by itself: the machine's noise is slower than a turn."""
    return [100 * (more / less - 1) for more, less in zip(with_it, without, strict=True)]


# --- in one job ------------------------------------------------------------------------------------------------------


def worker_kills(folder: Path, trials: int) -> list[float]:
    """One long job, whose worker is killed again and again, each time with a newer checkpoint behind it."""
    job = Job(folder / "kills", SFT_STEP, steps=100_000, every_steps=5)
    found: list[float] = []
    with supervisor(job) as process:
        for _ in range(trials):
            reached = job.last_step()
            job.wait_for(lambda last, reached=reached: last["step"] >= reached + 12)
            (worker,) = children_of(process.pid)
            killed_at = time.time()
            os.kill(worker, signal.SIGKILL)
            job.wait_for(
                lambda last, killed_at=killed_at: seconds(last) > killed_at + 0.05 and job.restarts() > len(found)
            )
            found.append(next(seconds(each) for each in job.metrics() if seconds(each) > killed_at + 0.05) - killed_at)
    return found


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def walls(folder: Path, trials: int) -> tuple[list[float], list[float], list[float]]:
    """Wall seconds of the same 200 steps: with checkpoints every 50, with none, and with none in a bare worker."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    kinds = [(supervisor, EVERY), (supervisor, 10**6), (bare_worker, 10**6)]
    for trial in range(trials):
        for walls_of_kind, (start, every) in zip(found, kinds, strict=True):
            job = Job(folder / f"wall-{trial}-{start.__name__}-{every}", SFT_STEP, steps=STEPS + 1, every_steps=every)
            with start(job) as process:
                process.wait()
            first, *_, last = job.metrics()
            walls_of_kind.append(seconds(last) - seconds(first))
    return found


# --- on the local cloud ----------------------------------------------------------------------------------------------


@contextmanager
def own_cloud(folder: Path) -> Iterator[World]:
    before = os.environ.get("MICROTUNING_HOME")
    os.environ["MICROTUNING_HOME"] = str(folder / "home")
    try:
        yield World(local.up(), folder)
    finally:
        local.reset()
        os.environ.pop("MICROTUNING_HOME")
        if before:
            os.environ["MICROTUNING_HOME"] = before


def machine_kills(folder: Path, trials: int) -> tuple[list[float], list[float]]:
    """One run, whose machine is lost again and again; s until the first new step, and s of that which were ours."""
    killed_at: list[datetime] = []
    with own_cloud(folder) as world:
        run = world.begin("sft", rows=8 * (12 + 8 * trials))
        for _ in range(trials):
            assert run.comes_to(1), run.story()
            killed_at.append(datetime.now(UTC))
            run.kill_machine()
            lost = run.job_name
            world.until(lambda lost=lost: run.job_name != lost, "next attempt")
        assert run.comes_to(1), run.story()
        first_steps = [next(each for each in run.events([attempt.job_name]) if each["event"] == "metrics")
                       for attempt in run.record.attempts[1:]]  # fmt: skip
        shown = run.run.view()["recoveries"]
    whole = [seconds(step) - at.timestamp() for step, at in zip(first_steps, killed_at, strict=True)]
    return whole, [(each["detect_ms"] + each["decide_ms"]) / 1000 for each in shown]


if __name__ == "__main__":
    sys.exit(main())
