"""PID 1 of a training job: `python -m training_container.supervisor`.

It reads what to do, imports torch once, and forks workers from that warm process, one a GPU or as many as the spec says: a
worker that crashed is back in a tenth of a second instead of four. It traps SIGTERM, which the stock toolkit does not, and
lets the workers save at their next step. Whatever the job started, however detached, becomes its child in the end and is
killed with it.

    worker ends with 0      the job ends with 0
    143                     stopped after a checkpoint; so does the job
    1, failure file         user, numerics: the job ends with 1. platform, memory: as below
    a signal, a long hush   started again from the newest checkpoint, at most 3 times without a newer one
    memory                  started again with micro-batches half as large, at most 3 times
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .checkpoints import newest_step
from .failures import Failure, classify, write_failure
from .job import Job, read_job, unpack_code
from .metrics import EventLog
from .paths import MlTree
from .processes import adopt_orphans, end_children
from .workers import EXIT_FAILED, EXIT_STOPPED, Ending, Workers, tell

if TYPE_CHECKING:
    from .progress import RestartClock

# SageMaker sends SIGKILL 120 s after SIGTERM; what is left must do for mirroring the checkpoint.
GRACE_S = 100
MAX_RESTARTS_WITHOUT_PROGRESS, MAX_HALVINGS = 3, 3

# What the libraries below us read when they are loaded.
LIBRARIES = {
    # Threads that spin while they wait slow a step twentyfold where other work shares the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # Matrix products that are the same from run to run. Without it MKL's last bits depend on where in memory a tensor
    # lies, on AMD at least: restored weights lie elsewhere. It costs nothing that can be measured.
    "MKL_CBWR": "AUTO,STRICT",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

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
        unpack_code(tree, job.spec.code.sha256 if job.spec.code else None)
        return supervisor.run_script(job) if job.algorithm.type == "script" else supervisor.run_workers(job)
    except Exception as error:
        write_failure(tree.failure, classify(error))
        return EXIT_FAILED
    finally:
        end_children()  # what user code started in the background ends with the job


class Supervisor:
    """The children (a script, or the workers of one run), and whether a stop was asked for."""

    def __init__(self) -> None:
        self._began_at_s = time.monotonic()
        self._stop_asked = False
        self._children: set[int] = set()
        self._halvings = 0

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
        workers = Workers(job, self._began_at_s)
        self._children = workers.pids
        restart, fruitless, reached = None, 0, newest_step(job.tree.checkpoints)
        while True:
            if self._stop_asked:
                return EXIT_STOPPED
            workers.start(restart)
            if self._stop_asked:
                tell(workers.pids, signal.SIGTERM)  # it came before there was anybody to tell
            ending = workers.wait()
            ended_at_s = time.monotonic()
            if (verdict := self._verdict(job, ending)) is not None:
                return verdict
            fruitless = 1 if newest_step(job.tree.checkpoints) > reached else fruitless + 1
            reached = max(reached, newest_step(job.tree.checkpoints))
            if fruitless > MAX_RESTARTS_WITHOUT_PROGRESS:
                return self._give_up(job, ending)
            cause = self._cause(job, ending)
            job.tree.failure.unlink(missing_ok=True)
            end_children()  # the next worker begins with a machine to itself
            log.emit("notice", message=f"worker {cause}; starting again from checkpoint {reached}")
            restart = self._clock(cause, ending, ended_at_s)

    def _verdict(self, job: Job, ending: Ending) -> int | None:
        """The job's exit status, or None to start the worker again. Memory that ran out is met by smaller micro-batches."""
        if ending.status == 0:
            return 0
        if self._stop_asked:
            return EXIT_STOPPED
        if ran_out_of_memory(job, ending):
            self._halvings += 1
            if self._halvings <= MAX_HALVINGS:
                return None
            write_failure(job.tree.failure, out_of_memory(job, ending))
            return EXIT_FAILED
        return EXIT_FAILED if ending.status == EXIT_FAILED and failure_class(job) != "platform" else None

    def _cause(self, job: Job, ending: Ending) -> str:
        if ran_out_of_memory(job, ending):
            return f"out of memory (micro-batches are cut to 1/{2**self._halvings})"
        return ending.cause

    def _give_up(self, job: Job, ending: Ending) -> int:
        if not job.tree.failure.exists():
            message = f"The worker {ending.cause} {MAX_RESTARTS_WITHOUT_PROGRESS + 1} times without a newer checkpoint."
            write_failure(job.tree.failure, Failure("platform", message))
        return EXIT_FAILED

    def _clock(self, cause: str, ending: Ending, ended_at_s: float) -> RestartClock:
        """The kernel tells of a death within moments, so what detecting took is the silence of a hung worker."""
        from .progress import RestartClock

        now_s = time.monotonic()
        return RestartClock(
            cause,
            datetime.now(UTC),
            detect_ms=round(1000 * (ending.hung_s or 0.0)),
            decide_ms=round(1000 * (now_s - ended_at_s)),
            forked_at_s=now_s,
            halvings=min(self._halvings, MAX_HALVINGS),
        )


# --- how they ended --------------------------------------------------------------------------------------------------


def ran_out_of_memory(job: Job, ending: Ending) -> bool:
    """The host, as the kernel says, or the accelerator, as the worker said itself."""
    return ending.out_of_memory or (ending.status == EXIT_FAILED and failure_class(job) == "memory")


def out_of_memory(job: Job, ending: Ending) -> Failure:
    if ending.out_of_memory:
        said = "The kernel killed the worker: out of host memory"
    else:
        said = json.loads(job.tree.failure.read_text("utf-8"))["message"].rstrip(".")
    return Failure("memory", f"{said}, also with micro-batches an eighth as large.")


def failure_class(job: Job) -> str:
    """What the worker's failure file says; a worker that left none did not get to write it."""
    try:
        return str(json.loads(job.tree.failure.read_text("utf-8"))["class"])
    except (OSError, ValueError, KeyError):
        return "platform"


def prepare_environment(job: Job) -> None:
    """What must be set before torch is imported."""
    from .sagemaker_env import derive

    os.environ.update(derive(job.tree, {}, arguments=[]))
    for name, value in LIBRARIES.items():
        os.environ.setdefault(name, value)


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
