"""Starting and ending the two processes of the local cloud and all that they start, on Linux and macOS.

Each runs in its own session, so its process group holds everything it started and can be ended as one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def spawn(argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path) -> int:
    """Start a process that outlives this one, in a session of its own; its output is appended to `log`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    # It outlives us on purpose: without this, Popen warns when it is forgotten while the process runs.
    process.returncode = 0
    return process.pid


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def started_at(pid: int) -> str | None:
    """When a live process began, in the system's own units; None if it is gone or a zombie."""
    for row in _processes_of("pid", pid):
        return None if row.state.startswith("Z") else row.started
    return None


def is_same_process(pid: int | None, started: str | None) -> bool:
    """Whether `pid` is still the process that began at `started`, not a later one with its number."""
    return pid is not None and started is not None and started_at(pid) == started


def group_members(group: int) -> list[int]:
    """Live processes of a process group; zombies hold nothing and do not count."""
    return [row.pid for row in _processes_of("group", group) if not row.state.startswith("Z")]


def end_group(group: int, *, grace_s: float) -> bool:
    """SIGTERM to the leader, then SIGKILL to whatever of its group is left after `grace_s`.

    Returns whether the leader ended by itself.
    """
    _signal(os.kill, group, signal.SIGTERM)
    by_itself = wait_until(lambda: started_at(group) is None, timeout_s=grace_s)
    kill_group(group)
    reap(group)
    return by_itself


def kill_group(group: int) -> None:
    """SIGKILL a process group and wait until it is empty."""
    if group_members(group):
        _signal(os.killpg, group, signal.SIGKILL)
        wait_until(lambda: not group_members(group), timeout_s=5)


def wait_until(is_true: Callable[[], bool], *, timeout_s: float, every_s: float = 0.02) -> bool:
    """Ask until the answer is yes; False when `timeout_s` passed without one."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def reap(pid: int) -> None:
    """Collect a child of ours that has ended, so that it does not linger. Not for a child that a Popen waits for."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # not our child: its own parent, or init, collects it


def _signal(send: Callable[[int, int], None], target: int, number: int) -> None:
    try:
        send(target, number)
    except ProcessLookupError:
        return  # it ended first, which is what was wanted


class _Row:
    def __init__(self, pid: int, group: int, state: str, started: str) -> None:
        self.pid, self.group, self.state, self.started = pid, group, state, started


def _processes_of(key: str, value: int) -> list[_Row]:
    proc = Path("/proc")
    if (proc / "self" / "stat").exists():
        folders = [proc / str(value)] if key == "pid" else [p for p in proc.iterdir() if p.name.isdigit()]
        rows = [row for folder in folders if (row := _from_proc(folder))]
    else:
        rows = _from_ps()
    return [row for row in rows if getattr(row, key) == value]


def _from_proc(folder: Path) -> _Row | None:
    try:
        text = (folder / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in brackets and may hold blanks; what follows the last bracket is regular (proc(5)).
    fields = text.rsplit(")", 1)[1].split()
    return _Row(int(folder.name), group=int(fields[2]), state=fields[0], started=fields[19])


def _from_ps() -> list[_Row]:
    columns = ["-A", "-o", "pid=,pgid=,stat=,lstart="]
    listed = subprocess.run(["ps", *columns], capture_output=True, text=True, check=True)  # nosec B607 # whose PATH, whose ps
    parts = [line.split(None, 3) for line in listed.stdout.splitlines() if line.strip()]
    return [_Row(int(pid), int(group), state, started) for pid, group, state, started in parts]
