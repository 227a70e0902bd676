"""Small things about processes that Python does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Of cgroup v2, and of v1, which older hosts still run.
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux only; elsewhere nothing happens).

    A worker that outlived its supervisor would go on writing checkpoints beside the next one.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the request
        os.kill(os.getpid(), signal.SIGKILL)


def oom_kills() -> int:
    """How often the kernel killed in this container for memory; 0 where no cgroup says."""
    for counters in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            lines = counters.read_text("utf-8").splitlines()
            counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
            return int(counts.get("oom_kill", 0))
    return 0


def signal_name(number: int) -> str:
    """ "SIGSEGV" for 11; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
