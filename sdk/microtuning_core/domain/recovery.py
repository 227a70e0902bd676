"""Every way a run came back from a failure, with its five stages: detect, decide, provision, restore, first new step.

A worker that was started again in place reports all five itself. A machine that spot took and gave again, and an attempt
that followed a failed one, are put together here from what SageMaker, our tables and the new machine say:

    detect     the job's end            -> understood here
    decide     understood               -> the next job asked for
    provision  asked for                -> its machine trains (of spot: taken -> given again)
    restore    the process begins       -> the checkpoint is loaded and it can train
    first step of the new machine
"""

from __future__ import annotations

from datetime import datetime, timedelta

from microtuning_core.domain.progress import Start
from microtuning_core.domain.run import Attempt, Recovery, Run

INTERRUPTED = "interrupted"
STAGES = ("detect_ms", "decide_ms", "provision_ms", "restore_ms", "first_step_ms")


def recoveries(run: Run) -> list[Recovery]:
    """In the order of their failures. A stage that has not come yet, or that nobody measured, is None."""
    found = [_with_start(each, attempt.starts) for attempt in run.attempts for each in attempt.recoveries]
    failed = [(i, attempt) for i, attempt in enumerate(run.attempts) if _broke_off(attempt)]
    found += [again for i, attempt in failed if (again := _next_attempt(attempt, run.attempts[i + 1 :])) is not None]
    return sorted(found, key=lambda each: each.at)


def total_ms(recovery: Recovery) -> int | None:
    """From the failure to the first new step; None until that is made."""
    stages = [getattr(recovery, name) for name in STAGES]
    return sum(each or 0 for each in stages) if recovery.first_step_ms is not None else None


def newly_complete(before: Run, after: Run) -> list[Recovery]:
    """Those whose first new step has been heard of since."""
    known = {(each.cause, each.at) for each in recoveries(before) if each.first_step_ms is not None}
    return [each for each in recoveries(after) if each.first_step_ms is not None and (each.cause, each.at) not in known]


def _broke_off(attempt: Attempt) -> bool:
    """It failed on a machine; one that was refused had nothing to come back from."""
    return attempt.outcome == "failed" and attempt.started_at is not None and attempt.ended_at is not None


def _with_start(recovery: Recovery, starts: tuple[Start, ...]) -> Recovery:
    """An interruption is over with the first start after it."""
    if recovery.cause != INTERRUPTED:
        return recovery
    again = next((each for each in starts if each.at > recovery.at), None)
    return recovery if again is None else recovery.model_copy(update=_start_of(again))


def _start_of(start: Start) -> dict[str, int | None]:
    return {"restore_ms": start.restore_ms, "first_step_ms": start.first_step_ms}


def _way_back(attempt: Attempt) -> dict[str, int | None]:
    """Its machine's start; where its worker died before a step, the first step is that of the worker after it."""
    if not attempt.starts:
        return {}
    start = attempt.starts[0]
    restarted = (each for each in attempt.recoveries if each.cause != INTERRUPTED and total_ms(each) is not None)
    again = next(restarted, None)
    if start.first_step_ms is not None or again is None:
        return _start_of(start)
    stepped_at = again.at + timedelta(milliseconds=total_ms(again) or 0)
    return _start_of(start) | {"first_step_ms": _ms(start.at, stepped_at)}


def _next_attempt(failed: Attempt, later: tuple[Attempt, ...]) -> Recovery | None:
    """How the run came back from an attempt that failed: by the next that made a step, whatever was refused or lost
    between; until one has, by the next that got a machine.
    """
    if not later or failed.failure is None or failed.ended_at is None:
        return None
    tries = [each.launched_at or each.created_at for each in later]
    with_machine = [each for each in later if each.started_at is not None]
    stepped = (each for each in with_machine if _way_back(each).get("first_step_ms") is not None)
    back = next(stepped, next(iter(with_machine), None))
    recovery = Recovery(
        cause=failed.failure.failure_class.value,
        at=failed.ended_at,
        detect_ms=_ms(failed.ended_at, failed.settled_at),
        decide_ms=_ms(failed.settled_at, tries[0]),
        provision_ms=_ms(tries[0], back.started_at) if back else None,
    )
    return recovery.model_copy(update=_way_back(back)) if back else recovery


def _ms(since: datetime | None, until: datetime | None) -> int | None:
    """Two machines' clocks may differ: what would be negative is none."""
    return max(0, round(1000 * (until - since).total_seconds())) if since and until else None
