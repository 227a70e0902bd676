"""The tables again, from what S3 remembers: after they were lost, or a region was. Nothing that the tables know is undone.

    tenants/<t>/runs/<run_id>/run.json                -> the run, unless its row has this revision or a newer one
    …/checkpoints/l<NN>/step-<n>/manifest.json        -> a registered checkpoint
    tenants/<t>/models/<group>/v<NNNN>.json           -> how far the group's versions are counted
    DescribeTrainingJob of every attempt              -> the ledger, beside what the run keeps of its executions

Slots and executions follow by themselves: the reconciler finds that an open run has no execution and starts it, and the run
asks to be let in like any other. What people read of a run's history (its events) is not in S3 and stays lost.
"""

from __future__ import annotations

import logging
import re

from pydantic import ValidationError

from microtuning_core.domain.errors import NotYetWhole
from microtuning_core.domain.layout import parse_checkpoint_key, run_prefix, run_record_key
from microtuning_core.domain.run import Run
from microtuning_core.usecases.checkpoint import register
from microtuning_core.usecases.costing import record_cost
from microtuning_core.usecases.services import Services

_LOG = logging.getLogger(__name__)
_VERSION = re.compile(r"v(\d+)\.json")


def rebuild(services: Services) -> list[str]:
    """Puts back what the tables lack; the run_ids that were put back. Safe to repeat, and beside a living stage."""
    restored = []
    for prefix in services.objects.folders("tenants/"):
        tenant = prefix.removeprefix("tenants/").rstrip("/")
        runs = [run for folder in services.objects.folders(f"{prefix}runs/") if (run := _remembered(services, folder))]
        if runs:
            services.admissions.remember(tenant)
        restored += [run.run_id for run in runs if _restore(services, run)]
        _restore_versions(services, tenant)
    return restored


def _remembered(services: Services, folder: str) -> Run | None:
    """The record in a run's folder; one that cannot be read is logged and must not hide the others."""
    body = services.objects.read(f"{folder}run.json")
    try:
        run = Run.model_validate_json(body) if body else None
    except ValidationError:
        _LOG.exception("%srun.json cannot be read", folder)
        return None
    return run if run and run_record_key(run.run_id) == f"{folder}run.json" else None


def _restore(services: Services, run: Run) -> bool:
    if not services.runs.restore(run):
        return False
    for stored in services.objects.walk(f"{run_prefix(run.run_id)}checkpoints/"):
        key = parse_checkpoint_key(stored.key)
        if key and key.step is not None:
            try:
                register(services, key)
            except NotYetWhole:
                _LOG.warning("%s is not whole and was not registered", stored.key)
    for entry in run.execution_entries:
        services.ledger.put(entry)
    for attempt in run.attempts:
        if attempt.launched_at:
            record_cost(services, attempt.job_name)
    services.runs.note(run.run_id, "rebuilt", f"revision {run.revision} was read back from S3")
    return True


def _restore_versions(services: Services, tenant: str) -> None:
    for folder in services.objects.folders(f"tenants/{tenant}/models/"):
        group = folder.rstrip("/").rsplit("/", 1)[-1]
        found = [_VERSION.fullmatch(stored.key.removeprefix(folder)) for stored in services.objects.walk(folder)]
        numbers = [int(match[1]) for match in found if match]
        if numbers:
            services.runs.count_versions_from(tenant, group, max(numbers))
