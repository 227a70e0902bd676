"""Which job an event is about, if it is one of this stage's."""

from __future__ import annotations

from functions._entry import logger
from functions._environment import environment
from functions._queue import Body
from microtuning_core.domain.errors import InvalidName
from microtuning_core.domain.events import job_changed
from microtuning_core.domain.names import JobName, parse_job_name


def own_job(body: Body) -> JobName | None:
    """None for jobs of others: another stage's, or not ours at all. They are never touched."""
    changed = job_changed(body)
    try:
        job = parse_job_name(changed.job_name)
    except InvalidName:
        logger.info("a job of others", extra={"job_name": changed.job_name})
        return None
    return job if job.stage == environment().stage else None


def run_of_job(body: Body) -> str | None:
    job = own_job(body)
    return job.run_id if job else None
