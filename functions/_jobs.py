"""Which job an event is about, if it is one of this stage's."""

from __future__ import annotations

from functions._entry import logger
from functions._environment import environment
from functions._queue import Body
from microtuning_core.domain.events import job_changed
from microtuning_core.domain.names import JobName, own_job_name


def own_job(body: Body) -> JobName | None:
    """None for jobs of others, which are never touched."""
    changed = job_changed(body)
    job = own_job_name(changed.job_name, environment().stage)
    if job is None:
        logger.info("a job of others", extra={"job_name": changed.job_name})
    return job


def run_of_job(body: Body) -> str | None:
    job = own_job(body)
    return job.run_id if job else None
