"""Looks at a run again: what is true, what `decide` makes of it, one write, then the actions and the waiting token.

Every handler that a fact reaches ends here, so every race collapses into deciding again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from microtuning_core.domain.budget import STOPS, WARNINGS, is_budget, without
from microtuning_core.domain.command import Command
from microtuning_core.domain.cost import shown
from microtuning_core.domain.errors import StaleRevision
from microtuning_core.domain.failures import Failure
from microtuning_core.domain.layout import checkpoints_prefix
from microtuning_core.domain.manifest import MANIFEST_NAME, newest, step_of_folder
from microtuning_core.domain.run import Attempt, Run, RunStatus
from microtuning_core.domain.settle import (
    CloseRun,
    ExecutionFacts,
    Facts,
    ReleaseSlot,
    SettleAction,
    StartExecution,
    StopJob,
    WaitingState,
    answer,
    closed,
    decide,
    judged,
)
from microtuning_core.usecases.checkpoint import with_last_words
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.tenancy import current_limits, tell_standing
from microtuning_core.usecases.warm_pools import end_pools

_TRIES = 8


def settle(
    services: Services,
    run_id: str,
    *,
    command: Command | None = None,
    refusal: Failure | None = None,
    unlaunched: int | None = None,
    ask_execution: bool = False,
) -> Run:
    """Brings the run to where the facts say it is. StaleRevision only when others kept writing all the time."""
    for _ in range(_TRIES):
        run = services.runs.get(run_id)
        facts = gather(services, run, ask_execution=ask_execution)
        facts = replace(facts, command=command, refusal=refusal, unlaunched=unlaunched)
        decision = decide(with_last_words(services, run) if _just_ended(run, facts) else run, facts)
        try:
            settled = services.runs.put(decision.run, facts.now) if decision.run != run else run
        except StaleRevision:
            continue
        services.note_recoveries(run, settled)
        _tell(services, run, settled)
        for action in decision.actions:
            perform(services, settled, action)
        deliver(services, run_id)
        return settled
    raise StaleRevision(run_id, run.revision)


def _just_ended(run: Run, facts: Facts) -> bool:
    return bool(run.current and not run.current.is_settled and facts.job and facts.job.is_terminal)


def gather(services: Services, run: Run, *, ask_execution: bool = False) -> Facts:
    """What is true of the run now; the job is asked for while its attempt is not settled, or to stop a leftover."""
    attempt = run.current
    wanted = attempt is not None and (not attempt.is_settled or run.verdict is not None)
    job = services.jobs.describe(attempt.job_name) if attempt and wanted else None
    training = job is not None and job.secondary == "Training" and ask_execution
    over = wanted and (job is None or job.is_terminal)
    return Facts(
        now=datetime.now(UTC),
        job=job,
        job_is_missing=wanted and job is None,
        execution=ExecutionFacts(run.execution, services.executions.status(run.execution)) if ask_execution else None,
        newest_step=newest_whole_step(services, run) if over else None,
        last_sign_at=services.logs.last_line_at(attempt.job_name) if attempt and training else None,
        logs_asked=training,
    )


def newest_whole_step(services: Services, run: Run, lineage: int | None = None) -> int | None:
    """The highest step of the lineage whose manifest lies in S3, by number and never by name."""
    prefix = checkpoints_prefix(run.run_id, lineage or run.lineage)
    folders = [key.key.removeprefix(prefix).split("/") for key in services.objects.walk(prefix)]
    steps = [step_of_folder(parts[0]) for parts in folders if parts[1:] == [MANIFEST_NAME]]
    return newest(step for step in steps if step is not None)


def _tell(services: Services, before: Run, run: Run) -> None:
    """What a person should be able to read later: an attempt's end, and a change of where the run stands."""
    attempt = run.current
    if attempt and attempt.is_settled and not _was_settled(before, attempt):
        message = attempt.failure.message if attempt.failure else attempt.outcome or ""
        failure_class = attempt.failure.failure_class if attempt.failure else None
        services.runs.note(
            run.run_id,
            "attempt_ended",
            message,
            attempt=attempt.attempt,
            outcome=attempt.outcome,
            failure_class=failure_class,
        )
    _tell_of_budget(services, before, run)
    if (before.status, before.verdict) != (run.status, run.verdict):
        services.runs.note(run.run_id, "status", run.reason or "", status=run.status, verdict=run.verdict)


def _tell_of_budget(services: Services, before: Run, run: Run) -> None:
    """Its own budget; what a tenant's does is told by who looks at all its runs (usecases/budgets.py)."""
    if run.budget_warned_usd is not None and run.budget_warned_usd != before.budget_warned_usd:
        services.count(WARNINGS)
        services.runs.note(run.run_id, "budget_warning", f"80 % of {shown(run.budget_warned_usd)} USD are spent")
    if is_budget(run.stop_requested) and not before.stop_requested:
        services.count(STOPS)
        services.runs.note(run.run_id, "budget_stop", run.stop_requested or "")


def _was_settled(before: Run, attempt: Attempt) -> bool:
    return any(each.attempt == attempt.attempt and each.is_settled for each in before.attempts)


def perform(services: Services, run: Run, action: SettleAction) -> None:
    match action:
        case StopJob(job_name):
            services.jobs.stop(job_name)
        case StartExecution():
            services.executions.start(run.execution, {"run_id": run.run_id})
        case CloseRun():
            close(services, run)
        case ReleaseSlot():
            services.admissions.release(run.run_id, run.reopenings)
            grant_slots(services, run.tenant)


def deliver(services: Services, run_id: str) -> None:
    """Tells every state that waits for this run what it waits for, once that is known.

    More than one waits when a message came late or twice: its state is gone, and telling it changes nothing. The run is
    read after the tokens: an older record, of a run that was over, must not answer a state of the run taken up again.
    """
    waiting_states = services.runs.tokens(run_id)
    if waiting_states:
        run = services.runs.get(run_id)
        for waiting in waiting_states:
            _deliver_to(services, run, waiting)


def _deliver_to(services: Services, run: Run, waiting: WaitingState) -> None:
    holds = waiting.state == "admit" and services.admissions.holds(run.run_id)
    word = answer(run, waiting, holds_slot=holds)
    if word is None:
        return
    if waiting.state == "admit" and word != "admitted":
        services.executions.fail(waiting.token, f"Run{word.capitalize()}", run.reason or word)
    else:
        services.executions.succeed(waiting.token, {"run_id": run.run_id, "outcome": word})
    services.runs.delete_token(run.run_id, waiting.token)


def close(services: Services, run: Run, error: str | None = None) -> Run:
    """Gives the verdict, frees the slot, writes the final status, and lets the next run in. Closing twice changes nothing.

    Only while the execution that `run` was read with carries it: one that was closed and taken up again meanwhile goes on.
    The slot goes before the final status, since a run that is over may be taken up, and have a slot again, from that moment
    on; and after the verdict, so that a run without a slot whose closing was killed is not taken up, but closed.
    """
    latest = services.runs.update(run.run_id, lambda each: _judged(each, run.execution, error))
    if latest.execution != run.execution:
        return latest
    services.admissions.forget(run.run_id, latest.reopenings)
    ended = services.runs.update(run.run_id, lambda each: _closed(each, run.execution, error))
    if not latest.is_final:
        services.runs.note(run.run_id, "ended", ended.reason or "", status=ended.status)
    grant_slots(services, ended.tenant)
    end_pools(services, ended)
    attempt = ended.current
    leftover = attempt is not None and not attempt.is_settled
    if leftover or ended.goes_on:
        settle(services, run.run_id)  # stops a job that nobody waits for any more; takes up a run that shall go on
    return ended


def _judged(run: Run, execution: str, error: str | None) -> Run:
    return judged(run, error) if run.execution == execution else run


def _closed(run: Run, execution: str, error: str | None) -> Run:
    return closed(run, datetime.now(UTC), error) if run.execution == execution else run


def grant_slots(services: Services, *about: str) -> None:
    """Gives every free slot to whom it belongs, and wakes those who got one.

    Args:
        about: the tenants of whom something has changed.
    """
    changes, now = services.admissions.limit_changes(), datetime.now(UTC)
    limits = without(current_limits(services, changes), services.budget_marks.closed(now))
    granted = services.admissions.grant(limits, now)
    for run_id in granted.run_ids:
        begin_planning(services, run_id)
    tell_standing(services, granted, changes, about, now)


def begin_planning(services: Services, run_id: str) -> Run:
    """A run that holds a slot goes on to be planned; one that ended meanwhile gives the slot back."""
    run = services.runs.update(run_id, _planned)
    if run.is_final:
        services.admissions.forget(run_id, run.reopenings)
    deliver(services, run_id)
    return run


def _planned(run: Run) -> Run:
    waits = run.status == RunStatus.QUEUED and run.verdict is None
    return run.moved_to(RunStatus.PLANNING, reason=None, not_before=None) if waits else run
