"""Whatever no event told: every open run is looked at again, costs are completed, slots and S3 are put right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from microtuning_core.domain.layout import run_record_key
from microtuning_core.domain.mirror import checkpoint_age, looked_at
from microtuning_core.domain.names import JobName
from microtuning_core.domain.run import Run, RunStatus
from microtuning_core.usecases.budgets import mind_budgets
from microtuning_core.usecases.costing import record_cost, record_orchestration
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import begin_planning, grant_slots, settle
from microtuning_core.usecases.tenancy import refresh_standings
from microtuning_core.usecases.warm_pools import end_pools

_LOG = logging.getLogger(__name__)


@dataclass
class Tick:
    """What one look at everything saw.

    looked_at: ids of the runs that are not over. late: of those whose checkpoints do not reach S3.
    oldest_checkpoint_s: age of the oldest among the newest checkpoints of the runs that train; None where none does.
    """

    looked_at: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    oldest_checkpoint_s: int | None = None


def reconcile(services: Services) -> Tick:
    """Looks at every run that is not over. One run's trouble never keeps the others waiting.

    Raises:
        ExceptionGroup: at the end, with what could not be put right; the next tick tries again.
    """
    errors: list[Exception] = []
    tick = Tick()
    for tenant in services.admissions.tenants():
        for run_id in services.runs.open_run_ids(tenant):
            tick.looked_at.append(run_id)
            _collect(errors, run_id, partial(reconcile_run, services, run_id))
            _collect(errors, run_id, partial(check_mirror, services, run_id, tick))
        _collect(errors, f"budgets of {tenant}", partial(mind_budgets, services, tenant))
    _collect(errors, "slots", lambda: _reconcile_slots(services))
    _collect(errors, "jobs", lambda: stop_orphans(services))
    if errors:
        raise ExceptionGroup("some runs could not be reconciled", errors)
    return tick


def _collect(errors: list[Exception], name: str, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:
        _LOG.exception("reconciling %s failed", name)
        errors.append(error)


def reconcile_run(services: Services, run_id: str) -> None:
    run = settle(services, run_id, ask_execution=True)
    end_pools(services, run)  # closing it did so, unless its function died first
    for attempt in run.attempts:
        over = attempt.is_settled or run.is_final
        if attempt.launched_at and over and attempt.cost_state != "final":
            record_cost(services, attempt.job_name)
    record_orchestration(services, run_id)
    run = services.runs.get(run_id)
    if services.runs.mirrored_revision(run_id) < run.revision:
        services.runs.mirror(run)


def check_mirror(services: Services, run_id: str, tick: Tick) -> None:
    """Counts how old the run's checkpoint is, and writes down once that its mirror is late."""
    now = datetime.now(UTC)
    before = services.runs.get(run_id)
    run = services.runs.update(run_id, lambda run: looked_at(run, now))
    if (age := checkpoint_age(run, now)) is not None:
        tick.oldest_checkpoint_s = max(tick.oldest_checkpoint_s or 0, int(age.total_seconds()))
    if run.mirror_late_since is None:
        return
    tick.late.append(run_id)
    if before.mirror_late_since is None:
        services.runs.note(run_id, "mirror_late", f"nothing has reached S3 since {run.mirror_late_since:%H:%M:%S} UTC")


def stop_orphans(services: Services) -> None:
    """Stops the stage's jobs that no run wants any more, or that no run has ever wanted as far as anybody remembers."""
    for job in services.jobs.in_progress(services.names.stage):
        if _is_orphan(services, job):
            _LOG.warning("job %s is wanted by no run and is stopped", job)
            services.jobs.stop(str(job))


def _is_orphan(services: Services, job: JobName) -> bool:
    """A run that S3 remembers better than the tables is to be read back (rebuilding.py), its job left alone until then."""
    run = services.runs.find(job.run_id)
    if run is not None and job.attempt <= len(run.attempts):
        return not run.wants_job(job.attempt)
    remembered = services.objects.read(run_record_key(job.run_id))
    if run is None or remembered is None:
        return remembered is None
    return job.attempt > len(Run.model_validate_json(remembered).attempts)


def _reconcile_slots(services: Services) -> None:
    """A slot held by nobody who may hold it is freed; then free slots are given."""
    now = datetime.now(UTC)
    for run_id in services.admissions.slots().held:
        run = services.runs.find(run_id)
        if run is None or run.is_final or run.waits_out(now):
            services.admissions.release(run_id, run.reopenings if run else None)
        elif run.status == RunStatus.QUEUED:  # it got the slot, and whoever gave it was gone before telling
            begin_planning(services, run_id)
    grant_slots(services)
    refresh_standings(services)
