"""Machines that a fast run keeps between its attempts are given back once no next attempt will take them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from microtuning_core.domain.job import ENDED_POOLS
from microtuning_core.domain.run import Attempt, Run
from microtuning_core.domain.warm_pools import fits_pool, pools_left
from microtuning_core.usecases.services import Services


def end_pools(services: Services, run: Run) -> None:
    """Of a run that is over, unless it will be taken up again: then the next attempt wants them."""
    if run.is_final and not run.goes_on:
        _end(services, pools_left(run.attempts, datetime.now(UTC)))


def end_unfit_pools(services: Services, run: Run) -> None:
    """Of earlier attempts on machines that the newest one cannot use: another type, or as many as it needs elsewhere."""
    *earlier, newest = run.attempts
    left = pools_left(earlier, datetime.now(UTC))
    _end(services, [each for each in left if not fits_pool(newest.plan, each.plan)])


def _end(services: Services, attempts: Iterable[Attempt]) -> None:
    for each in attempts:
        job = services.jobs.describe(each.job_name)
        if job is not None and job.warm_pool_status not in ENDED_POOLS:
            services.jobs.end_pool(each.job_name)
