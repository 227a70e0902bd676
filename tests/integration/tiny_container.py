"""A container of a few lines for tests of the local SageMaker: hyperparameter `script` names what it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ["MICROTUNING_ML_ROOT"])
HYPERPARAMETERS = json.loads((ROOT / "input" / "config" / "hyperparameters.json").read_text())
CHECKPOINTS = ROOT / "checkpoints"


def succeed() -> int:
    """Write a model, some output, and 500 lines."""
    (ROOT / "model" / "sub").mkdir()
    (ROOT / "model" / "sub" / "weights.bin").write_bytes(b"weights")
    (ROOT / "model" / "config.json").write_text("{}")
    (ROOT / "output" / "data" / "metrics.jsonl").write_text('{"step": 1}\n')
    for number in range(500):
        print(f"line {number}")
    return 0


def report() -> int:
    """Say what the container sees: environment, files, configuration."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    config = {path.stem: json.loads(path.read_text()) for path in (ROOT / "input" / "config").iterdir()}
    print(json.dumps({"environment": dict(os.environ), "files": files, "config": config}))
    return 0


def fail() -> int:
    (ROOT / "output" / "failure").write_text(HYPERPARAMETERS["failure"])
    (ROOT / "output" / "data" / "partial.txt").write_text("partial")
    return int(HYPERPARAMETERS.get("exit_code", "1"))


def fail_silently() -> int:
    return 3


def save_on_sigterm() -> int:
    """Run until SIGTERM, then save a checkpoint and leave."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    print("running", flush=True)
    while not asked:
        time.sleep(0.02)
    checkpoint(7)
    print("saved")
    return 0


def ignore_sigterm() -> int:
    """Ignore SIGTERM, and have a child that does so too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (ROOT / "output" / "data" / "child.txt").write_text(str(child.pid))
    print(f"child {child.pid}", flush=True)
    time.sleep(60)
    return 0


def count_up() -> int:
    """One checkpoint every 0.2 s, going on from the highest one found; done at step 12."""
    signal.signal(signal.SIGTERM, lambda *_: print("caught SIGTERM", flush=True))
    steps = [int(path.parent.name.split("-")[1]) for path in CHECKPOINTS.glob("step-*/manifest.json")]
    start = max(steps, default=0)
    print(f"start {start}", flush=True)
    for step in range(start + 1, 13):
        time.sleep(0.2)
        checkpoint(step)
        print(f"step {step}", flush=True)
    return 0


def checkpoint(step: int) -> None:
    folder = CHECKPOINTS / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(bytes([step]) * 1000)
    (folder / ".hidden").write_text("no")
    (folder / "half.tmp").write_text("no")
    (folder / "manifest.json.tmp").write_text(json.dumps({"step": step}))
    (folder / "manifest.json.tmp").rename(folder / "manifest.json")


if __name__ == "__main__":
    sys.exit(globals()[HYPERPARAMETERS["script"]]())
