"""What an attempt cost, into the ledger: once per attempt, line and day, however often its end is announced."""

from __future__ import annotations

from datetime import UTC, datetime

from microtuning_core.domain.cost import CostRef, LedgerEntry, superseded, total
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.lines import Measured, attempt_entries, attempt_state, plan_price
from microtuning_core.domain.names import parse_job_name
from microtuning_core.domain.run import Run
from microtuning_core.domain.settle import billed
from microtuning_core.domain.spending import entry_days, model_of
from microtuning_core.usecases.services import Services


def record_cost(services: Services, job_name: str) -> None:
    """Describes the job and writes what is known: an estimate while it runs, the final amount once it has ended."""
    name = parse_job_name(job_name)
    run = services.runs.find(name.run_id)
    job = services.jobs.describe(job_name)
    attempt = next((each for each in run.attempts if each.attempt == name.attempt), None) if run else None
    if run is None or job is None or attempt is None:
        return
    now = datetime.now(UTC)
    ref = CostRef(run.tenant, run.run_id, name.attempt)
    price = plan_price(attempt.plan, attempt.created_at.date())
    for entry in attempt_entries(ref, job, price, now, Measured(model=model_of(run))):
        services.ledger.put(entry)
    for estimate in superseded(run_entries(services, run)):
        services.ledger.drop(estimate)
    _total_up(services, run.run_id, name.attempt, job, now)


def run_entries(services: Services, run: Run) -> list[LedgerEntry]:
    return services.ledger.entries(run.tenant, run.run_id, *entry_days(run, datetime.now(UTC)))


def _total_up(services: Services, run_id: str, number: int, job: JobFacts, now: datetime) -> None:
    """The run's cost so far is the sum of its entries, read again, never added to."""
    cost_state = attempt_state(job, now)

    def totalled(run: Run) -> Run:
        run = billed(run, number, job)
        attempts = tuple(
            each.model_copy(update={"cost_state": cost_state})
            if each.attempt == number and each.cost_state != "final"  # a late estimate says nothing new
            else each
            for each in run.attempts
        )
        return run.with_(cost_usd=total(run_entries(services, run)), attempts=attempts)

    services.runs.update(run_id, totalled)
