"""Going back: a run that goes on from one of its older checkpoints, as a new lineage; and which checkpoint was meant.

A rollback is asked for (`rollback_to`), then waits for the job that still trains to end, then becomes the next lineage. A
run that is over already is taken up again, by an execution of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from microtuning_core.domain.run import REMEMBERED_COMMANDS, CheckpointRef, Run, RunStatus

_S = RunStatus
# Where a lineage may begin without asking anybody: nothing trains and nothing is being registered.
_BETWEEN_JOBS = frozenset({_S.SUBMITTED, _S.QUEUED, _S.PLANNING, _S.RECOVERING, _S.TRAINING})


class Located(Protocol):
    """A registered checkpoint, as far as finding it goes."""

    @property
    def lineage(self) -> int: ...
    @property
    def step(self) -> int: ...


def find_checkpoint(checkpoints: Iterable[Located], step: int | None, lineage: int | None) -> CheckpointRef | None:
    """The one that was meant: of the newest lineage that has the step; without a step, its newest."""
    fitting = [each for each in checkpoints if (lineage in (None, each.lineage)) and (step in (None, each.step))]
    if not fitting:
        return None
    found = max(fitting, key=lambda each: (each.lineage, each.step))
    return CheckpointRef(lineage=found.lineage, step=found.step)


def asked_to_go_back(run: Run, to: CheckpointRef, command_id: str) -> Run:
    """The wish, once a command, however often it is delivered."""
    if command_id in run.obeyed:
        return run
    return run.with_(rollback_to=to, obeyed=(*run.obeyed, command_id)[-REMEMBERED_COMMANDS:])


def may_branch(run: Run) -> bool:
    """Whether the wished lineage can begin now: no job of the run is under way, and no verdict is on its way out."""
    attempt = run.current
    is_free = attempt is None or attempt.is_settled
    return run.rollback_to is not None and run.verdict is None and is_free and run.status in _BETWEEN_JOBS


def branched(run: Run, **changes: Any) -> Run:
    """The next lineage, from the checkpoint that was wished for. Checkpoints of the older ones stay where they are."""
    status = _S.RECOVERING if run.status == _S.TRAINING else run.status
    beginning: dict[str, Any] = {
        "lineage": run.lineage + 1,
        "resume_from": run.rollback_to,
        "rollback_to": None,
        "last_checkpoint": None,
        "liveness": None,
        "reason": f"continues from step {run.rollback_to.step}" if run.rollback_to else run.reason,
    }
    return run.moved_to(status, **(beginning | changes))


def reopened(run: Run) -> Run:
    """A run that is over, in the queue again for its next lineage, or to go on as it was; the next execution carries it."""
    number = run.executions + 1
    queued = run.moved_to(
        _S.QUEUED,
        verdict=None,
        failure=None,
        stop_requested=None,
        ended_at=None,
        model_version=None,
        resume_requested=False,
        reason=None,
        not_before=None,
        waiting_for_capacity_since=None,
        executions=number,
        reopenings=run.reopenings + 1,
        execution=f"{run.run_id}-e{number}",
    )
    return branched(queued) if queued.rollback_to else queued
