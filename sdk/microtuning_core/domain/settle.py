"""The one place that decides what becomes of a run. Pure: facts in, the next record and what to do out.

    a fact arrives -> name the run -> Describe what is true -> decide(run, facts) -> one store write -> actions, tokens

Facts may come late, twice, out of order or not at all (then the reconciler asks): deciding again on the same facts changes
nothing, an attempt that is settled stays as it is, and a run that is final stays final.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from microtuning_core.domain.branching import branched, may_branch, reopened
from microtuning_core.domain.budget import buys_more, is_budget, mind_budget, used_up
from microtuning_core.domain.command import Command
from microtuning_core.domain.failures import (
    Action,
    ActionKind,
    AttemptSummary,
    Failure,
    FailureClass,
    action_for,
    classify_job,
)
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.run import Attempt, CheckpointRef, FailureNote, Outcome, Recovery, Run, RunStatus

SILENT_AFTER = timedelta(minutes=10)
SILENT_STEPS = 5  # or this many times the longest step, whichever is longer
MAX_EXECUTIONS = 10

_DEAD = frozenset({"FAILED", "TIMED_OUT", "ABORTED"})
ExecutionStatus = Literal["RUNNING", "SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED", "PENDING_REDRIVE", "MISSING"]


@dataclass(frozen=True)
class ExecutionFacts:
    """How the execution of that name stands; of an earlier one of the run it is no news."""

    name: str
    status: ExecutionStatus


@dataclass(frozen=True)
class Facts:
    """What is true now. None = was not asked, which never means "no".

    `refusal`: CreateTrainingJob said no, which is no news of a job that is there all the same (the launch came twice).
    `unlaunched`: the attempt whose launch asks for no job, any more or at all; None where nobody said so.
    `logs_asked`: whether `last_sign_at` None means that the job has written no log line. Silence is judged only then.
    """

    now: datetime
    job: JobFacts | None = None
    job_is_missing: bool = False
    refusal: Failure | None = None
    unlaunched: int | None = None
    command: Command | None = None
    execution: ExecutionFacts | None = None
    newest_step: int | None = None
    last_sign_at: datetime | None = None
    logs_asked: bool = False
    recoveries: tuple[Recovery, ...] = ()


@dataclass(frozen=True)
class StopJob:
    job_name: str


@dataclass(frozen=True)
class StartExecution:
    """Under run.execution, with the run's id as input; one that exists already is success."""


@dataclass(frozen=True)
class CloseRun:
    """No execution lives to close it: do it now."""


@dataclass(frozen=True)
class ReleaseSlot:
    """The run waits for capacity; somebody else may use its slot."""


SettleAction = StopJob | StartExecution | CloseRun | ReleaseSlot


@dataclass(frozen=True)
class Decision:
    run: Run
    actions: tuple[SettleAction, ...] = field(default=())


def decide(run: Run, facts: Facts) -> Decision:
    """What the run becomes, and what must be done for it, given what is true.

    The order of the rules is the order of authority: what is final stays; a settled end keeps; then the user's word, then
    the job's own end, then silence, then the state of the execution that carries the run.
    """
    if run.is_final:
        return _after_the_end(run, facts)
    decided = run
    if run.verdict is None:
        decided = _hear(decided, facts)
        decided = _see_job(decided, facts)
        decided = mind_budget(decided, facts.now)
        decided = _honour_stop(decided, facts)
        decided = _notice_silence(decided, facts)
        decided = _go_back(decided, facts)
    decided = _take_up(decided, facts)
    return Decision(decided, _actions(run, decided, facts))


def _hear(run: Run, facts: Facts) -> Run:
    """A cancel; one that comes while a budget stops the run says that it shall not go on after a raise."""
    if facts.command is None or facts.command.verb != "cancel":
        return run
    if run.stop_requested and not is_budget(run.stop_requested):
        return run
    return run.with_(stop_requested="cancelled by its user", resume_requested=False)


def _after_the_end(run: Run, facts: Facts) -> Decision:
    """A run that is over stays so, and only notes how its last job ends.

    Unless its user went back, or lets it go on: then another execution takes it up, once that job has ended.
    """
    ended = _see_leftover_end(run, facts)
    is_free = ended.current is None or ended.current.is_settled
    if ended.goes_on and is_free:
        return Decision(reopened(ended), (StartExecution(),))
    return Decision(ended, _leftover_job(ended, facts))


def _see_leftover_end(run: Run, facts: Facts) -> Run:
    """The end of a job that still ran, or was never made, when its run was closed."""
    attempt, job = run.current, facts.job
    if attempt is None or attempt.is_settled:
        return run
    if facts.job_is_missing:
        return _settle(run, "stopped", facts, billed_s=0)
    if job is None or job.job_name != attempt.job_name or not job.is_terminal:
        return run
    seen = run.with_current(started_at=job.started_at, launched_at=attempt.launched_at or job.created_at)
    if job.status == "Completed":
        return _settle(seen, "completed", facts)
    return _settle(seen, "stopped" if job.status == "Stopped" else "failed", facts, classify_job(job))


def _go_back(run: Run, facts: Facts) -> Run:
    """A rollback: the job that trains is stopped first; where there is none, the next lineage begins at once."""
    attempt = run.current
    if run.rollback_to is None or run.stop_requested or run.verdict:
        return run
    if may_branch(run):
        return branched(run)
    if attempt is None or attempt.is_settled:
        return run  # being evaluated: it ends first, and is taken up again
    if _has_no_job(attempt, facts):
        return branched(_settle(run, "stopped", facts, billed_s=0))
    return run if attempt.stop_cause else run.with_current(stop_cause="rollback")


def _has_no_job(attempt: Attempt, facts: Facts) -> bool:
    """No job was asked for, or its launch says that none will be; one that is being asked for is waited for."""
    is_asked_for = attempt.launched_at is not None and facts.unlaunched != attempt.attempt
    return facts.job is None and not is_asked_for


def _see_job(run: Run, facts: Facts) -> Run:
    attempt = run.current
    if attempt is None or attempt.is_settled:
        return run
    if facts.refusal is not None and facts.job is None and facts.unlaunched in (None, attempt.attempt):
        return _after_failure(_settle(run, "failed", facts, facts.refusal, billed_s=0), facts.refusal, facts)
    if facts.job is None or facts.job.job_name != attempt.job_name:
        return run
    seen = run.with_current(started_at=facts.job.started_at, launched_at=attempt.launched_at or facts.job.created_at)
    seen = seen.with_current(recoveries=_recoveries(seen.current, facts))
    seen = _see_machine(seen, facts.job)
    return _see_end(seen, facts.job, facts) if facts.job.is_terminal else seen


def _see_machine(run: Run, job: JobFacts) -> Run:
    """The wait for capacity ends with the machine; how long it was counts towards the deadline of all of them."""
    since = run.waiting_for_capacity_since
    if since is None or job.started_at is None:
        return run
    waited_s = max(0, int((job.started_at - since).total_seconds()))
    return run.with_(waiting_for_capacity_since=None, waited_for_capacity_s=run.waited_for_capacity_s + waited_s)


def _recoveries(attempt: Attempt | None, facts: Facts) -> tuple[Recovery, ...]:
    """Restarts in place that the container reported, and interruptions that SageMaker's own history shows."""
    known = {(each.cause, each.at): each for each in (attempt.recoveries if attempt else ())}
    known |= {(each.cause, each.at): each for each in (*facts.recoveries, *_interruptions(facts.job))}
    return tuple(sorted(known.values(), key=lambda each: each.at))


def _interruptions(job: JobFacts | None) -> list[Recovery]:
    """A spot machine taken away and given again inside one job: Interrupted -> Starting -> … -> Training."""
    changes = job.changes if job else ()
    found = []
    for i, change in enumerate(changes):
        if change.status == "Interrupted":
            again = next((later.started_at for later in changes[i + 1 :] if later.status == "Training"), None)
            provision_ms = int((again - change.started_at).total_seconds() * 1000) if again else None
            found.append(Recovery(cause="interrupted", at=change.started_at, provision_ms=provision_ms))
    return found


def _see_end(run: Run, job: JobFacts, facts: Facts) -> Run:
    if run.rollback_to and not run.stop_requested:
        outcome: Outcome = "completed" if job.status == "Completed" else "stopped"
        return branched(_settle(run, outcome, facts))
    if job.status == "Completed":
        return _not_stopped_after_all(_settle(run, "completed", facts)).moved_to(RunStatus.EVALUATING)
    attempt = run.current
    silent = attempt is not None and attempt.stop_cause == "silent"
    failure = _silence() if silent else classify_job(job)
    if run.stop_requested and job.status == "Stopped":
        return _give_verdict(_settle(run, "stopped", facts), "stopped", run.stop_requested)
    outcome = "stopped" if job.status == "Stopped" and not silent else "failed"
    return _after_failure(_settle(run, outcome, facts, failure), failure, facts)


def _not_stopped_after_all(run: Run) -> Run:
    """A budget has nothing left to stop where the training is done."""
    return run.with_(stop_requested=None, resume_requested=False) if is_budget(run.stop_requested) else run


def _silence() -> Failure:
    return Failure(FailureClass.PLATFORM, "the job gave no sign of life and was stopped")


def _settle(
    run: Run, outcome: Outcome, facts: Facts, failure: Failure | None = None, billed_s: int | None = None
) -> Run:
    """The attempt's end, once; what it cost comes with the job's facts."""
    job = facts.job
    return run.with_current(
        outcome=outcome,
        failure=_note(failure) if failure else None,
        ended_at=(job.ended_at if job else None) or facts.now,
        settled_at=facts.now,
        launched_at=run.attempts[-1].launched_at if job else None,
        billed_s=_told_s(job, job.billed_s) if job else billed_s,
        training_s=_told_s(job, job.training_s) if job else billed_s,
        checkpoint_step=facts.newest_step if facts.newest_step is not None else _registered_step(run),
    )


def _told_s(job: JobFacts, seconds: int | None) -> int | None:
    """Seconds that SageMaker tells of an ended job. It may do so late; of one that never had a machine it says nothing."""
    return 0 if seconds is None and job.started_at is None else seconds


def billed(run: Run, number: int, job: JobFacts) -> Run:
    """With what SageMaker billed for that attempt: told later than its end, or of a job that nobody waited for."""
    found = [each for each in run.attempts if each.attempt == number and each.is_settled]
    if not found or not job.is_terminal or job.billed_s is None:
        return run
    told = found[0].model_copy(update={"billed_s": job.billed_s, "training_s": job.training_s})
    return run.with_(attempts=tuple(told if each.attempt == number else each for each in run.attempts))


def _registered_step(run: Run) -> int | None:
    last = run.last_checkpoint
    return last.step if last and last.lineage == run.lineage else None


def _note(failure: Failure) -> FailureNote:
    return FailureNote(
        failure_class=failure.failure_class, message=failure.message, file=failure.file, line=failure.line
    )


def _after_failure(run: Run, failure: Failure, facts: Facts) -> Run:
    """Which way a run goes after an attempt that did not complete (the table in docs/architecture.md)."""
    if run.stop_requested:
        return _give_verdict(run, "stopped", run.stop_requested)
    action = action_for(failure, history(run))
    match action.kind:
        case ActionKind.GIVE_UP:
            return _give_verdict(run, "failed", action.reason or failure.message, failure)
        case ActionKind.STOP:
            return _after_stop(run, failure, action.reason or failure.message, facts)
        case ActionKind.WAIT_FOR_CAPACITY:
            return _wait(run, failure, action, facts)
        case ActionKind.NEW_LINEAGE:
            return _recover(run, failure).with_(
                lineage=run.lineage + 1, resume_from=_newest_checkpoint(run), last_checkpoint=None
            )
        case _:
            return _recover(run, failure)


def _after_stop(run: Run, failure: Failure, reason: str, facts: Facts) -> Run:
    """It ran as long as it might; where its budget was what bounded that, it goes on if the budget buys more by now."""
    attempt = run.current
    spent = used_up(run, attempt) if attempt and failure.failure_class is FailureClass.DEADLINE else None
    if attempt and spent and buys_more(run, attempt, facts.now):
        return _recover(run, failure)
    return _give_verdict(run, "stopped", spent or reason, failure)


def _newest_checkpoint(run: Run) -> CheckpointRef | None:
    """Where the next lineage starts: the newest that the ended attempt left, registered already or not."""
    step = run.current.checkpoint_step if run.current else None
    return run.resume_from if step is None else CheckpointRef(lineage=run.lineage, step=step)


def _recover(run: Run, failure: Failure) -> Run:
    return run.moved_to(RunStatus.RECOVERING, reason=failure.message)


def _wait(run: Run, failure: Failure, action: Action, facts: Facts) -> Run:
    """Back to the queue, without the slot, until `not_before`; the deadline bounds all waiting of a run together."""
    since = run.waiting_for_capacity_since or facts.now
    waited = facts.now - since + timedelta(seconds=run.waited_for_capacity_s)
    if waited >= timedelta(seconds=run.spec.compute.deadline_s):
        return _give_verdict(run, "failed", f"no capacity within compute.deadline_s: {failure.message}", failure)
    return run.moved_to(
        RunStatus.QUEUED,
        reason=failure.message,
        waiting_for_capacity_since=since,
        not_before=facts.now + timedelta(seconds=action.wait_s),
    )


def _give_verdict(run: Run, verdict: Outcome, reason: str, failure: Failure | None = None) -> Run:
    """How the run ends. Close run writes the final status; until then nothing else may move the run."""
    return run.with_(verdict=verdict, reason=reason, failure=_note(failure) if failure else run.failure)


def fail_run(run: Run, reason: str, failure_class: FailureClass = FailureClass.PLATFORM) -> Run:
    """A verdict from outside the job: a plan that cannot be made, a message that could not be delivered."""
    if run.is_final or run.verdict:
        return run
    return _give_verdict(run, "failed", reason, Failure(failure_class, reason))


def stop_run(run: Run, reason: str) -> Run:
    """The same for a run that may go on once what stopped it is mended."""
    return run if run.is_final or run.verdict else _give_verdict(run, "stopped", reason)


def history(run: Run) -> list[AttemptSummary]:
    """The settled attempts, oldest first, as the rules of failures and planning want them."""
    return [
        AttemptSummary(
            failure_class=each.failure.failure_class if each.failure else None,
            billed_s=each.paid_s,
            checkpoint_step=each.checkpoint_step,
            instance_type=each.plan.instance_type,
            micro_batch_size=each.plan.micro_batch_size,
            spot=each.plan.spot,
            lineage=each.lineage,
            recoveries=len(each.recoveries),
        )
        for each in run.attempts
        if each.is_settled
    ]


def _honour_stop(run: Run, facts: Facts) -> Run:
    """A stop that has no job to wait for ends the run at once."""
    attempt = run.current
    if not run.stop_requested or run.verdict:
        return run
    if attempt is None or attempt.is_settled:
        return _give_verdict(run, "stopped", run.stop_requested)
    if _has_no_job(attempt, facts):
        return _give_verdict(_settle(run, "stopped", facts, billed_s=0), "stopped", run.stop_requested)
    return run


def _notice_silence(run: Run, facts: Facts) -> Run:
    attempt, job = run.current, facts.job
    if attempt is None or attempt.is_settled or attempt.stop_cause or job is None or job.secondary != "Training":
        return run
    if not facts.logs_asked:
        return run
    # A machine that was given again has had no time yet to show a sign: each start of Training is one.
    starts = [change.started_at for change in job.changes if change.status == "Training"]
    signs = [job.started_at, *starts, facts.last_sign_at, run.liveness.at if run.liveness else None]
    last = max((sign for sign in signs if sign), default=None)
    longest_step_ms = run.liveness.longest_step_ms if run.liveness else 0
    limit = max(SILENT_AFTER, timedelta(milliseconds=SILENT_STEPS * longest_step_ms))
    return run.with_current(stop_cause="silent") if last and facts.now - last > limit else run


def _take_up(run: Run, facts: Facts) -> Run:
    """An execution that died is taken up under the next name, unless the run only needs closing."""
    execution = facts.execution
    if execution is None or execution.name != run.execution or execution.status not in _DEAD or run.verdict:
        return run
    if run.executions - run.reopenings >= MAX_EXECUTIONS:
        return fail_run(run, f"its execution died {MAX_EXECUTIONS} times; see the Step Functions console")
    number = run.executions + 1
    return run.with_(executions=number, execution=f"{run.run_id}-e{number}")


def _actions(before: Run, run: Run, facts: Facts) -> tuple[SettleAction, ...]:
    actions: list[SettleAction] = [*_stops(run, facts)]
    if run.status == RunStatus.QUEUED and before.status != RunStatus.QUEUED and before.attempts:
        actions.append(ReleaseSlot())
    execution = facts.execution
    if execution and execution.name == before.execution and execution.status in (*_DEAD, "MISSING"):
        actions.append(CloseRun() if run.verdict else StartExecution())
    return tuple(actions)


def _stops(run: Run, facts: Facts) -> list[SettleAction]:
    attempt, job = run.current, facts.job
    if attempt is None or job is None or job.status != "InProgress" or job.job_name != attempt.job_name:
        return []
    unwanted = run.verdict or run.stop_requested or attempt.stop_cause or attempt.is_settled
    return [StopJob(job.job_name)] if unwanted else []


def _leftover_job(run: Run, facts: Facts) -> tuple[SettleAction, ...]:
    job = facts.job
    return (StopJob(job.job_name),) if job and job.status == "InProgress" else ()


@dataclass(frozen=True)
class WaitingState:
    """A state of the machine that waits with a token: which, and (Train) for which attempt."""

    state: Literal["admit", "train"]
    token: str
    execution: str
    attempt: int | None = None


def answer(run: Run, waiting: WaitingState, *, holds_slot: bool) -> str | None:
    """The outcome word that the waiting state should be told now, or None to let it wait."""
    if run.is_final or run.verdict:
        return run.verdict or str(run.status)
    if waiting.state == "admit":
        # A run that has its slot and is still in the queue is about to be moved on by whoever gave it the slot.
        return "admitted" if holds_slot and run.status != RunStatus.QUEUED else None
    attempt = run.current
    if attempt is None or waiting.attempt != attempt.attempt or not attempt.is_settled:
        return None
    return {RunStatus.EVALUATING: "completed", RunStatus.RECOVERING: "plan", RunStatus.QUEUED: "admit"}.get(run.status)


def judged(run: Run, error: str | None = None) -> Run:
    """With a verdict. Where it has none, something outside our rules failed: `error` says what."""
    return fail_run(run, error or "its execution ended without an outcome")


def closed(run: Run, now: datetime, error: str | None = None) -> Run:
    """The final record."""
    if run.is_final:
        return run
    ended = judged(run, error)
    return ended.with_(status=RunStatus(ended.verdict or "failed"), ended_at=now)


def register_checkpoint(run: Run, lineage: int, step: int, made_at: datetime | None = None) -> Run:
    """The newest whole checkpoint of the current lineage; older news changes nothing."""
    if lineage != run.lineage:
        return run
    last = run.last_checkpoint
    if last and last.lineage == lineage and last.step >= step:
        return run
    return run.with_(last_checkpoint=CheckpointRef(lineage=lineage, step=step), checkpointed_at=made_at)
