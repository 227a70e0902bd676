"""Small things about processes that Python does not offer."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


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
    """How often the kernel killed in this container for memory; 0 where cgroup v2 does not say."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text("utf-8").splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines if " " in line)
    return int(counts.get("oom_kill", 0))
