"""What steering a run costs: state transitions, functions, messages, writes. An entry an execution, once it has ended.

Counted: the transitions and retries of the execution's history, each write of the run's record (its revision), what the
container saved. By rule: how many messages that made, and what a function takes for one (docs/cost.md says which is which).
The rules err upwards. What the stage costs while nothing runs (alarms, polling of queues) belongs to no run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from math import ceil

from microtuning_core.domain.cost import Charge, CostRef, LedgerEntry, LedgerLine, UnitPrice, entry_id, rounded
from microtuning_core.domain.progress import signs_within
from microtuning_core.domain.run import Attempt, Run

_TASKS = frozenset({"TaskScheduled", "LambdaFunctionScheduled"})
_ENDS = frozenset({"ExecutionSucceeded", "ExecutionFailed", "ExecutionAborted", "ExecutionTimedOut"})

# The function behind each Task. Those with a queue are woken by the message that their state sends.
FUNCTION_OF_STATE = {
    "Admit run": "admit_run",
    "Plan attempt": "plan_attempt",
    "Train": "launch_training",
    "Register model": "register_model",
    "Close run": "close_run",
}

# Milliseconds that a function is billed each time it is woken: the mean over a run with one recovery on the local cloud,
# with every first time that a process had to be loaded (`make bench-orchestration`); on_command as on_execution_ended.
HANDLER_MS = {
    "on_spec_uploaded": 1250,
    "admit_run": 600,
    "plan_attempt": 600,
    "launch_training": 1200,
    "on_training_event": 1050,
    "on_cost_event": 1100,
    "on_checkpoint": 200,
    "register_model": 850,
    "close_run": 850,
    "on_execution_ended": 950,
    "on_command": 950,
}
_MEMORY_GB = Decimal("0.5")
# Pending, Starting, Downloading, Training, Uploading and the end; a machine that spot takes away begins again.
_EVENTS_A_JOB, _EVENTS_A_RESTART = 6, 4
_MONTH_S = 30 * 86_400
_SQS_REQUESTS = 3  # sent, received, deleted; in batches there are fewer
_CONFIG_OBJECTS, _RECEIPTS, _LISTS = 3, 1, 3
_LOG_GB = Decimal("1.5e-6")  # of one invocation

_AS_OF = date(2026, 11, 30)
PRICES = {
    "transitions": UnitPrice(Decimal("0.000025"), "aws.amazon.com/step-functions/pricing, us-east-1", _AS_OF),
    "function requests": UnitPrice(Decimal("0.0000002"), "AWS Lambda price list, Arm requests, us-east-1", _AS_OF),
    "function time": UnitPrice(Decimal("0.0000133334"), "AWS Lambda price list, Arm duration, us-east-1", _AS_OF),
    "queue requests": UnitPrice(Decimal("0.0000004"), "not confirmed: SQS, standard queues, us-east-1", _AS_OF),
    "object events": UnitPrice(Decimal("0.000001"), "not confirmed: EventBridge, opt-in service events", _AS_OF),
    "object writes": UnitPrice(Decimal("0.000005"), "AWS S3 price list, PUT, COPY, POST, LIST, us-east-1", _AS_OF),
    "object reads": UnitPrice(Decimal("0.0000004"), "AWS S3 price list, GET and others, us-east-1", _AS_OF),
    "table writes": UnitPrice(Decimal("0.000000625"), "not confirmed: DynamoDB, on-demand writes, us-east-1", _AS_OF),
    "table reads": UnitPrice(Decimal("0.000000125"), "not confirmed: DynamoDB, on-demand reads, us-east-1", _AS_OF),
    "checkpoint writes": UnitPrice(Decimal("0.000005"), "AWS S3 price list, PUT, COPY, POST, LIST, us-east-1", _AS_OF),
    "checkpoint events": UnitPrice(Decimal("0.000001"), "not confirmed: EventBridge, opt-in service events", _AS_OF),
    "checkpoint storage": UnitPrice(Decimal("0.023"), "AWS S3 price list, Standard storage, us-east-1", _AS_OF),
    "logs": UnitPrice(Decimal("0.5"), "not confirmed: CloudWatch, logs collected, us-east-1", _AS_OF),
}
_UNITS = {
    "transitions": "transition",
    "function time": "GB-second",
    "table writes": "write unit",
    "table reads": "read unit",
    "checkpoint storage": "GB-month",
    "logs": "GB",
}


@dataclass(frozen=True)
class HistoryEvent:
    """One event of GetExecutionHistory, as far as costs need it. `state`: of "… StateEntered" events."""

    kind: str
    at: datetime
    state: str = ""


@dataclass(frozen=True)
class Path:
    """The way an execution went: how often each state was entered, and how often a task was begun again in it."""

    entered: Mapping[str, int]
    retries: Mapping[str, int]
    began_at: datetime
    ended_at: datetime

    @property
    def transitions(self) -> int:
        """As AWS counts them: every state, every retry, and the start and the end."""
        return sum(self.entered.values()) + sum(self.retries.values()) + 2

    def invocations(self) -> dict[str, int]:
        """How often the function of each state was woken."""
        times = {state: self.entered.get(state, 0) + self.retries.get(state, 0) for state in FUNCTION_OF_STATE}
        return {FUNCTION_OF_STATE[state]: count for state, count in times.items() if count}


def path_of(events: Iterable[HistoryEvent]) -> Path | None:
    """The path in an execution's history; None while it has not ended."""
    entered: dict[str, int] = {}
    retries: dict[str, int] = {}
    state, tasks, began_at, ended_at = "", 0, None, None
    for event in events:
        began_at = began_at or event.at
        if event.kind.endswith("StateEntered"):
            state, tasks = event.state, 0
            entered[state] = entered.get(state, 0) + 1
        elif event.kind in _TASKS:
            tasks += 1
            if tasks > 1:
                retries[state] = retries.get(state, 0) + 1
        elif event.kind in _ENDS:
            ended_at = event.at
    return Path(entered, retries, began_at, ended_at) if began_at and ended_at else None


def quantities(run: Run, path: Path, *, record_bytes: int, writes: int) -> dict[str, Decimal]:
    """How much of everything that has a price one execution of the run took.

    Args:
        record_bytes: the size of the run's record.
        writes: how often it was written, and mirrored to S3, during this execution.
    """
    attempts = [each for each in run.attempts if path.began_at <= each.created_at <= path.ended_at]
    calls = invocations(run, path, attempts)
    messages = sum(
        count for name, count in calls.items() if name not in ("plan_attempt", "register_model", "close_run")
    )
    invoked = sum(calls.values())
    time_gb_s = (
        sum((Decimal(HANDLER_MS[name] * count) for name, count in calls.items()), Decimal(0)) / 1000 * _MEMORY_GB
    )
    saves = sum(each.metered.saves if each.metered else 0 for each in attempts)
    puts = writes + _CONFIG_OBJECTS * len(attempts) + _RECEIPTS + sum(map(_signs, attempts))
    units = ceil(record_bytes / 1024)
    return {
        "transitions": Decimal(path.transitions),
        "function requests": Decimal(invoked),
        "function time": time_gb_s,
        "queue requests": Decimal(_SQS_REQUESTS * messages),
        "object events": Decimal(puts),
        "object writes": Decimal(puts + saves + _LISTS * len(attempts)),  # a list costs as much as a write
        "object reads": Decimal(2 * invoked),
        "table writes": Decimal(writes * 2 * (units + 1)),  # in a transaction, with the mark that the run is open
        "table reads": Decimal((invoked + writes) * ceil(record_bytes / 4096)),
        "logs": invoked * _LOG_GB,
    }


def invocations(run: Run, path: Path, attempts: Iterable[Attempt]) -> dict[str, int]:
    """How often each function was woken for this execution: by its states, and by what its attempts announced."""
    given = list(attempts)
    job_events = sum(_EVENTS_A_JOB + _EVENTS_A_RESTART * max(0, len(each.starts) - 1) for each in given)
    found = path.invocations() | {
        "on_spec_uploaded": 1,
        "on_execution_ended": 1,
        "on_command": len(run.obeyed),
        "on_training_event": job_events,
        "on_cost_event": job_events,
        "on_checkpoint": sum(_signs(each) + (each.metered.saves if each.metered else 0) for each in given),
    }
    return {name: count for name, count in found.items() if count}


def _signs(attempt: Attempt) -> int:
    """How often its progress.json came, at most: by the clock, and at its first and last step."""
    return signs_within(attempt.training_s or 0) + 3


def saved_quantities(run: Run, path: Path) -> dict[str, Decimal]:
    """What the attempts of one execution saved: requests, their events, and the storage until the execution ended.

    As if nothing had been pruned and everything had lain there from the start: an upper bound, of a fraction of a cent.
    """
    within = [
        each.metered for each in run.attempts if path.began_at <= each.created_at <= path.ended_at and each.metered
    ]
    files = Decimal(sum(each.saved_files for each in within))
    months = Decimal((path.ended_at - path.began_at) // timedelta(seconds=1)) / _MONTH_S
    stored_gb = Decimal(sum(each.saved_bytes for each in within)) / 10**9
    return {"checkpoint writes": files, "checkpoint events": files, "checkpoint storage": stored_gb * months}


def execution_entry(
    run: Run, number: int, line: LedgerLine, path: Path, amounts: Mapping[str, Decimal]
) -> LedgerEntry | None:
    """The entry of one execution, on the day it ended: a charge for everything, and their sum. Final at once."""
    ref = CostRef(run.tenant, run.run_id, execution=number)
    charges = tuple(_charge(name, quantity) for name, quantity in amounts.items() if quantity)
    if not charges:
        return None
    total = sum((each.amount_usd for each in charges), Decimal(0))
    day = path.ended_at.date()
    return LedgerEntry(
        id=entry_id(ref, line, day),
        tenant=ref.tenant,
        run_id=ref.run_id,
        attempt=0,
        execution=number,
        line=line,
        day=day,
        phase_ms={},
        metered_ms=0,
        billed_s=0,
        instance_type="",
        instance_count=0,
        quantity=Decimal(1),
        unit="execution",
        unit_price_usd=total,
        price_source="the price of each charge",
        price_as_of=min(PRICES[each.name].as_of for each in charges),
        amount_usd=total,
        state="final",
        charges=charges,
    )


def _charge(name: str, quantity: Decimal) -> Charge:
    price = PRICES[name].usd
    return Charge(
        name=name,
        quantity=rounded(quantity),
        unit=_UNITS.get(name, name.split()[-1].removesuffix("s")),
        unit_price_usd=price,
        amount_usd=rounded(quantity * price),
    )
