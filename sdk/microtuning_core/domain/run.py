"""A run and its attempts, as stored. One record holds both, so that one conditional write moves them together.

submitted -> queued -> planning -> training -> evaluating -> completed
                ^          ^           |
                |          +------- recovering
                +----- (capacity) ------+          any of them -> failed | stopped
                +---------------------------- (rollback) -- completed | failed | stopped
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from math import ceil
from typing import Any, Literal

from microtuning_core.domain.cost import LedgerEntry
from microtuning_core.domain.errors import IllegalTransition
from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.names import parse_run_id
from microtuning_core.domain.progress import Progress, Start, Written
from microtuning_core.domain.record import Record, UsdAmount, UtcTime, Value
from microtuning_core.domain.spec import RunSpec


class RunStatus(StrEnum):
    SUBMITTED = "submitted"
    QUEUED = "queued"
    PLANNING = "planning"
    TRAINING = "training"
    RECOVERING = "recovering"
    EVALUATING = "evaluating"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"


_S = RunStatus
FINAL = frozenset({_S.COMPLETED, _S.FAILED, _S.STOPPED})
TRANSITIONS: Mapping[RunStatus, frozenset[RunStatus]] = {
    _S.SUBMITTED: frozenset({_S.QUEUED, _S.FAILED, _S.STOPPED}),
    _S.QUEUED: frozenset({_S.PLANNING, _S.FAILED, _S.STOPPED}),
    _S.PLANNING: frozenset({_S.TRAINING, _S.QUEUED, _S.FAILED, _S.STOPPED}),
    _S.TRAINING: frozenset({_S.RECOVERING, _S.QUEUED, _S.EVALUATING, _S.FAILED, _S.STOPPED}),
    _S.RECOVERING: frozenset({_S.TRAINING, _S.QUEUED, _S.FAILED, _S.STOPPED}),
    _S.EVALUATING: frozenset({_S.COMPLETED, _S.FAILED, _S.STOPPED}),
    # Over, unless its user goes back to an older checkpoint.
    _S.COMPLETED: frozenset({_S.QUEUED}),
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.STOPPED: frozenset({_S.QUEUED}),
}

Outcome = Literal["completed", "failed", "stopped"]
REMEMBERED_COMMANDS = 50


class FailureNote(Value):
    """Why something failed: its class, one sentence, and where in the user's code if it was there."""

    failure_class: FailureClass
    message: str
    file: str | None = None
    line: int | None = None


class Recovery(Value):
    """One return from a failure, with its five stages in ms where they are known."""

    cause: str
    at: UtcTime
    detect_ms: int | None = None
    decide_ms: int | None = None
    provision_ms: int | None = None
    restore_ms: int | None = None
    first_step_ms: int | None = None


class AttemptPlan(Value):
    """What an attempt runs on. `keep_alive_s`: how long its machines are kept after it (warm_pools.py)."""

    instance_type: str
    count: int
    spot: bool
    micro_batch_size: int | None
    max_runtime_s: int
    price_usd_per_hour: UsdAmount
    keep_alive_s: int = 0
    price_source: str | None = None  # None in records of before prices could be refreshed
    price_as_of: date | None = None
    price_region: str = "us-east-1"


class Metered(Value):
    """What the container measured of an attempt: its last step, how many it did, time by phase and tokens by kind.

    saves: checkpoints that it wrote, in so many files and bytes.
    """

    step: int = 0
    steps_done: int = 0  # those done twice count twice
    phase_ms: dict[str, int] = {}
    tokens: dict[str, int] = {}
    saves: int = 0
    saved_files: int = 0
    saved_bytes: int = 0


class Attempt(Value):
    """One SageMaker training job. `outcome` None = not settled yet."""

    attempt: int
    job_name: str
    lineage: int
    plan: AttemptPlan
    created_at: UtcTime
    launched_at: UtcTime | None = None
    started_at: UtcTime | None = None
    ended_at: UtcTime | None = None
    billed_s: int | None = None
    training_s: int | None = None
    settled_at: UtcTime | None = None  # when its end was understood
    starts: tuple[Start, ...] = ()
    outcome: Outcome | None = None
    failure: FailureNote | None = None
    checkpoint_step: int | None = None
    recoveries: tuple[Recovery, ...] = ()
    stop_cause: str | None = None
    cost_state: Literal["none", "estimate", "final"] = "none"
    metered: Metered | None = None

    @property
    def is_settled(self) -> bool:
        return self.outcome is not None

    @property
    def paid_s(self) -> int:
        """Seconds of each machine of an ended attempt: as billed, or (not known yet) as long as it had it, at most."""
        if self.billed_s is not None or self.started_at is None or self.ended_at is None:
            return self.billed_s or 0
        return max(0, ceil((self.ended_at - self.started_at).total_seconds()))


def metered(progress: Progress) -> Metered:
    """The last sign of life as the attempt keeps it."""
    return Metered(
        step=progress.step,
        steps_done=progress.steps_done,
        phase_ms=progress.phase_ms.model_dump(),
        tokens=progress.tokens.model_dump(),
        saves=progress.saved.checkpoints,
        saved_files=progress.saved.files,
        saved_bytes=progress.saved.bytes,
    )


class CheckpointRef(Value):
    """One checkpoint of this run, or of another (`run_id`), which then keeps a copy of it under kept/."""

    lineage: int
    step: int
    run_id: str | None = None


class RunMetrics(Value):
    first: dict[str, float | None] = {}
    last: dict[str, float | None] = {}
    eval_before: dict[str, float | None] = {}
    eval_after: dict[str, float | None] = {}


class Liveness(Value):
    """The last sign of life: progress.json as it reached the run."""

    at: UtcTime
    step: int
    total_steps: int | None = None
    longest_step_ms: int = 0
    checkpoint: Written | None = None  # the newest on the machine's own disk


class Run(Record):
    """One fine-tuning, from spec to model. Frozen: `decide` returns the next one, the store writes it conditionally."""

    run_id: str
    tenant: str
    name: str
    spec: RunSpec
    status: RunStatus = RunStatus.SUBMITTED
    reason: str | None = None
    failure: FailureNote | None = None
    verdict: Outcome | None = None
    stop_requested: str | None = None
    created_at: UtcTime
    updated_at: UtcTime
    ended_at: UtcTime | None = None
    not_before: UtcTime | None = None
    waiting_for_capacity_since: UtcTime | None = None
    waited_for_capacity_s: int = 0  # in earlier waits, each ended by a machine
    execution: str
    executions: int = 1
    lineage: int = 1
    resume_from: CheckpointRef | None = None  # where this lineage started, if not at the beginning
    rollback_to: CheckpointRef | None = None  # where the next lineage shall start, once the job that trains has ended
    resume_requested: bool = False  # it shall be taken up again from where it was stopped
    raised_budget_usd: UsdAmount | None = None  # in place of the spec's
    budget_warned_usd: UsdAmount | None = None  # the budget of which a warning was given
    obeyed: tuple[str, ...] = ()  # ids of commands whose effect must not come twice
    reopenings: int = 0  # how often it was taken up again after it was over
    attempts: tuple[Attempt, ...] = ()
    last_checkpoint: CheckpointRef | None = None
    checkpointed_at: UtcTime | None = None  # when the last one was made
    mirror_late_since: UtcTime | None = None  # while what the machine saves does not reach S3
    liveness: Liveness | None = None
    metrics: RunMetrics = RunMetrics()
    cost_usd: UsdAmount | None = None
    executions_costed: int | None = None  # whose orchestration is in the ledger; None in records of before it was
    execution_entries: tuple[
        LedgerEntry, ...
    ] = ()  # of the ledger, since an execution's history does not stay for ever
    costed_revision: int = 0  # of this record, up to which writing it is in the ledger
    model_version: str | None = None
    revision: int = 0

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def budget_usd(self) -> Decimal | None:
        return self.spec.budget_usd if self.raised_budget_usd is None else self.raised_budget_usd

    @property
    def budgeted_spec(self) -> RunSpec:
        return self.spec.model_copy(update={"budget_usd": self.budget_usd})

    @property
    def goes_on(self) -> bool:
        """Whether it will be taken up again once it is over."""
        return self.rollback_to is not None or self.resume_requested

    @property
    def costs_are_final(self) -> bool:
        """Whether every attempt that became a job, and every execution, has its final amount in the ledger."""
        executions = self.executions_costed is None or self.executions_costed >= self.executions
        return executions and all(each.cost_state == "final" for each in self.attempts if each.launched_at)

    def waits_out(self, now: datetime) -> bool:
        """It found no capacity and gave its slot back; it may have one again only from `not_before` on."""
        return self.status == RunStatus.QUEUED and self.not_before is not None and self.not_before > now

    @property
    def current(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def is_being_restored(self) -> bool:
        """Whether its newest attempt has begun, or is about to, and its container has not yet given a sign."""
        return self.current is not None and not self.current.is_settled and self.current.metered is None

    def wants_job(self, number: int) -> bool:
        """Whether it goes on with the job of that attempt: its newest, not settled, and nobody asked it to end."""
        current = self.current
        if current is None or current.attempt != number or current.is_settled:
            return False
        return not (self.verdict or self.stop_requested or current.stop_cause)

    def moved_to(self, status: RunStatus, **changes: Any) -> Run:
        """This run with another status; only listed transitions, and staying is always allowed."""
        if status != self.status and status not in TRANSITIONS[self.status]:
            raise IllegalTransition(self.run_id, self.status, status)
        return self.with_(status=status, **changes)

    def with_(self, **changes: Any) -> Run:
        return self.model_copy(update=changes)

    def with_current(self, **changes: Any) -> Run:
        """This run with changes to its newest attempt."""
        return self.with_(attempts=(*self.attempts[:-1], self.attempts[-1].model_copy(update=changes)))


def new_run(run_id: str, spec: RunSpec, now: datetime, execution: str | None = None) -> Run:
    return Run(
        run_id=run_id,
        tenant=parse_run_id(run_id).tenant,
        name=spec.name,
        spec=spec,
        created_at=now,
        updated_at=now,
        execution=execution or run_id,
        executions_costed=0,
    )
