"""The processes that train one run: forked from the warm supervisor, watched, and ended together.

Several are one to whoever looks: the first that fails, dies or falls silent ends the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .heartbeat import FLOOR_S, OF_A_LOOP_S, Heartbeat
from .job import Job
from .processes import die_with_parent, oom_kills
from .sagemaker_env import count_gpus

if TYPE_CHECKING:
    from .progress import RestartClock

EXIT_FAILED, EXIT_STOPPED = 1, 128 + signal.SIGTERM
# Who lost another process fails a moment before that one's own death can be seen.
_SETTLING_S = 0.2
# Between two looks at the workers: a death is seen in half of it, and looking costs a thousandth of a core.
_LOOK_EVERY_S = 0.02
# For a hung worker to say where it is before it is killed.
_LAST_WORDS_S = 0.5


@dataclass(frozen=True)
class Ending:
    """How the workers ended: an exit status, or minus the signal that killed one.

    hung_s: how long one had been silent when it was killed for that.
    """

    status: int
    out_of_memory: bool = False
    hung_s: float | None = None

    @property
    def cause(self) -> str:
        if self.hung_s is not None:
            return f"hung (no sign of life for {self.hung_s:.0f} s)"
        return f"killed by signal {-self.status}" if self.status < 0 else f"ended with exit status {self.status}"


class Workers:
    """Those of one run, one start after the other."""

    def __init__(self, job: Job, attempt_began_at_s: float) -> None:
        self.pids: set[int] = set()
        self._job, self._attempt_began_at_s = job, attempt_began_at_s
        self._heartbeats = [Heartbeat() for _ in range(workers_of(job))]
        self._forked_at_s = self._kills_before = 0.0
        self._silence_s = longest_silence_s(job)

    def start(self, restart: RestartClock | None) -> None:
        """Fork them all; SIGTERM waits until both sides know what to do with it."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._kills_before = oom_kills()
        self._forked_at_s = time.monotonic()
        for heartbeat, variables in zip(self._heartbeats, torchrun_variables(len(self._heartbeats)), strict=True):
            heartbeat.begin()
            self._fork(restart, heartbeat, variables)

    def _fork(self, restart: RestartClock | None, heartbeat: Heartbeat, variables: Mapping[str, str]) -> None:
        parent = os.getpid()
        began_at_s = self._attempt_began_at_s if restart is None else restart.forked_at_s
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            os.environ.update(variables)
            os._exit(be_worker(self._job, parent, began_at_s, restart, heartbeat))
        self.pids.add(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def wait(self) -> Ending:
        """Until all have ended well, or one has not. The ending that explains the rest.

        As PID 1 we also inherit what others leave behind.
        """
        statuses = [0]
        while self.pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                if (hung_s := self._hung_for_s()) is not None:
                    self._kill_hung()
                    return Ending(-signal.SIGKILL, hung_s=hung_s)
                time.sleep(_LOOK_EVERY_S)
            elif pid in self.pids:
                self.pids.remove(pid)
                statuses.append(os.waitstatus_to_exitcode(status))
                if statuses[-1] not in (0, EXIT_STOPPED):
                    statuses += self._end_the_others()
        worst = (
            min(statuses) if min(statuses) < 0 else max(statuses, key=lambda status: (status == EXIT_FAILED, status))
        )
        return Ending(worst, out_of_memory=worst == -signal.SIGKILL and oom_kills() > self._kills_before)

    def _hung_for_s(self) -> float | None:
        silences = (each.hung_for_s(self._forked_at_s, self._silence_s) for each in self._heartbeats)
        return max((silence for silence in silences if silence is not None), default=None)

    def _kill_hung(self) -> None:
        """Where each of them is goes to the log first (be_worker): it is the only thing that tells why."""
        tell(self.pids, signal.SIGUSR2)
        time.sleep(_LAST_WORDS_S)
        self._kill()

    def _end_the_others(self) -> list[int]:
        """How those ended that did so by themselves: a death explains the failures it caused. The rest is killed."""
        found = []
        ends_at_s = time.monotonic() + _SETTLING_S
        while self.pids and time.monotonic() < ends_at_s:
            for worker in list(self.pids):
                pid, status = os.waitpid(worker, os.WNOHANG)
                if pid:
                    self.pids.remove(pid)
                    found.append(os.waitstatus_to_exitcode(status))
            time.sleep(0.005)
        self._kill()
        return found

    def _kill(self) -> None:
        tell(self.pids, signal.SIGKILL)
        for worker in self.pids:
            os.waitpid(worker, 0)
        self.pids.clear()


def be_worker(job: Job, parent: int, started_at_s: float, restart: RestartClock | None, heartbeat: Heartbeat) -> int:
    """In the forked child: take SIGTERM over, and train."""
    from .worker import StopFlag, work

    try:
        die_with_parent(parent)
        stop = StopFlag()
        signal.alarm(0)
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        signal.signal(signal.SIGTERM, stop.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return work(job, started_at_s=started_at_s, restart=restart, stop=stop, heartbeat=heartbeat)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def tell(pids: Iterable[int], number: int) -> None:
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):  # it has just ended; its status is waiting
            os.kill(pid, number)


def workers_of(job: Job) -> int:
    return job.spec.compute.processes or max(1, count_gpus())


def longest_silence_s(job: Job) -> float:
    """The floor of what counts as hung. A user's own loop may do for an hour what gives no sign."""
    return job.spec.compute.hung_after_s or (OF_A_LOOP_S if job.algorithm.type == "custom" else FLOOR_S)


def torchrun_variables(workers: int) -> list[dict[str, str]]:
    """What torchrun would set, for each worker of this machine; nothing for one alone."""
    if workers == 1:
        return [{}]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    size = str(workers)
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # The machine's own name may not resolve in a container without a network.
    shared["GLOO_SOCKET_IFNAME"] = "lo"
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]
