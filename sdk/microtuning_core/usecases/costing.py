"""What an attempt cost, into the ledger: once per attempt, line and day, however often its end is announced."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial

from pydantic import ValidationError

from microtuning_core.domain.cost import CostRef, LedgerEntry, LedgerLine, superseded, total
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.layout import progress_key
from microtuning_core.domain.lines import Measured, attempt_entries, attempt_state, plan_price
from microtuning_core.domain.names import execution_name, parse_job_name
from microtuning_core.domain.orchestration import Path, execution_entry, path_of, quantities, saved_quantities
from microtuning_core.domain.progress import Progress
from microtuning_core.domain.run import Attempt, Metered, Run, metered
from microtuning_core.domain.settle import billed
from microtuning_core.domain.spending import entry_days, model_of
from microtuning_core.usecases.checkpoint import PROGRESS_BYTES
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
    seen = _metered(services, run, attempt, job)
    measured = Measured(seen.phase_ms, seen.tokens, model_of(run)) if seen else Measured(model=model_of(run))
    for entry in attempt_entries(ref, job, price, now, measured):
        services.ledger.put(entry)
    for estimate in superseded(run_entries(services, run)):
        services.ledger.drop(estimate)
    _total_up(services, run.run_id, name.attempt, job, now, seen)


def _metered(services: Services, run: Run, attempt: Attempt, job: JobFacts) -> Metered | None:
    """What the attempt measured. At its end the file itself is read: its last news may be under way for longer.

    A job writes that file as it likes. What cannot be read explains nothing, and keeps nobody from being billed.
    """
    key = progress_key(run.run_id, attempt.lineage)
    document = services.objects.read(key, at_most=PROGRESS_BYTES) if job.is_terminal else None
    try:
        last = Progress.model_validate_json(document) if document else None
    except ValidationError:
        last = None
    return metered(last) if last and last.attempt == attempt.attempt else attempt.metered


def record_orchestration(services: Services, run_id: str) -> None:
    """Writes what the executions of the run cost that have ended and are not in the ledger yet."""
    run = services.runs.get(run_id)
    while run.executions_costed is not None and run.executions_costed < run.executions:
        number = run.executions_costed + 1
        name = run.execution if number == run.executions else execution_name(run_id, number)
        path = path_of(services.executions.history(name))
        if path is None and services.executions.status(name) == "RUNNING":
            return
        entries = _execution_entries(run, number, path) if path else []
        for entry in entries:
            services.ledger.put(entry)
        run = services.runs.update(run_id, partial(_with_orchestration, services, number, entries))


def _execution_entries(run: Run, number: int, path: Path) -> list[LedgerEntry]:
    size = len(run.model_dump_json().encode())
    steered = quantities(run, path, record_bytes=size, writes=run.revision - run.costed_revision)
    lines: tuple[tuple[LedgerLine, dict[str, Decimal]], ...] = (
        ("orchestration", steered),
        ("objects", saved_quantities(run, path)),
    )
    entries = (execution_entry(run, number, line, path, amounts) for line, amounts in lines)
    return [entry for entry in entries if entry]


def _with_orchestration(services: Services, number: int, entries: Sequence[LedgerEntry], run: Run) -> Run:
    """An execution whose history is gone has nothing to be counted, and is done with all the same.

    The run keeps the entries, too: were the tables lost, nobody could count them again.
    """
    if run.executions_costed is None or run.executions_costed >= number:
        return run
    spent = total(run_entries(services, run))
    return run.with_(
        executions_costed=number,
        execution_entries=(*run.execution_entries, *entries),
        costed_revision=run.revision,
        cost_usd=spent or run.cost_usd,
    )


def run_entries(services: Services, run: Run) -> list[LedgerEntry]:
    return services.ledger.entries(run.tenant, run.run_id, *entry_days(run, datetime.now(UTC)))


def _total_up(services: Services, run_id: str, number: int, job: JobFacts, now: datetime, seen: Metered | None) -> None:
    """The run's cost so far is the sum of its entries, read again, never added to."""
    cost_state = attempt_state(job, now)
    changes = {"cost_state": cost_state} | ({"metered": seen} if seen and cost_state == "final" else {})

    def totalled(run: Run) -> Run:
        run = billed(run, number, job)
        attempts = tuple(
            each.model_copy(update=changes)
            if each.attempt == number and each.cost_state != "final"  # a late estimate says nothing new
            else each
            for each in run.attempts
        )
        return run.with_(cost_usd=total(run_entries(services, run)), attempts=attempts)

    services.runs.update(run_id, totalled)
