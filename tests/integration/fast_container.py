"""A training container of a few lines that keeps the container contract: a whole run takes a second.

What it does is named by the variable BEHAVIOUR, which a spec sets in `environment_variables`. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(os.environ["MICROTUNING_ML_ROOT"])
CONFIG = ROOT / "input" / "data" / "config"
CHECKPOINTS = ROOT / "checkpoints"
SPEC = json.loads((CONFIG / "spec.json").read_text())
PLAN = json.loads((CONFIG / "plan.json").read_text())
EVALUATED = {"eval_loss_before": 2.0, "eval_loss_after": 0.5}
IDENTITY = {"schema_version": 1, "run_id": PLAN["run_id"], "attempt": PLAN["attempt"], "lineage": PLAN["lineage"]}


def now() -> str:
    return datetime.now(UTC).isoformat()


def write_whole(path: Path, text: str) -> None:
    path.with_name(path.name + ".tmp").write_text(text)
    path.with_name(path.name + ".tmp").rename(path)


def checkpoint(step: int, *, final: bool = False, metrics: dict[str, float] | None = None) -> None:
    """Files first, the manifest last, as a whole checkpoint is written; then the sign of life."""
    folder = CHECKPOINTS / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    weights = bytes([step]) * 64
    (folder / "weights.bin").write_bytes(weights)
    manifest = IDENTITY | {
        "step": step,
        "epoch": 0,
        "world_size": 1,
        "global_batch": 16,
        "spec_sha256": "0" * 64,
        "base_model": "Transformer",
        "files": [{"path": "weights.bin", "bytes": 64, "sha256": hashlib.sha256(weights).hexdigest()}],
        "metrics": metrics or {},
        "final": final,
        "created_at": now(),
    }
    write_whole(folder / "manifest.json", json.dumps(manifest))
    progress(step)


def progress(step: int) -> None:
    metrics = {"first": {"loss": 2.0}, "last": {"loss": 2.0 / step}, "eval_before": {"eval_loss": 2.0}}
    document = IDENTITY | {"step": step, "total_steps": 4, "at": now(), "longest_step_ms": 10, "metrics": metrics}
    write_whole(CHECKPOINTS / "progress.json", json.dumps(document))


def newest_step() -> int:
    """The highest whole step that was restored, of this lineage or else of the one it started from; 0 = none."""
    own = [int(path.parent.name.removeprefix("step-")) for path in CHECKPOINTS.glob("step-*/manifest.json")]
    resume = ROOT / "input" / "data" / "resume" / "manifest.json"
    start = json.loads(resume.read_text())["step"] if resume.exists() else 0
    return max(own, default=start)


def finish(metrics: dict[str, float] = EVALUATED) -> int:
    """One more step, the final checkpoint, the model."""
    step = newest_step() + 1
    print(json.dumps({"event": "metrics", "step": step, "from_step": step - 1, "attempt": PLAN["attempt"]}))
    checkpoint(step, final=True, metrics=metrics)
    (ROOT / "model" / "model.bin").write_bytes(b"model")
    return 0


def fail(failure_class: str, message: str, file: str | None = None, line: int | None = None) -> int:
    line_of_failure = {"class": failure_class, "message": message, "file": file, "line": line}
    (ROOT / "output" / "failure").write_text(json.dumps(line_of_failure))
    return 1


def hang() -> int:
    """Until SIGTERM; then a checkpoint, and the exit code of a process that was told to go."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    checkpoint(1)
    print("hanging", flush=True)
    while not asked:
        time.sleep(0.02)
    checkpoint(2)
    return 143


def fails_once(failure_class: str, message: str) -> int:
    if PLAN["attempt"] > 1:
        return finish()
    checkpoint(1)
    checkpoint(2)
    return fail(failure_class, message)


def four_steps() -> int:
    for step in range(newest_step() + 1, 4):
        checkpoint(step)
    return finish()


BEHAVIOURS = {
    "succeed": finish,
    "four_steps": four_steps,
    "unevaluated": lambda: finish(metrics={}),
    "user_error": lambda: fail("user", "ZeroDivisionError: division by zero", "rewards.py", 12),
    "platform_once": lambda: fails_once("platform", "NCCL error: the host was lost"),
    "numerics_once": lambda: fails_once("numerics", "the loss was not finite 5 times in a row"),
    "memory_once": lambda: fails_once("memory", "CUDA out of memory"),
    "platform_always": lambda: fail("platform", "the host was lost"),
    "hang": hang,
    "hang_until_restored": lambda: finish() if newest_step() else hang(),
    "hang_once": lambda: hang() if PLAN["attempt"] == 1 else finish(),
}

if __name__ == "__main__":
    CHECKPOINTS.mkdir(exist_ok=True)
    sys.exit(BEHAVIOURS[os.environ.get("BEHAVIOUR", "succeed")]())
