"""Ctrl-C, sent as a real signal to a real program: before the run exists, and while it is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from microtuning_sdk import Run, Stage

from .conftest import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent

BEGIN = """
import sys, time
from microtuning_sdk import RLTrainer, SFTTrainer, connect
rows = [{"prompt": f"{n}>", "completion": str(n), "answer": str(n)} for n in range(100, 164)]
stage = connect("local")
"""

WAITS = (
    BEGIN
    + """
calls = []
def slow(completions):
    calls.append(1)
    print("user line", len(calls), flush=True)
    time.sleep(0.4)
    return [float(len(c)) for c in completions]

trainer = RLTrainer("Transformer", reward_func=slow, stage=stage, group_size=4, max_completion_tokens=4, name="detached")
run = trainer.fit(rows, epochs=1, batch_size=16)
print("control is back:", run.run_id, flush=True)
"""
)

UPLOADS = (
    BEGIN
    + """
put = stage.s3.put_object
def slow_put(**request):
    print("uploading", flush=True)
    time.sleep(60)
    return put(**request)
stage.s3.put_object = slow_put
SFTTrainer("Transformer", stage=stage, name="never begun").fit([{"prompt": "never>", "completion": "begun"}])
"""
)


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a program whose stderr goes to the file `stderr`; none is left running."""
    programs = []

    def start(text: str) -> subprocess.Popen[str]:
        (tmp_path / "program.py").write_text(text)
        with (tmp_path / "stderr").open("w") as said:
            command = [sys.executable, str(tmp_path / "program.py")]
            program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ)
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def test_ctrl_c_while_waiting_detaches_and_the_run_goes_on_and_can_be_attached_again(
    stage: Stage, tmp_path: Path, begun: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = begun(WAITS)
    said = tmp_path / "stderr"
    run_id = wait_until(lambda: [w for w in said.read_text().split() if w.startswith("default-detached-")], "run")[0]
    wait_until(lambda: len(user_lines(said.read_text())) >= 3, "line of the reward on the display")
    program.send_signal(signal.SIGINT)
    out, _ = program.communicate(timeout=30)
    text = said.read_text()
    assert (program.returncode, "Traceback" in text) == (0, False)
    assert out == f"control is back: {run_id}\n"
    assert "GOES ON" in text
    assert f"microtuning runs wait {run_id}" in text
    again = attach(run_id)
    run = Run(run_id, stage)
    assert run.status == "completed"
    printed = user_lines("\n".join(run.logs()))
    assert len(printed) >= 16
    assert user_lines(text) + user_lines(again) == printed


def user_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("user line")]


def attach(run_id: str) -> str:
    """`microtuning runs wait` in a new process; what it shows."""
    command = [sys.executable, "-c", "import sys; from microtuning_sdk.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "runs", "wait", run_id], capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    return done.stderr


def test_ctrl_c_during_the_upload_starts_nothing(
    stage: Stage, tmp_path: Path, begun: Callable[[str], subprocess.Popen[str]]
) -> None:
    before = set(keys(stage))
    program = begun(UPLOADS)
    assert program.stdout is not None
    assert program.stdout.readline() == "uploading\n"
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=30)
    assert program.returncode != 0
    assert "nothing was started" in (tmp_path / "stderr").read_text()
    time.sleep(1)
    assert not [key for key in set(keys(stage)) - before if "/specs/" in key or "/datasets/" in key]
    assert not [run for run in stage.runs.list_runs("default") if run.name == "never begun"]


def keys(stage: Stage) -> Iterator[str]:
    return (each.key for each in stage.objects.walk("tenants/default/"))


def test_wait_without_logs_is_not_an_error_when_the_run_is_not_waited_for(
    stage: Stage, tmp_path: Path, begun: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = (
        BEGIN + 'print(SFTTrainer("Transformer", stage=stage).fit(rows, batch_size=8, wait=False, logs=True).run_id)\n'
    )
    started = time.monotonic()
    process = begun(program)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert time.monotonic() - started < 60
    run = Run(out.strip(), stage)
    run.cancel()
    assert run.wait(PATIENCE_S).is_final
