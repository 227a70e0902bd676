"""What an attempt cost, into the ledger: once per attempt, line and day, however often its end is announced."""

from __future__ import annotations

from datetime import UTC, datetime

from microtuning_core.domain.cost import AttemptRef, LedgerEntry, billed_seconds, compute_entries, price_of, total
from microtuning_core.domain.names import parse_job_name
from microtuning_core.domain.run import Run
from microtuning_core.usecases.services import Services


def record_cost(services: Services, job_name: str) -> None:
    """Describes the job and writes what is known: an estimate while it runs, the final amount once it has ended."""
    name = parse_job_name(job_name)
    run = services.runs.find(name.run_id)
    job = services.jobs.describe(job_name)
    attempt = next((each for each in run.attempts if each.attempt == name.attempt), None) if run else None
    if run is None or job is None or attempt is None:
        return
    ref = AttemptRef(run.tenant, run.run_id, name.attempt)
    for entry in compute_entries(ref, job, price_of(attempt.plan.instance_type), datetime.now(UTC)):
        services.ledger.put(entry)
    _total_up(services, run.run_id, name.attempt, billed_seconds(job, datetime.now(UTC))[1])


def run_entries(services: Services, run: Run) -> list[LedgerEntry]:
    last_day = (run.ended_at or datetime.now(UTC)).date()
    return services.ledger.entries(run.tenant, run.run_id, run.created_at.date(), last_day)


def _total_up(services: Services, run_id: str, number: int, cost_state: str) -> None:
    """The run's cost so far is the sum of its entries, read again, never added to."""

    def totalled(run: Run) -> Run:
        attempts = tuple(
            each.model_copy(update={"cost_state": cost_state})
            if each.attempt == number and each.cost_state != "final"  # a late estimate says nothing new
            else each
            for each in run.attempts
        )
        return run.with_(cost_usd=total(run_entries(services, run)), attempts=attempts)

    services.runs.update(run_id, totalled)
