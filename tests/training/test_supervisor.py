"""The first process of a job: what it reads, what it says when it cannot go on, and how it stops."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from microtuning_core.domain.errors import InvalidData
from training_container.failures import MAX_FAILURE_BYTES, Failure, UserFailure, classify, write_failure
from training_container.metrics import EventLog
from training_container.supervisor import WARM_IMPORTS

ROOT = Path(__file__).parents[2]
SFT = {"type": "sft", "batch_size": 4, "learning_rate": 1e-3}
Box, Rows = Callable[..., Any], Callable[..., Any]


def test_a_job_without_a_whole_config_fails_as_platform_in_one_json_line(a_box: Box) -> None:
    box = a_box()
    (box.tree.channel("config") / "plan.json").unlink()
    done = box.supervise()
    assert done.returncode == 1
    assert box.failure["class"] == "platform"
    assert "plan.json" in box.failure["message"]
    assert len(box.tree.failure.read_text("utf-8").splitlines()) == 1


def test_bad_data_ends_the_job_as_user_with_file_and_line_and_without_a_restart(a_box: Box) -> None:
    box = a_box(rows=[{"prompt": "1", "completion": "2"}, {"prompt": "1"}])
    done = box.supervise()
    assert done.returncode == 1
    assert (box.failure["class"], box.failure["file"], box.failure["line"]) == ("user", "train.jsonl", 2)
    assert "starting again" not in done.stdout


def test_metrics_on_stdout_are_the_lines_of_metrics_jsonl(a_box: Box) -> None:
    box = a_box()
    done = box.supervise()
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert printed == (box.tree.output_data / "metrics.jsonl").read_text("utf-8").splitlines()
    step = next(line for line in map(json.loads, printed) if line["event"] == "metrics")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", step["time"])
    assert (step["event"], step["step"], step["attempt"]) == ("metrics", 1, 1)


def test_a_stop_before_the_first_worker_ends_at_once_with_143(a_box: Box) -> None:
    with a_box().start() as process:
        while not handles_sigterm(process.pid):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


def handles_sigterm(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return bool(caught and int(caught.group(1), 16) >> (signal.SIGTERM - 1) & 1)


# --- in place --------------------------------------------------------------------------------------------------------

# At its 6th call the loss sleeps for ever, the first time it gets there.
HANGS_ONCE = """
import os, time
from pathlib import Path

def loss(logprobs, inputs):
    mark = Path(os.environ["MARKS"])
    with mark.open("a") as calls:
        calls.write("x")
    if mark.stat().st_size == int(os.environ["HANG_AT"]):
        time.sleep(600)
    return -logprobs.sum() / inputs.totals.tokens, {}
"""


def test_a_worker_without_a_sign_of_life_says_where_it_is_and_is_started_again_to_the_same_bits(
    a_box: Box, rows: Rows, tmp_path: Path
) -> None:
    calm, hung = (
        a_box(
            name=name, algorithm=SFT | {"epochs": 2}, rows=rows(16), code={"losses.py": HANGS_ONCE},
            spec={"loss": {"entry": "losses:loss"}, "compute": {"hung_after_s": 3}, "checkpoint": {"every_steps": 2}},
        )
        for name in ("calm", "hung")
    )  # fmt: skip
    done = calm.supervise(MARKS=str(tmp_path / "calm-calls"), HANG_AT="0")
    assert done.returncode == 0, done.stderr
    done = hung.supervise(MARKS=str(tmp_path / "hung-calls"), HANG_AT="6")
    assert done.returncode == 0, done.stderr
    assert 'losses.py", line 10 in loss' in done.stderr
    assert hung.steps == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert hung.weights_sha256 == calm.weights_sha256
    (restart,) = hung.progress["restarts"]
    assert restart["cause"].startswith("hung (no sign of life for ")
    assert restart["detect_ms"] >= 3000


# Rows that are too many at once, on a machine that is too small.
RUNS_OUT = """
import os, torch
from pathlib import Path

def loss(logprobs, inputs):
    rows = inputs.label_B.numel()
    with Path(os.environ["MARKS"]).open("a") as calls:
        calls.write(f"{rows} ")
    if rows > int(os.environ["MOST"]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return -logprobs.sum() / inputs.totals.tokens, {}
"""


def test_memory_that_ran_out_is_met_by_smaller_micro_batches_in_place(a_box: Box, rows: Rows, tmp_path: Path) -> None:
    box = a_box(
        algorithm=SFT, rows=rows(16), code={"losses.py": RUNS_OUT}, spec={"loss": {"entry": "losses:loss"}},
        plan={"micro_batch_size": 4},
    )  # fmt: skip
    done = box.supervise(MARKS=str(tmp_path / "calls"), MOST="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().split() == ["4", "2", *["1"] * 16]
    assert box.steps == [1, 2, 3, 4]
    causes = [restart["cause"] for restart in box.progress["restarts"]]
    assert causes == [f"out of memory (micro-batches are cut to 1/{part})" for part in (2, 4)]


def test_memory_that_runs_out_with_an_eighth_too_ends_the_job_as_memory(a_box: Box, rows: Rows, tmp_path: Path) -> None:
    box = a_box(algorithm=SFT, rows=rows(16), code={"losses.py": RUNS_OUT}, spec={"loss": {"entry": "losses:loss"}})
    done = box.supervise(MARKS=str(tmp_path / "calls"), MOST="0")
    assert done.returncode == 1
    assert box.failure["class"] == "memory"
    assert box.failure["message"].endswith("2.00 GiB, also with micro-batches an eighth as large.")


# User code that starts processes meant to stay, in each of the ways there are.
STARTS_WHAT_STAYS = """
import os, signal, subprocess, time
from pathlib import Path

def deaf():
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

subprocess.Popen(["sleep", "300"], start_new_session=True)
subprocess.Popen(["sleep", "300"], start_new_session=True, preexec_fn=deaf)
subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300"], start_new_session=True)
daemon = Path(os.environ["SM_OUTPUT_DATA_DIR"], "daemon")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        daemon.touch()
        time.sleep(300)
    os._exit(0)
while not daemon.exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise ValueError", 1), ("os.kill(os.getppid(), 15)", 143)])
def test_what_a_script_leaves_behind_ends_with_the_job(end: str, status: int, a_box: Box) -> None:
    code = {"train.py": f"{STARTS_WHAT_STAYS}{end}\n"}
    box = a_box(algorithm={"type": "script", "entry": "train.py"}, code=code)
    with box.start() as process:
        process.wait(timeout=30)
        left = running_in(box.tree.root)
    assert process.returncode == status
    assert (box.tree.output_data / "daemon").exists()
    assert not left


def test_what_a_reward_leaves_behind_ends_with_the_job(a_box: Box, rows: Rows) -> None:
    settings = {"type": "grpo", "batch_size": 16, "group_size": 4, "max_completion_tokens": 6, "max_train_steps": 1}
    scores = "def score(completions, **kw):\n    return list(map(len, completions))\n"
    box = a_box(
        algorithm=settings,
        rows=rows(16),
        code={"rewards.py": STARTS_WHAT_STAYS + scores},
        reward={"entry": "rewards:score"},
    )
    done = box.supervise()
    assert done.returncode == 0, done.stderr
    assert (box.tree.output_data / "daemon").exists()
    assert not running_in(box.tree.root)


def running_in(folder: Path) -> list[str]:
    """Command lines of the processes whose environment names this ML root."""
    mark = f"MICROTUNING_ML_ROOT={folder}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text())
        except OSError:
            continue  # it has just ended
    return found


def test_a_long_failure_keeps_class_file_and_line_within_900_bytes() -> None:
    line = Failure("user", '漢字"\n' * 900, "/opt/ml/code/rewards.py", 17).as_line()
    assert len(line.encode()) <= MAX_FAILURE_BYTES
    failure = json.loads(line)
    assert (failure["class"], failure["file"], failure["line"]) == ("user", "/opt/ml/code/rewards.py", 17)
    assert next(iter(failure)) == "class"
    assert len(line.encode()) > MAX_FAILURE_BYTES - 20


@pytest.mark.parametrize(
    ("error", "failure_class"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory"),
        (InvalidData("a.jsonl", "is empty"), "user"),
        (ConnectionResetError("reset"), "platform"),
        (KeyError("x"), "platform"),
    ],
)
def test_an_exception_has_a_class_the_control_plane_acts_on(error: Exception, failure_class: str) -> None:
    assert classify(error).failure_class == failure_class


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("half \ud800"), "ValueError: half \\ud800"),
        (UserFailure("half \ud800", file="\udcff.py", line=2), "half \\ud800"),
        (InvalidData("\udcff.jsonl", "is half \ud800"), "\\udcff.jsonl: is half \\ud800."),
        (RuntimeError("out of memory \ud800"), "Out of memory: out of memory \\ud800"),
        (Mute(), "Mute: (its text cannot be had: __str__ raised ValueError)"),
        (ValueError("\ud800" * 10_000), "ValueError: \\ud800\\ud800"),
    ],
)
def test_any_text_fits_into_the_failure_file_and_into_a_log_line(
    error: Exception, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = classify(error)
    write_failure(tmp_path / "failure", failure)
    written = (tmp_path / "failure").read_bytes()
    assert len(written) <= MAX_FAILURE_BYTES
    assert json.loads(written)["message"].startswith(message)
    EventLog(tmp_path / "metrics.jsonl", 1).emit("notice", **{"message": failure.message, "\ud800": ["\ud800"]})
    for text in ((tmp_path / "metrics.jsonl").read_text("utf-8"), capsys.readouterr().out):
        line = json.loads(text)
        assert line["message"].startswith(message)
        assert line["\\ud800"] == ["\\ud800"]


def test_the_image_holds_every_package_the_container_imports_at_the_tested_version() -> None:
    from importlib.metadata import version

    pinned = dict(
        re.findall(
            r"^([a-z0-9-]+)==([\d.]+)$", (ROOT / "training_container" / "requirements.txt").read_text(), re.MULTILINE
        )
    )
    assert set(pinned) == {
        "accelerate",
        "boto3",
        "cloudpickle",
        "numpy",
        "peft",
        "pydantic",
        "reasoning-gym",
        "safetensors",
        "tokenizers",
        "transformers",
    }
    assert {name: version(name) for name in pinned} == pinned


def test_the_image_starts_the_supervisor_and_copies_only_what_the_context_lets_through() -> None:
    dockerfile = (ROOT / "training_container" / "Dockerfile").read_text("utf-8")
    assert 'ENTRYPOINT ["python", "-m", "training_container.supervisor"]' in dockerfile
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for source in re.findall(r"^COPY (\S+) ", dockerfile, re.MULTILINE):
        assert (ROOT / source).exists()
        assert f"!{source.split('/')[0]}" in ignored


def test_the_container_imports_no_more_of_ours_than_the_domain() -> None:
    imports = re.compile(r"^\s*(?:from|import) (\w+(?:\.\w+)*)", re.MULTILINE)
    modules = {
        name
        for path in (ROOT / "training_container").rglob("*.py")
        if path.parent.name != "remote"  # which asks AWS on behalf of a reward
        for name in imports.findall(path.read_text("utf-8"))
    }
    ours = {name for name in modules if name.startswith("microtuning_")}
    assert all(name.startswith("microtuning_core.domain") for name in ours)
    assert not {name.split(".")[0] for name in modules} & {
        "boto3",
        "botocore",
        "functions",
        "infrastructure",
        "microtuning_sdk",
    }
    assert "training_container.worker" in WARM_IMPORTS
