"""PID 1 of a training job: `python -m training_container.supervisor`.

It reads what to do, imports torch once, and forks workers from that warm process, one a GPU or as many as the spec says: a
worker that crashed is back in a tenth of a second instead of four. It traps SIGTERM, which the stock toolkit does not, and
lets the workers save at their next step. Whatever the job started, however detached, becomes its child in the end and is
killed with it.

    worker ends with 0      the job ends with 0
    143                     stopped after a checkpoint; so does the job
    1, failure file         user, numerics, memory: the job ends with 1. platform: as below
    a signal                started again from the newest checkpoint, at most 3 times without a newer one

Several workers are one to all this: the first that fails or dies ends the others, and all are started again together.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .checkpoints import newest_step
from .failures import Failure, classify, write_failure
from .job import Job, read_job, unpack_code
from .metrics import EventLog
from .paths import MlTree
from .processes import adopt_orphans, die_with_parent, end_children, oom_kills
from .sagemaker_env import count_gpus

if TYPE_CHECKING:
    from .progress import RestartClock

# SageMaker sends SIGKILL 120 s after SIGTERM; what is left must do for mirroring the checkpoint.
GRACE_S = 100
MAX_RESTARTS_WITHOUT_PROGRESS = 3
EXIT_FAILED, EXIT_STOPPED = 1, 128 + signal.SIGTERM
# Who lost another process fails a moment before that one's own death can be seen.
_SETTLING_S = 0.2

WARM_IMPORTS = ("torch", "transformers.models.llama.modeling_llama", "peft", "training_container.worker",
                "training_container.recipes.grpo", "training_container.recipes.sft")  # fmt: skip


def main() -> int:
    """Run the job to its end; the exit status."""
    supervisor = Supervisor()
    signal.signal(signal.SIGTERM, supervisor.on_stop)
    adopt_orphans()
    tree = MlTree.from_environment(os.environ)
    try:
        tree.make_outputs()
        tree.failure.unlink(missing_ok=True)
        job = read_job(os.environ)
        unpack_code(tree)
        return supervisor.run_script(job) if job.algorithm.type == "script" else supervisor.run_workers(job)
    except Exception as error:
        write_failure(tree.failure, classify(error))
        return EXIT_FAILED
    finally:
        end_children()  # what user code started in the background ends with the job


@dataclass(frozen=True)
class Ending:
    """How a worker ended: its exit status, or minus the signal that killed it."""

    status: int
    out_of_memory: bool = False

    @property
    def cause(self) -> str:
        return f"killed by signal {-self.status}" if self.status < 0 else f"exit status {self.status}"


class Supervisor:
    """The children (a script, or the workers of one run), and whether a stop was asked for."""

    def __init__(self) -> None:
        self._began_at_s = time.monotonic()
        self._stop_asked = False
        self._children: set[int] = set()

    # --- signals --------------------------------------------------------------------------------------------------------

    def on_stop(self, *_: Any) -> None:
        """Pass SIGTERM on, and set a limit to the children's patience."""
        self._stop_asked = True
        signal.signal(signal.SIGALRM, self._on_grace_over)
        signal.alarm(GRACE_S)
        tell(self._children, signal.SIGTERM)

    def _on_grace_over(self, *_: Any) -> None:
        tell(self._children, signal.SIGKILL)

    def _adopt(self, pid: int) -> None:
        self._children.add(pid)
        if self._stop_asked:
            tell([pid], signal.SIGTERM)

    # --- scripts --------------------------------------------------------------------------------------------------------

    def run_script(self, job: Job) -> int:
        from .recipes.script import run_script

        _status, failure = run_script(job, self._adopt, end_children)
        self._children.clear()
        if self._stop_asked:
            return EXIT_STOPPED
        if failure:
            write_failure(job.tree.failure, failure)
        return EXIT_FAILED if failure else 0

    # --- workers --------------------------------------------------------------------------------------------------------

    def run_workers(self, job: Job) -> int:
        prepare_environment(job)
        import_once(unless=lambda: self._stop_asked)
        log = EventLog(job.tree.output_data / "metrics.jsonl", job.plan.attempt)
        restart, fruitless, reached = None, 0, newest_step(job.tree.checkpoints)
        while True:
            if self._stop_asked:
                return EXIT_STOPPED
            kills_before = oom_kills()
            for variables in torchrun_variables(workers_of(job)):
                self._fork(job, restart, variables)
            ending = self._wait(kills_before)
            ended_at_s = time.monotonic()
            if (verdict := self._verdict(job, ending)) is not None:
                return verdict
            fruitless = 1 if newest_step(job.tree.checkpoints) > reached else fruitless + 1
            reached = max(reached, newest_step(job.tree.checkpoints))
            if fruitless > MAX_RESTARTS_WITHOUT_PROGRESS:
                return self._give_up(job, ending)
            job.tree.failure.unlink(missing_ok=True)
            end_children()  # the next worker begins with a machine to itself
            log.emit("notice", message=f"the worker was {ending.cause}; starting again from checkpoint {reached}")
            restart = self._clock(ending, ended_at_s)

    def _fork(self, job: Job, restart: RestartClock | None, variables: Mapping[str, str]) -> None:
        """Start a worker; SIGTERM waits until both sides know what to do with it."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            os.environ.update(variables)
            os._exit(be_worker(job, parent, self._began_at_s if restart is None else restart.forked_at_s, restart))
        self._adopt(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _wait(self, kills_before: int) -> Ending:
        """Until all workers have ended well, or one has not: then the others end, too. The ending that explains the rest.

        As PID 1 we also inherit what others leave behind.
        """
        statuses = [0]
        while self._children:
            pid, status = os.waitpid(-1, 0)
            if pid not in self._children:
                continue
            self._children.remove(pid)
            statuses.append(os.waitstatus_to_exitcode(status))
            if statuses[-1] not in (0, EXIT_STOPPED):
                statuses += self._end_the_others()
        worst = (
            min(statuses) if min(statuses) < 0 else max(statuses, key=lambda status: (status == EXIT_FAILED, status))
        )
        return Ending(worst, out_of_memory=worst == -signal.SIGKILL and oom_kills() > kills_before)

    def _end_the_others(self) -> list[int]:
        """How those ended that did so by themselves: a death explains the failures it caused. The rest is killed."""
        found = []
        ends_at_s = time.monotonic() + _SETTLING_S
        while self._children and time.monotonic() < ends_at_s:
            for worker in list(self._children):
                pid, status = os.waitpid(worker, os.WNOHANG)
                if pid:
                    self._children.remove(pid)
                    found.append(os.waitstatus_to_exitcode(status))
            time.sleep(0.005)
        tell(self._children, signal.SIGKILL)
        for worker in self._children:
            os.waitpid(worker, 0)
        self._children.clear()
        return found

    def _verdict(self, job: Job, ending: Ending) -> int | None:
        """The job's exit status, or None to start the worker again."""
        if ending.status == 0:
            return 0
        if self._stop_asked:
            return EXIT_STOPPED
        if ending.out_of_memory:
            write_failure(job.tree.failure, Failure("memory", "The kernel killed the worker: out of host memory."))
            return EXIT_FAILED
        return EXIT_FAILED if ending.status == EXIT_FAILED and not is_platform_failure(job) else None

    def _give_up(self, job: Job, ending: Ending) -> int:
        if not job.tree.failure.exists():
            message = (
                f"The worker was {ending.cause} {MAX_RESTARTS_WITHOUT_PROGRESS + 1} times without a newer checkpoint."
            )
            write_failure(job.tree.failure, Failure("platform", message))
        return EXIT_FAILED

    def _clock(self, ending: Ending, ended_at_s: float) -> RestartClock:
        """The kernel tells of a death at once, so detecting takes no time that could be measured from here."""
        from .progress import RestartClock

        now_s = time.monotonic()
        decide_ms = round(1000 * (now_s - ended_at_s))
        return RestartClock(ending.cause, datetime.now(UTC), detect_ms=0, decide_ms=decide_ms, forked_at_s=now_s)


def be_worker(job: Job, parent: int, started_at_s: float, restart: RestartClock | None) -> int:
    """In the forked child: take SIGTERM over, and train."""
    from .worker import StopFlag, work

    try:
        die_with_parent(parent)
        stop = StopFlag()
        signal.alarm(0)
        signal.signal(signal.SIGTERM, stop.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return work(job, started_at_s=started_at_s, restart=restart, stop=stop)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def tell(pids: Iterable[int], number: int) -> None:
    for pid in list(pids):
        with contextlib.suppress(ProcessLookupError):  # it has just ended; its status is waiting
            os.kill(pid, number)


def workers_of(job: Job) -> int:
    return job.spec.compute.processes or max(1, count_gpus())


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


def is_platform_failure(job: Job) -> bool:
    """Whether the worker's failure file lays it on the machine; a worker that left none did not get to write it."""
    try:
        return '"class": "platform"' in job.tree.failure.read_text("utf-8")
    except OSError:
        return True


def prepare_environment(job: Job) -> None:
    """What must be set before torch is imported."""
    from .sagemaker_env import derive

    os.environ.update(derive(job.tree, {}, arguments=[]))
    # Threads that spin while they wait slow a step twentyfold where other work shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def import_once(unless: Callable[[], bool] = lambda: False) -> None:
    """Import what every worker needs, breaking off when a stop was asked for.

    No thread pool may start here: a forked child would wait for its threads for ever.
    """
    for name in WARM_IMPORTS:
        if unless():
            return
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
