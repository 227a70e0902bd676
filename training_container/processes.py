"""Small things about processes that Python does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Of cgroup v2, and of v1, which older hosts still run.
_CGROUP = Path("/sys/fs/cgroup")
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


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none gets out of sight (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(within_s: float = 5.0) -> None:
    """Kill every child of this process, and each one's own as it becomes ours, until none is left.

    The time limit is for a process that the kernel cannot end yet, as one that waits for a broken disk.
    """
    ends_at_s = time.monotonic() + within_s
    while (children := children_of(os.getpid())) and time.monotonic() < ends_at_s:
        kill_all(children)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    return [child for child, parent in _parents().items() if parent == pid]


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on; not those whose parent has ended, who are another's now."""
    parents = _parents()
    found = [pid]
    for ancestor in found:  # it grows as we go
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def _parents() -> dict[int, int]:
    """Every process and its parent, as /proc has them; nothing where there is no /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            after_name = path.read_bytes().rpartition(b")")[2]  # a name may hold spaces and parentheses
            found[int(path.parent.name)] = int(after_name.split()[1])
    return found


def oom_kills() -> int:
    """How often the kernel killed in this container for memory; 0 where no cgroup says."""
    for counters in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            lines = counters.read_text("utf-8").splitlines()
            counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
            return int(counts.get("oom_kill", 0))
    return 0


def has_room_for(count_bytes: int) -> bool:
    """Whether so much more memory leaves as much again free; True where nothing says how much there is."""
    free = _free_bytes()
    return free is None or 2 * count_bytes <= free


def _free_bytes() -> int | None:
    """What this container may still use: the machine's free memory, or what is left of the container's limit."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        found.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((_CGROUP / name).read_text("utf-8")) for name in ("memory.max", "memory.current"))
        found.append(limit - used)
    return min(found, default=None)


def signal_name(number: int) -> str:
    """ "SIGSEGV" for 11; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
