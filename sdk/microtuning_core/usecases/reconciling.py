"""Whatever no event told: every open run is looked at again, costs are completed, slots and S3 are put right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from microtuning_core.domain.run import RunStatus
from microtuning_core.usecases.costing import record_cost
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import begin_planning, grant_slots, settle

_LOG = logging.getLogger(__name__)


def reconcile(services: Services) -> list[str]:
    """Looks at every run that is not over; the run_ids. One run's trouble never keeps the others waiting.

    Raises:
        ExceptionGroup: at the end, with what could not be put right; the next tick tries again.
    """
    errors: list[Exception] = []
    seen: list[str] = []
    for tenant in services.admissions.tenants():
        for run_id in services.runs.open_run_ids(tenant):
            seen.append(run_id)
            _collect(errors, run_id, partial(reconcile_run, services, run_id))
    _collect(errors, "slots", lambda: _reconcile_slots(services))
    if errors:
        raise ExceptionGroup("some runs could not be reconciled", errors)
    return seen


def _collect(errors: list[Exception], name: str, step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:
        _LOG.exception("reconciling %s failed", name)
        errors.append(error)


def reconcile_run(services: Services, run_id: str) -> None:
    run = settle(services, run_id, ask_execution=True)
    for attempt in run.attempts:
        over = attempt.is_settled or run.is_final
        if attempt.launched_at and over and attempt.cost_state != "final":
            record_cost(services, attempt.job_name)
    run = services.runs.get(run_id)
    if services.runs.mirrored_revision(run_id) < run.revision:
        services.runs.mirror(run)


def _reconcile_slots(services: Services) -> None:
    """A slot held by nobody who may hold it is freed; then free slots are given."""
    now = datetime.now(UTC)
    for run_id in services.admissions.slots().held:
        run = services.runs.find(run_id)
        if run is None or run.is_final or run.waits_out(now):
            services.admissions.release(run_id)
        elif run.status == RunStatus.QUEUED:  # it got the slot, and whoever gave it was gone before telling
            begin_planning(services, run_id)
    grant_slots(services)
