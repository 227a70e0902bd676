"""The user's own training script, run unchanged under SageMaker's contract: SM_* variables and `--key value` arguments."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from .. import sagemaker_env
from ..failures import Failure
from ..job import Job, script_hyperparameters
from ..processes import die_with_parent, oom_kills, signal_name

_LAST_LINES = 200
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
# How a shell or launcher passes on that its child got SIGKILL.
_A_CHILD_WAS_KILLED = 128 + signal.SIGKILL
_OUT_OF_MEMORY = ("out of memory", "MemoryError", "can't allocate memory")


def run_script(
    job: Job, on_start: Callable[[int], None], on_end: Callable[[], None] = lambda: None
) -> tuple[int, Failure | None]:
    """Run the script to its end: (exit status, failure).

    `on_start` gets its pid, to forward signals to; `on_end` ends what the script left behind, so that its output ends, too.
    The script runs in the code folder, with the supervisor's own environment and SM_* beside it. Whether a stop was asked
    for, which makes its end no failure, is for the caller to know.
    """
    hyperparameters = script_hyperparameters(job)
    arguments = sagemaker_env.command_line(hyperparameters)
    entry = job.algorithm.entry
    script = job.tree.code / entry
    if not script.is_file():
        return 1, Failure("user", f"The code has no file {entry!r}; code.zip holds it at its root.")
    variables = sagemaker_env.derive(job.tree, hyperparameters, entry=entry, arguments=arguments)
    kills_before, supervisor = oom_kills(), os.getpid()
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=job.tree.code,
        env=os.environ | variables | {"PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(supervisor),  # one left behind would write checkpoints beside the next one's
    )
    on_start(process.pid)
    reader, last_lines = _pass_on(process)
    status = process.wait()
    on_end()
    reader.join(timeout=5)  # what could not be ended holds the pipe open
    return status, _failure(status, last_lines, job.tree.code, out_of_memory=oom_kills() > kills_before)


def _pass_on(process: subprocess.Popen[bytes]) -> tuple[threading.Thread, deque[str]]:
    """Copy the script's stderr to ours until it closes, by a thread, which keeps its last lines."""
    kept: deque[str] = deque(maxlen=_LAST_LINES)
    assert process.stderr is not None
    source = process.stderr

    def copy() -> None:
        with source:
            for raw in source:
                sys.stderr.buffer.write(raw)
                sys.stderr.buffer.flush()
                kept.append(raw.decode("utf-8", errors="replace").rstrip())

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    return reader, kept


def _failure(status: int, lines: Iterable[str], code: Path, *, out_of_memory: bool) -> Failure | None:
    """`out_of_memory`: the kernel killed for memory meanwhile."""
    if status == 0:
        return None
    said = [line for line in lines if line.strip()]
    if status < 0:
        return _killed(-status, said, out_of_memory)
    message = said[-1].strip() if said else f"The script ended with exit status {status} and said nothing."
    if status == _A_CHILD_WAS_KILLED:
        return Failure("memory", f"A process of the script was killed, as for memory (exit status {status}): {message}")
    if any(sign in message for sign in _OUT_OF_MEMORY):
        return Failure("memory", message)
    file, line = _innermost_frame(said, code)
    return Failure("user", message, file, line)


def _killed(number: int, said: list[str], out_of_memory: bool) -> Failure:
    """Only SIGKILL comes from the machine; any other signal is the script's own doing, or its libraries'."""
    if number == signal.SIGKILL:
        if out_of_memory:
            return Failure("memory", "The kernel killed the script: out of host memory.")
        return Failure("platform", f"The script was killed by {signal_name(number)}.")
    last_words = f" It said last: {said[-1].strip()}" if said else ""
    return Failure("user", f"The script was killed by {signal_name(number)}.{last_words}")


def _innermost_frame(lines: Iterable[str], code: Path) -> tuple[str | None, int | None]:
    """The last frame of the printed traceback, or the last in the user's own code when there is one."""
    frames = [(found["file"], int(found["line"])) for line in lines if (found := _FRAME.match(line))]
    own = [frame for frame in frames if frame[0].startswith(str(code))]
    chosen = own or frames
    return chosen[-1] if chosen else (None, None)
