"""Whether what a machine saves arrives in S3. SageMaker's mirror of the checkpoint folder has stopped without a word.

Two signs: the machine said (progress.json) that a checkpoint is whole which is not registered; or progress.json itself,
which the same mirror carries, is old while the job trains.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from microtuning_core.domain.run import Run, RunStatus

LATE_MIRRORS = "LateMirrors"  # the metric that counts them
LATE_AFTER = timedelta(minutes=30)
LATE_STEPS = 5  # or this many times the longest step, whichever is longer


def is_training(run: Run) -> bool:
    attempt = run.current
    return (
        run.status == RunStatus.TRAINING and attempt is not None and bool(attempt.started_at) and not attempt.is_settled
    )


def checkpoint_age(run: Run, now: datetime) -> timedelta | None:
    """How much a machine that vanishes now would take with it; None while nothing trains."""
    attempt = run.current
    if not is_training(run) or attempt is None or attempt.started_at is None:
        return None
    since = max(run.checkpointed_at or attempt.started_at, attempt.started_at)
    return max(timedelta(), now - since)


def mirror_lag(run: Run, now: datetime) -> timedelta:
    """For how long something that the machine has should have been in S3 by now; nothing where all has come."""
    attempt, liveness = run.current, run.liveness
    if not is_training(run) or attempt is None or attempt.started_at is None:
        return timedelta()
    heard_at = max(liveness.at, attempt.started_at) if liveness else attempt.started_at
    saved = liveness.checkpoint if liveness else None
    registered = run.last_checkpoint.step if run.last_checkpoint else -1
    awaited_since = max(saved.at, attempt.started_at) if saved and saved.step > registered else now
    return max(timedelta(), now - min(heard_at, awaited_since))


def mirror_is_late(run: Run, now: datetime) -> bool:
    """Loading a large model takes minutes too, and progress.json comes between steps alone."""
    longest_step = timedelta(milliseconds=run.liveness.longest_step_ms if run.liveness else 0)
    return mirror_lag(run, now) > max(LATE_AFTER, LATE_STEPS * longest_step)


def looked_at(run: Run, now: datetime) -> Run:
    """The run with the moment since when its mirror has been late, kept while it is."""
    if not mirror_is_late(run, now):
        return run if run.mirror_late_since is None else run.with_(mirror_late_since=None)
    return run if run.mirror_late_since else run.with_(mirror_late_since=now - mirror_lag(run, now))
