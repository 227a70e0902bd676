"""A stage in memory, for tests of what happens when: the real use cases, the real state machine, and a cloud that may
lose, repeat, delay and reorder whatever it is allowed to, and kill a function between any two of its calls.

    message -> use case -> ports (stores, jobs, executions) -> what is true -> more messages

Only what talks to AWS is replaced. A port counts its calls, and a `Fault` waits for one of them: there the function dies,
or other functions do their whole work before it goes on. Each write of a run is held against the laws of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from microtuning_core.aws.admissions import AdmissionStore, Slots
from microtuning_core.aws.budget_marks import BudgetMarks
from microtuning_core.aws.runs import Checkpoint, RunStore
from microtuning_core.aws.training_jobs import Refused
from microtuning_core.domain.budget import BudgetMark
from microtuning_core.domain.cost import LedgerEntry, amount_usd, price_of
from microtuning_core.domain.errors import LaunchRefused, RunNotFound, StaleRevision
from microtuning_core.domain.failures import classify_refusal
from microtuning_core.domain.job import JobFacts, StatusChange
from microtuning_core.domain.layout import (
    CommandKey,
    command_key,
    parse_checkpoint_key,
    parse_command_key,
    run_record_key,
    step_prefix,
)
from microtuning_core.domain.names import StackNames, parse_execution_name, parse_job_name
from microtuning_core.domain.orchestration import HistoryEvent
from microtuning_core.domain.quota import Gpus, Holding, Waiting, used_gpus
from microtuning_core.domain.run import TRANSITIONS, Run, RunStatus, new_run
from microtuning_core.domain.settle import WaitingState
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.domain.tenants import StageTenants, Standing, TenantLimits, serving_anyone
from microtuning_core.usecases import (
    admit,
    budgets,
    checkpoint,
    closing,
    command,
    costing,
    dead_letters,
    launch,
    plan,
    reconciling,
    registering,
    settle,
    submit,
    tenancy,
    warm_pools,
)
from microtuning_core.usecases.services import Services, StageSettings

BEGAN = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
NAMES = StackNames("prod", "123456789012", "us-east-1")
WORKFLOW = Path(__file__).parents[2] / "infrastructure/workflows/training.asl.json"
_CLOCKED = (
    admit,
    budgets,
    closing,
    command,
    costing,
    launch,
    plan,
    reconciling,
    registering,
    settle,
    submit,
    tenancy,
    warm_pools,
)
HINTS = frozenset({"training-events", "cost-events", "execution-events", "checkpoints"})
HOLDS_A_SLOT = frozenset({RunStatus.PLANNING, RunStatus.TRAINING, RunStatus.RECOVERING, RunStatus.EVALUATING})

# How a job may end: (status, secondary, reason).
ENDS: dict[str, tuple[str, str, str | None]] = {
    "completed": ("Completed", "Completed", None),
    "lost": ("Failed", "Failed", "InternalServerError: lost"),
    "no capacity": ("Failed", "Failed", "CapacityError: none"),
    "memory": ("Failed", "Failed", 'AlgorithmError: {"class": "memory", "message": "m"}, exit code: 1'),
    "numerics": ("Failed", "Failed", 'AlgorithmError: {"class": "numerics", "message": "n"}, exit code: 1'),
    "platform": ("Failed", "Failed", "AlgorithmError: , exit code: 137"),
    "user": ("Failed", "Failed", 'AlgorithmError: {"class": "user", "message": "u"}, exit code: 1'),
    "stopped": ("Stopped", "Stopped", None),
    "max runtime": ("Stopped", "MaxRuntimeExceeded", None),
    "spot gone": ("Stopped", "MaxWaitTimeExceeded", None),
    "unknown": ("Failed", "Failed", "nobody knows"),
}
REFUSALS = (
    "ThrottlingException",
    "ResourceLimitExceeded",
    "CapacityError",
    "InternalServerError",
    "ValidationException",
)


@cache
def spec(tenant: str = "acme") -> Any:
    return parse_spec(
        {
            "name": "sort",
            "tenant": tenant,
            "model": {"arch": "Transformer"},
            "algorithm": {"type": "sft", "max_train_steps": 100, "batch_size": 64},
            "data": {"train": f"s3://{NAMES.bucket}/tenants/{tenant}/datasets/x.jsonl"},
            "compute": {"instance": "ml.g5.xlarge", "fallbacks": ["ml.g6.xlarge"], "spot": "auto"},
        }
    )


class Died(BaseException):
    """The function was killed here; what it had not done it will not do."""


@dataclass
class Fault:
    """What happens to a function at its n-th call of a port."""

    calls_left: int
    happen: Callable[[], None]


@dataclass
class Message:
    queue: str
    body: dict[str, Any]


class SmallCloud:
    """One stage: its clock, its messages under way, and what the use cases call `services`."""

    def __init__(self, run_count: int, quota: int, tenants: StageTenants | None = None) -> None:
        self.now = BEGAN
        self.messages: list[Message] = []
        self.fault: Fault | None = None
        self.broken: str | None = None  # kept, because a death or a retry may swallow the exception
        settings = StageSettings(NAMES, "image:1", quota, tenants=tenants or serving_anyone())
        self.objects = Objects(self)
        self.runs = Runs(self)
        self.admissions = Admissions(self)
        self.executions = Executions(self)
        self.jobs = Jobs(self)
        self.ledger = Ledger(self)
        self.logs = SimpleNamespace(last_line_at=self._last_line_at)
        self.silent: set[str] = set()
        self.services: Any = Services(None, settings)  # type: ignore[arg-type]  # of a session only stores are made
        vars(self.services).update(
            objects=self.objects, runs=self.runs, admissions=self.admissions, executions=self.executions,
            jobs=self.jobs, ledger=self.ledger, logs=self.logs, budget_marks=Marks(self),
        )  # fmt: skip
        self.counts = self.services.counts
        with clock_of(self):
            for number in range(run_count):
                self._begin(number, list(settings.tenants.tenants)[number % len(settings.tenants.tenants)])

    def _begin(self, number: int, tenant: str) -> None:
        own = spec() if tenant == "default" else spec(tenant)  # where nobody is declared: acme
        submit.begin_run(self.services, new_run(f"{own.tenant}-sort-0a1b2c3d4e{number:02d}", own, self.now))

    def _last_line_at(self, job_name: str) -> datetime | None:
        self.port()
        return None if job_name in self.silent else self.now

    def require(self, holds: bool, law: str) -> None:
        if not holds:
            self.broken = self.broken or law
            raise AssertionError(law)

    def port(self) -> None:
        """Every call of a store or service comes by here first."""
        fault = self.fault
        if fault is None:
            return
        fault.calls_left -= 1
        if fault.calls_left < 0:
            self.fault = None
            fault.happen()

    def send(self, queue: str, **body: Any) -> None:
        self.messages.append(Message(queue, body))

    def deliver(self, message: Message, fault: Fault | None = None, *, again: bool = False) -> None:
        """One message to its function. It comes back if the function dies or fails, or if it is delivered `again`."""
        with clock_of(self):
            done = self._work(message, fault)
        if done and not again and message in self.messages:
            self.messages.remove(message)

    def _work(self, message: Message, fault: Fault | None) -> bool:
        outer, self.fault = self.fault, fault
        try:
            if message.queue == "invoke":
                self.executions.invoke(message.body["execution"], message.body["visit"])
            else:
                _HANDLERS[message.queue](self.services, message.body)
        except (Died, LaunchRefused, StaleRevision):
            return False
        finally:
            self.fault = outer
        return True

    def deliver_all(self, rounds: int = 1) -> None:
        """Every message under way once, and as often what they lead to."""
        for _ in range(rounds):
            for message in list(self.messages):
                self.deliver(message)

    def lose_hints(self) -> None:
        self.messages = [each for each in self.messages if each.queue not in HINTS]

    def tick(self, fault: Fault | None = None) -> None:
        self.deliver(Message("ticks", {}), fault)

    def bury(self, message: Message) -> None:
        """The queue gave the message up after several deliveries."""
        self.messages.remove(message)
        with clock_of(self):
            dead_letters.bury(self.services, message.queue, message.body)

    def command(self, run_id: str, number: int, **fields: Any) -> None:
        key = command_key(run_id, f"c{number}")
        document = {"issued_at": self.now.isoformat(), **fields}
        self.objects.bodies[key] = json.dumps(document).encode()
        self.send("commands", key=key)


@contextmanager
def clock_of(cloud: SmallCloud) -> Iterator[None]:
    """`datetime.now` in every use case is the cloud's time."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return cloud.now

    real = {module: vars(module)["datetime"] for module in _CLOCKED if "datetime" in vars(module)}
    for module in real:
        vars(module)["datetime"] = Clock
    try:
        yield
    finally:
        for module, was in real.items():
            vars(module)["datetime"] = was


def _register(services: Any, body: dict[str, Any]) -> None:
    key = parse_checkpoint_key(body["key"])
    assert key is not None
    checkpoint.register(services, key)


def _obey(services: Any, body: dict[str, Any]) -> None:
    key = parse_command_key(body["key"])
    assert isinstance(key, CommandKey)
    command.obey(services, body["key"], key)


def _hear_of_execution(services: Any, run_id: str) -> None:
    settle.settle(services, run_id, ask_execution=True)
    costing.record_orchestration(services, run_id)


# What each queue's function does with a message (functions/*.py).
_HANDLERS: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "admissions": lambda s, body: admit.admit(s, body["token"], body["execution"], body["input"], BEGAN),
    "launches": lambda s, body: launch.launch(s, body["token"], body["execution"], body["run_id"], body["attempt"]),
    "training-events": lambda s, body: settle.settle(s, parse_job_name(body["job"]).run_id),
    "cost-events": lambda s, body: costing.record_cost(s, body["job"]),
    "execution-events": lambda s, body: _hear_of_execution(s, parse_execution_name(body["execution"])[0]),
    "checkpoints": _register,
    "commands": _obey,
    "ticks": lambda s, _: reconciling.reconcile(s),
}


# ------------------------------------------------------------------------------------------------- stores in memory


class Runs(RunStore):
    """The table of runs; each write is held against the laws of a run."""

    def __init__(self, cloud: SmallCloud) -> None:
        self._cloud = cloud
        self._objects = cloud.objects  # type: ignore[assignment]
        self.records: dict[str, Run] = {}
        self.open: set[str] = set()
        self.states: dict[str, dict[str, WaitingState]] = {}
        self.steps: dict[str, list[Checkpoint]] = {}

    def find(self, run_id: str) -> Run | None:
        self._cloud.port()
        return self.records.get(run_id)

    def get(self, run_id: str) -> Run:
        run = self.find(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run

    def _write(self, run: Run, condition: str, values: dict[str, Any]) -> None:
        self._cloud.port()
        before = self.records.get(run.run_id)
        expected = values.get(":expected", {}).get("N")
        found = None if before is None else str(before.revision)
        if found != expected:
            raise StaleRevision(run.run_id, run.revision - 1)
        if before is not None:
            self._check(before, run)
        self.records[run.run_id] = run
        is_closed = "Delete" in self._open_mark(run)
        self.open = self.open - {run.run_id} if is_closed else self.open | {run.run_id}
        self.mirror(run)

    def _check(self, before: Run, after: Run) -> None:
        for law, holds in laws_of_a_write(before, after).items():
            self._cloud.require(holds, f"{law}: {_short(before)} -> {_short(after)}")
        for attempt in after.attempts:
            was_settled = any(each.attempt == attempt.attempt and each.is_settled for each in before.attempts)
            if attempt.is_settled and not was_settled:
                self._cloud.jobs.check_settled(attempt)

    @property
    def table(self) -> str:  # type: ignore[override]
        return "runs"

    def mirror(self, run: Run) -> None:
        self._objects.put(run_record_key(run.run_id), json.dumps({"revision": run.revision}).encode())

    def open_run_ids(self, tenant: str) -> list[str]:
        self._cloud.port()
        return sorted(run_id for run_id in self.open if run_id.startswith(f"{tenant}-"))

    def note(self, run_id: str, kind: str, message: str, at: datetime | None = None, **data: Any) -> None:
        self._cloud.port()

    def events(self, run_id: str) -> list[dict[str, Any]]:
        return []

    def put_token(self, run_id: str, waiting: WaitingState) -> None:
        self._cloud.port()
        self.states.setdefault(run_id, {})[waiting.token] = waiting

    def tokens(self, run_id: str) -> list[WaitingState]:
        self._cloud.port()
        return list(self.states.get(run_id, {}).values())

    def delete_token(self, run_id: str, token: str) -> None:
        self._cloud.port()
        self.states.get(run_id, {}).pop(token, None)

    def put_checkpoint(self, manifest: Any, hashed_bytes: int = 0) -> None:
        self._cloud.port()
        made = Checkpoint(manifest.lineage, manifest.step, "", True, {}, "")
        known = [each for each in self.steps.get(manifest.run_id, []) if each != made]
        self.steps[manifest.run_id] = sorted([*known, made], key=lambda each: (each.lineage, each.step))

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        self._cloud.port()
        return list(self.steps.get(run_id, []))

    def delete_checkpoint(self, run_id: str, lineage: int, step: int) -> None:
        self._cloud.port()
        kept = [each for each in self.steps.get(run_id, []) if (each.lineage, each.step) != (lineage, step)]
        self.steps[run_id] = kept


def laws_of_a_write(before: Run, after: Run) -> dict[str, bool]:
    """What must hold between a run's record and the next."""
    reopened = after.reopenings == before.reopenings + 1
    said = after.with_(status=before.status, ended_at=before.ended_at)
    untouched = ("status", "verdict", "reason", "lineage", "ended_at", "execution")
    return {
        "only listed transitions": after.status == before.status or after.status in TRANSITIONS[before.status],
        "a run that is over stays so": not before.is_final
        or reopened
        or all(getattr(before, name) == getattr(after, name) for name in untouched),
        "only what is over is taken up again": not reopened or (before.is_final and before.goes_on),
        "a verdict stays": not before.verdict or reopened or said.verdict == before.verdict,
        "a settled attempt stays as it ended, but for a bill that comes late": all(
            _end_of(old) == _end_of(new if old.billed_s else new.model_copy(update=_bill_of(old)))
            for old, new in zip(before.attempts, after.attempts, strict=False)
            if old.outcome
        ),
        "attempts are only added": len(after.attempts) - len(before.attempts) in (0, 1),
        "attempts are numbered": [each.attempt for each in after.attempts] == [*range(1, len(after.attempts) + 1)],
        "one attempt at a time": all(each.is_settled for each in after.attempts[:-1]),
        "waiting for capacity adds up": after.waited_for_capacity_s >= before.waited_for_capacity_s,
        "lineages are counted up": after.lineage - before.lineage in (0, 1),
        "executions are counted up": after.executions - before.executions in (0, 1),
        "no recovery comes twice": all(
            len({(each.cause, each.at) for each in attempt.recoveries}) == len(attempt.recoveries)
            for attempt in after.attempts
        ),
    }


def _short(run: Run) -> str:
    return run.model_dump_json(exclude={"spec"}, exclude_defaults=True)


def _bill_of(attempt: Any) -> dict[str, Any]:
    return {"billed_s": attempt.billed_s, "training_s": attempt.training_s}


def _end_of(attempt: Any) -> Any:
    return attempt.model_copy(update={"cost_state": "none", "recoveries": (), "launched_at": None})


@dataclass
class Objects:
    cloud: SmallCloud
    bucket: str = NAMES.bucket
    bodies: dict[str, bytes] = field(default_factory=dict)

    def put(self, key: str, body: bytes) -> None:
        self.cloud.port()
        self.bodies[key] = body

    def put_json(self, key: str, document: Any) -> None:
        self.put(key, json.dumps(document).encode())

    def read(self, key: str, *, at_most: int | None = None) -> bytes | None:
        self.cloud.port()
        return self.bodies.get(key)

    def read_json(self, key: str) -> Any:
        body = self.read(key)
        return None if body is None else json.loads(body)

    def walk(self, prefix: str) -> list[Any]:
        self.cloud.port()
        return [SimpleNamespace(key=key, bytes=len(self.bodies[key])) for key in self.bodies if key.startswith(prefix)]

    def delete(self, keys: list[str]) -> None:
        self.cloud.port()
        for key in keys:
            self.bodies.pop(key, None)


class Admissions(AdmissionStore):
    """Slots and queue in memory; what makes a grant true is the store's own."""

    def __init__(self, cloud: SmallCloud) -> None:
        self._cloud = cloud
        self.revision = 0
        self.held: dict[str, Holding] = {}
        self.changes: dict[str, TenantLimits] = {}
        self.standings: dict[str, Standing] = {}
        self.lives: dict[str, int] = {}  # of those that wait or have a slot
        self.queue: dict[str, tuple[Waiting, datetime | None]] = {}
        self.known: set[str] = set()

    def wait(
        self,
        run_id: str,
        tenant: str,
        since: datetime,
        not_before: datetime | None = None,
        *,
        life: int = 0,
        gpus: Gpus | None = None,
    ) -> None:
        self._cloud.port()
        if run_id not in self.queue or self.lives[run_id] <= life:
            self.queue[run_id] = (Waiting(run_id, tenant, since, gpus or {}), not_before)
            self.lives[run_id] = life

    def remember(self, tenant: str) -> None:
        self._cloud.port()
        self.known.add(tenant)

    def forget(self, run_id: str, life: int) -> None:
        self._cloud.port()
        if self.lives.get(run_id, 0) <= life:
            self.queue.pop(run_id, None)
        self.release(run_id, life)

    def release(self, run_id: str, life: int | None = None) -> None:
        self._cloud.port()
        if (life is None or self.lives.get(run_id, 0) <= life) and self.held.pop(run_id, None):
            self.revision += 1

    def slots(self) -> Slots:
        self._cloud.port()
        return Slots(self.revision, dict(self.held))

    def waiting(self, now: datetime) -> list[Waiting]:
        self._cloud.port()
        return [each for each, not_before in self.queue.values() if not_before is None or not_before <= now]

    def tenants(self) -> list[str]:
        self._cloud.port()
        return sorted(self.known)

    def limit_changes(self) -> dict[str, TenantLimits]:
        self._cloud.port()
        return dict(self.changes)

    def standing(self, tenant: str) -> Standing | None:
        self._cloud.port()
        return self.standings.get(tenant)

    def put_standing(self, standing: Standing) -> None:
        self._cloud.port()
        self.standings[standing.tenant] = standing

    def _take(self, slots: Slots, first: Waiting) -> bool:
        self._cloud.port()
        if first.run_id not in self.queue:
            return False
        after = Slots(slots.revision + 1, {**slots.held, first.run_id: Holding(first.tenant, first.gpus)})
        if not self._put_slots(slots, after):
            return False
        del self.queue[first.run_id]
        return True

    def _put_slots(self, before: Slots, after: Slots, *others: dict[str, Any]) -> bool:
        self._cloud.port()
        if before.revision != self.revision:
            return False
        self.held, self.revision = dict(after.held), after.revision
        limits = tenancy.current_limits(self._cloud.services, self.changes)
        self._cloud.require(len(self.held) <= limits.total, "no slot beyond the quota")
        used_before = used_gpus(before.held.values())
        for (tenant, family), used in used_gpus(self.held.values()).items():
            grew = used > used_before[tenant, family]  # a limit that was lowered takes nothing away
            most = limits.gpus_of(tenant).get(family)
            self._cloud.require(
                not grew or most is None or used <= most, f"{tenant} has {used} of {most} {family} GPUs"
            )
        return True


class Marks(BudgetMarks):
    def __init__(self, cloud: SmallCloud) -> None:
        self._cloud = cloud
        self.by_tenant: dict[str, BudgetMark] = {}

    def all(self) -> dict[str, BudgetMark]:
        self._cloud.port()
        return dict(self.by_tenant)

    def put(self, tenant: str, mark: BudgetMark) -> None:
        self._cloud.port()
        self.by_tenant[tenant] = mark


@dataclass
class Ledger:
    cloud: SmallCloud
    by_id: dict[str, LedgerEntry] = field(default_factory=dict)

    def put(self, entry: LedgerEntry) -> bool:
        self.cloud.port()
        stands = self.by_id.get(entry.id)
        if stands and stands.state == "final":
            return False
        self.by_id[entry.id] = entry
        return True

    def drop(self, estimate: LedgerEntry) -> None:
        self.cloud.port()
        if estimate.id in self.by_id and self.by_id[estimate.id].state == "estimate":
            del self.by_id[estimate.id]

    def month(self, tenant: str, month: str) -> list[LedgerEntry]:
        self.cloud.port()
        return [each for each in self.by_id.values() if f"{each.day:%Y-%m}" == month]

    def entries(self, tenant: str, run_id: str, *_: Any) -> list[LedgerEntry]:
        self.cloud.port()
        return [entry for entry in self.by_id.values() if entry.run_id == run_id]


# --------------------------------------------------------------------------------------------- SageMaker in memory


@dataclass
class Jobs:
    """Training jobs. Each change is announced; whether anybody hears of it is another question."""

    cloud: SmallCloud
    made: dict[str, JobFacts] = field(default_factory=dict)
    refusals: list[tuple[str, bool]] = field(default_factory=list)  # (code, the job was made all the same)
    refused: set[str] = field(default_factory=set)
    trained_s: dict[str, int] = field(default_factory=dict)
    late_bills: set[str] = field(default_factory=set)  # jobs whose Describe does not say yet what was billed

    def create(self, request: dict[str, Any]) -> None:
        self.cloud.port()
        name = request["TrainingJobName"]
        if name in self.made:
            return
        code, made_all_the_same = self.refusals.pop(0) if self.refusals else ("", True)
        if made_all_the_same:
            self._make(name, request)
        if code:
            self.refused.add(name)
            raise Refused(classify_refusal(code, code))

    def _make(self, name: str, request: dict[str, Any]) -> None:
        under_way = {each.job_name for each in self.of_run(parse_job_name(name).run_id) if not each.is_terminal}
        # One that was refused and accepted at once is stopped by its own launch.
        others = set() if name in self.refused else under_way - self.refused
        self.cloud.require(not others, f"{name} is made while {others} are under way")
        self.made[name] = JobFacts(
            name,
            "InProgress",
            "Starting",
            self.cloud.now,
            instance_type=request["ResourceConfig"]["InstanceType"],
            spot=request["EnableManagedSpotTraining"],
        )
        self._announce(name)

    def describe(self, job_name: str) -> JobFacts | None:
        self.cloud.port()
        return self.made.get(job_name)

    def stop(self, job_name: str) -> None:
        self.cloud.port()
        job = self.made.get(job_name)
        if job and job.status == "InProgress":
            self._pause(job_name)
            self._change(job_name, status="Stopping", secondary="Stopping")

    def in_progress(self, stage: str) -> list[Any]:
        self.cloud.port()
        return [parse_job_name(name) for name, job in self.made.items() if job.status == "InProgress"]

    def of_run(self, run_id: str) -> list[JobFacts]:
        return [job for name, job in self.made.items() if parse_job_name(name).run_id == run_id]

    # -- what the cloud does by itself

    def get_a_machine(self, name: str) -> None:
        job = self.made[name]
        changes = (*job.changes, StatusChange("Training", self.cloud.now))
        self._change(name, secondary="Training", started_at=job.started_at or self.cloud.now, changes=changes)

    def lose_the_machine(self, name: str) -> None:
        """Spot took it, and looks for another."""
        self._pause(name)
        changes = (*self.made[name].changes, StatusChange("Interrupted", self.cloud.now))
        self._change(name, secondary="Interrupted", changes=changes)

    def end(self, name: str, how: str) -> None:
        job = self.made[name]
        how = "lost" if how == "no capacity" and job.started_at else how
        if job.started_at is None and how not in ("no capacity", "stopped", "spot gone", "lost"):
            self.get_a_machine(name)
        self._pause(name)
        status, secondary, reason = ENDS[how]
        had_machine = self.made[name].started_at and name not in self.late_bills
        billed = self.trained_s.get(name, 0) if had_machine else None
        self._change(
            name,
            status=status,
            secondary=secondary,
            failure_reason=reason,
            ended_at=self.cloud.now,
            billed_s=billed,
            training_s=billed,
        )

    def send_bill(self, name: str) -> None:
        """What was billed is told, and no event says that it is."""
        self.late_bills.discard(name)
        job = self.made[name]
        if job.is_terminal and job.started_at:
            billed = self.trained_s.get(name, 0)
            self.made[name] = replace(job, billed_s=billed, training_s=billed)

    def save(self, name: str, step: int) -> None:
        """A checkpoint of the job's lineage reaches S3."""
        run = self.cloud.runs.records[parse_job_name(name).run_id]
        attempt = run.attempts[parse_job_name(name).attempt - 1]
        key = step_prefix(run.run_id, attempt.lineage, step) + "manifest.json"
        self.cloud.objects.bodies[key] = json.dumps(_manifest(run.run_id, attempt, step, self.cloud.now)).encode()
        self.cloud.send("checkpoints", key=key)

    def _pause(self, name: str) -> None:
        """Only time on a machine is billed."""
        job = self.made[name]
        if job.secondary == "Training":
            since = job.changes[-1].started_at
            seconds = max(1, int((self.cloud.now - since).total_seconds()))
            self.trained_s[name] = self.trained_s.get(name, 0) + seconds

    def _change(self, name: str, **changes: Any) -> None:
        self.made[name] = replace(self.made[name], **changes)
        self._announce(name)

    def _announce(self, name: str) -> None:
        self.cloud.send("training-events", job=name)
        self.cloud.send("cost-events", job=name)

    def check_settled(self, attempt: Any) -> None:
        """An attempt ends when its job has, and costs what was billed; without a job it costs nothing."""
        if attempt.job_name in self.refused and attempt.launched_at is None:
            return
        job = self.made.get(attempt.job_name)
        law = f"an attempt ends with its job and is paid as it was billed: {attempt!r}, {job!r}"
        self.cloud.require(job is None or job.is_terminal, law)
        without_job = None if job and job.started_at else 0
        self.cloud.require(
            attempt.billed_s == (without_job if job is None or job.billed_s is None else job.billed_s), law
        )

    def bill_usd(self, run_id: str) -> Any:
        """What the provider charges for all jobs of the run, whoever wanted them."""
        return sum(amount_usd(job.billed_s or 0, 1, price_of(job.instance_type).usd) for job in self.of_run(run_id))


def _manifest(run_id: str, attempt: Any, step: int, now: datetime) -> dict[str, Any]:
    return {
        "schema_version": 1, "run_id": run_id, "attempt": attempt.attempt, "lineage": attempt.lineage, "step": step,
        "epoch": 0, "world_size": 1, "global_batch": 64, "spec_sha256": "0" * 64, "base_model": "Transformer",
        "files": [], "created_at": now.isoformat(),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------- Step Functions in memory


@cache
def workflow() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(WORKFLOW.read_text())
    return document


@dataclass
class Execution:
    """Where one execution stands: its state, the data there, and the token it waits with. `visit` counts states."""

    name: str
    data: Any
    state: str = ""
    status: str = "RUNNING"
    token: str | None = None
    visit: int = 0
    events: list[HistoryEvent] = field(default_factory=list)


@dataclass
class Executions:
    """Runs training.asl.json: callback tasks, Lambda tasks, choices and ends, as far as that file uses them."""

    cloud: SmallCloud
    by_name: dict[str, Execution] = field(default_factory=dict)

    def start(self, execution: str, state: dict[str, Any]) -> str:
        self.cloud.port()
        if execution not in self.by_name:
            self.by_name[execution] = Execution(execution, state)
            self._enter(self.by_name[execution], workflow()["StartAt"])
        return execution

    def status(self, execution: str) -> Any:
        self.cloud.port()
        found = self.by_name.get(execution)
        return found.status if found else "MISSING"

    def history(self, execution: str) -> list[HistoryEvent]:
        self.cloud.port()
        found = self.by_name.get(execution)
        return list(found.events) if found else []

    def succeed(self, token: str, output: dict[str, Any]) -> None:
        self.cloud.port()
        execution = self._waiting_with(token)
        if execution:
            execution.data = output
            self._enter(execution, workflow()["States"][execution.state]["Next"])

    def fail(self, token: str, error: str, cause: str) -> None:
        self.cloud.port()
        execution = self._waiting_with(token)
        if execution:
            self._catch(execution, error, cause)

    def die(self, name: str, status: str) -> None:
        self._end(self.by_name[name], status)

    def invoke(self, name: str, visit: int) -> None:
        """The Lambda of the state where the execution stands; a function that dies is an error that is caught."""
        execution = self.by_name[name]
        if execution.status != "RUNNING" or execution.visit != visit:
            return
        state = workflow()["States"][execution.state]
        function = state["Parameters"]["FunctionName"]
        payload = _resolved(state["Parameters"]["Payload"], execution)
        try:
            result = _LAMBDAS[function](self.cloud.services, payload)
        except Died:
            result = None
        if execution.status != "RUNNING" or execution.visit != visit:
            return
        if result is None:
            self._catch(execution, "Lambda.Unknown", "died")
            return
        execution.data = result
        self._enter(execution, state["Next"])

    def _waiting_with(self, token: str) -> Execution | None:
        waiting = [each for each in self.by_name.values() if each.token == token and each.status == "RUNNING"]
        return waiting[0] if waiting else None

    def _catch(self, execution: Execution, error: str, cause: str) -> None:
        execution.data = {**execution.data, "error": {"Error": error, "Cause": cause}}
        self._enter(execution, workflow()["States"][execution.state]["Catch"][0]["Next"])

    def _enter(self, execution: Execution, name: str) -> None:
        execution.state, execution.token, execution.visit = name, None, execution.visit + 1
        state = workflow()["States"][name]
        execution.events.append(HistoryEvent(f"{state['Type']}StateEntered", self.cloud.now, name))
        match state["Type"]:
            case "Task":
                self._ask(execution, state)
            case "Choice":
                self._enter(execution, _chosen(state, execution.data))
            case kind:
                self._end(execution, "SUCCEEDED" if kind == "Succeed" else "FAILED")

    def _ask(self, execution: Execution, state: dict[str, Any]) -> None:
        if "QueueUrl" not in state["Parameters"]:
            self.cloud.send("invoke", execution=execution.name, visit=execution.visit)
            return
        execution.token = f"{execution.name}#{execution.visit}"
        queue = {"${admit_queue_url}": "admissions", "${launch_queue_url}": "launches"}[state["Parameters"]["QueueUrl"]]
        self.cloud.send(queue, **_resolved(state["Parameters"]["MessageBody"], execution))

    def _end(self, execution: Execution, status: str) -> None:
        execution.status, execution.token = status, None
        execution.events.append(HistoryEvent(f"Execution{status.title().replace('_', '')}", self.cloud.now))
        self.cloud.send("execution-events", execution=execution.name)


def _chosen(state: dict[str, Any], data: dict[str, Any]) -> str:
    for choice in state["Choices"]:
        name = choice["Variable"].removeprefix("$.")
        if name in data and (choice.get("IsPresent") or data[name] == choice.get("StringEquals")):
            return str(choice["Next"])
    return str(state["Default"])


def _resolved(template: dict[str, Any], execution: Execution) -> dict[str, Any]:
    known = {"$$.Task.Token": execution.token, "$$.Execution.Name": execution.name, "$": execution.data}
    return {
        key.removesuffix(".$"): known[path] if path in known else execution.data[path.removeprefix("$.")]
        for key, path in template.items()
    }


def _plan(services: Any, payload: dict[str, Any]) -> dict[str, Any]:
    run = plan.plan_attempt(services, payload["run_id"])
    return {"run_id": run.run_id, "attempt": run.current.attempt if run.current else 0}


def _register_model(services: Any, payload: dict[str, Any]) -> dict[str, Any]:
    run = registering.register_model(services, payload["run_id"])
    return {"run_id": run.run_id, "outcome": run.verdict or str(run.status)}


_LAMBDAS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "${plan_attempt_arn}": _plan,
    "${register_model_arn}": _register_model,
    "${close_run_arn}": lambda services, payload: closing.close_run(services, payload["state"], payload["execution"]),
}
TICK = timedelta(minutes=5)
