"""Failure is data: a class found from evidence, and a table that says what a class leads to.

    SageMaker's answer -> classify_job / classify_refusal / classify_execution -> Failure
    Failure + the attempts so far -> action_for -> Action: what becomes of the run

One error name has many causes, so the cause decides. Evidence that nobody foresaw is class `unknown`: shown, never
retried, never an exception. To add a class: its member, its evidence below, its line in ACTIONS and in the table of
docs/architecture.md.

The training container reports its own failures as one JSON line, which SageMaker wraps and cuts at 1,024 characters:

    AlgorithmError: {"class": "memory", "message": "CUDA out of memory", "file": "rewards.py", "line": 12}, exit code: 1
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.record import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from microtuning_core.domain.job import JobFacts


class FailureClass(StrEnum):
    CAPACITY = "capacity"  # no machine of this type now
    QUOTA = "quota"  # the account may not have more of this type
    THROTTLED = "throttled"  # asked too fast
    PLATFORM = "platform"  # the service or the host failed, or the job fell silent
    INTERRUPTED = "interrupted"  # spot took the machine and gave none back in time
    MEMORY = "memory"  # out of GPU or host memory
    NUMERICS = "numerics"  # non-finite loss or gradients
    USER = "user"  # the user's code, data, reward or request
    DEADLINE = "deadline"  # run time or budget is used up
    STOPPED = "stopped"  # somebody stopped the job
    UNKNOWN = "unknown"  # evidence that no rule reads


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure: its class, one sentence for the user, and where in the user's code if it was there."""

    failure_class: FailureClass
    message: str
    file: str | None = None
    line: int | None = None


class AttemptSummary(Value):
    """One settled attempt, as far as the next step depends on it.

    checkpoint_step: newest whole step at its end. recoveries: from which it came back by itself.
    """

    failure_class: FailureClass | None
    billed_s: int
    checkpoint_step: int | None
    instance_type: str
    micro_batch_size: int | None
    spot: bool
    lineage: int = 1
    recoveries: int = 0


class ActionKind(StrEnum):
    RETRY_SAME = "retry_same"
    NEXT_CANDIDATE = "next_candidate"
    WAIT_FOR_CAPACITY = "wait_for_capacity"
    NEW_LINEAGE = "new_lineage"
    GIVE_UP = "give_up"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Action:
    """What to do; `wait_s` seconds before it (only when waiting), and why where the failure alone does not say it."""

    kind: ActionKind
    wait_s: int = 0
    reason: str = ""


# ---------------------------------------------------------------------------------------------- evidence -> class

# What each code of the AWS API means for CreateTrainingJob. Any other code is a request that can never work.
REFUSALS: dict[str, FailureClass] = {
    **dict.fromkeys(
        ("ThrottlingException", "Throttling", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown"),
        FailureClass.THROTTLED,
    ),
    **dict.fromkeys(("ResourceLimitExceeded", "ServiceQuotaExceededException"), FailureClass.QUOTA),
    **dict.fromkeys(("CapacityError", "InsufficientCapacityException"), FailureClass.CAPACITY),
    **dict.fromkeys(
        ("InternalServerError", "InternalFailure", "InternalServerException", "ServiceUnavailable", "RequestTimeout"),
        FailureClass.PLATFORM,
    ),
    "States.Timeout": FailureClass.DEADLINE,
}

# How SageMaker's own FailureReason begins, where the container is not to blame.
_REASON_PREFIXES: tuple[tuple[str, FailureClass], ...] = (
    ("CapacityError", FailureClass.CAPACITY),
    ("InternalServerError", FailureClass.PLATFORM),
    ("ResourceLimitExceeded", FailureClass.QUOTA),
    ("ThrottlingException", FailureClass.THROTTLED),
    # Objects went away under a job that listed them a moment before: they are of ours and not of the user's. In the words
    # of the local SageMaker; what AWS says then is not known.
    ("ClientError: Checkpoint download failed", FailureClass.PLATFORM),
    ("ClientError", FailureClass.USER),
)

# What a user's own script (which writes no line of ours) leaves in its last words.
_SCRIPT_EVIDENCE: tuple[tuple[re.Pattern[str], FailureClass], ...] = (
    (re.compile(r"uncorrectable ECC|NCCL (error|WARN)|Remote host (is )?lost", re.I), FailureClass.PLATFORM),
    (
        re.compile(r"out of memory|OutOfMemoryError|can(no|')t allocate memory|\bMemoryError\b", re.I),
        FailureClass.MEMORY,
    ),
)

# Killed from outside, without a word of ours: 137 = SIGKILL, 143 = SIGTERM that nobody asked for. Our supervisor says
# itself when the kernel killed a worker for memory; a silent 137 is a lost host, and the same plan keeps the same bits.
_EXIT_CODES = {
    137: FailureClass.PLATFORM,
    -9: FailureClass.PLATFORM,
    143: FailureClass.PLATFORM,
    -15: FailureClass.PLATFORM,
}
_EXIT_CODE = re.compile(r"exit ?code:? *(-?\d+)", re.I)

# The classes a container may claim for itself. Anything else it says is its own fault: no class here is free of cost.
_CONTAINER_CLASSES = frozenset({FailureClass.MEMORY, FailureClass.NUMERICS, FailureClass.USER, FailureClass.PLATFORM})
_LINE_START = re.compile(r'^AlgorithmError:\s*(?=\{\s*"class")')
_MESSAGE_LIMIT = 900  # characters kept of foreign text
_NO_REASON = "SageMaker gave no reason"


def classify_job(job: JobFacts) -> Failure:
    """Why a job that ended without completing ended. Never raises."""
    return classify_end(job.status, job.secondary, job.failure_reason, job.billed_s)


def classify_end(status: str, secondary: str | None, failure_reason: str | None, billed_s: int | None) -> Failure:
    """The same from single fields of DescribeTrainingJob, each of which may be missing.

    Args:
        status: TrainingJobStatus: Failed or Stopped.
        secondary: SecondaryStatus, which tells the kinds of Stopped apart.
        failure_reason: SageMaker's text; only failed jobs have one.
        billed_s: BillableTimeInSeconds; None counts as 0.
    """
    match secondary:
        case "MaxRuntimeExceeded":
            return Failure(FailureClass.DEADLINE, "the job reached its longest run time (MaxRuntimeExceeded)")
        case "MaxWaitTimeExceeded" if billed_s:
            return Failure(FailureClass.INTERRUPTED, "spot took the machine and gave none back in time")
        case "MaxWaitTimeExceeded" | "MaxPendingTimeExceeded":
            return Failure(FailureClass.CAPACITY, f"no machine in time ({secondary}, 0 s billed)")
    if status == "Stopped":
        return Failure(FailureClass.STOPPED, "the job was stopped")
    return _classify_reason((failure_reason or "").strip())


def _classify_reason(reason: str) -> Failure:
    if reason.startswith("AlgorithmError"):
        return _own_line(reason) or _script_failure(reason)
    found = next((each for prefix, each in _REASON_PREFIXES if reason.startswith(prefix)), FailureClass.UNKNOWN)
    return _with_advice(Failure(found, reason[:_MESSAGE_LIMIT] or _NO_REASON))


def _own_line(reason: str) -> Failure | None:
    """The failure our container reported, also when its JSON was cut off; None if this is not one of our lines."""
    start = _LINE_START.match(reason)
    if start is None:
        return None
    fields = _fields(reason[start.end() :])
    claimed = str(fields.get("class"))
    found = FailureClass(claimed) if claimed in _CONTAINER_CLASSES else FailureClass.USER
    line, file = fields.get("line"), fields.get("file")
    return Failure(
        found,
        str(fields.get("message") or reason)[:_MESSAGE_LIMIT],
        file if isinstance(file, str) and file else None,
        line if isinstance(line, int) else None,
    )


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.JSONDecoder().raw_decode(text)[0]
    except json.JSONDecodeError:
        return _fields_of_cut_json(text)
    return fields if isinstance(fields, dict) else {}


_STRING_FIELD = re.compile(r'"(class|message|file)"\s*:\s*"((?:[^"\\]|\\.)*)')
_LINE_FIELD = re.compile(r'"line"\s*:\s*(\d+)')


def _fields_of_cut_json(text: str) -> dict[str, Any]:
    """What is left of a JSON object that ends anywhere; the first mention of a field is the real one."""
    found: dict[str, Any] = {}
    for name, raw in _STRING_FIELD.findall(text):
        found.setdefault(name, _unescape(raw))
    line = _LINE_FIELD.search(text)
    return found | ({"line": int(line[1])} if line else {})


def _unescape(raw: str) -> str:
    whole = re.sub(r"\\u[0-9a-fA-F]{0,3}$", "", raw)
    try:
        return str(json.loads(f'"{whole}"', strict=False))
    except json.JSONDecodeError:
        return whole


def _script_failure(reason: str) -> Failure:
    found = next((each for pattern, each in _SCRIPT_EVIDENCE if pattern.search(reason)), None)
    code = _EXIT_CODE.search(reason)
    by_code = _EXIT_CODES.get(int(code[1])) if code else None
    return Failure(found or by_code or FailureClass.USER, reason[:_MESSAGE_LIMIT])


_CODE_IN_TEXT = re.compile(r"Error ?Code: (\w+)|^An error occurred \((\w+)\)")


def classify_refusal(error_code: str, message: str | None) -> Failure:
    """Why CreateTrainingJob was refused: no job was made. `message` may repeat the real code, which then decides."""
    text = message or error_code or _NO_REASON
    inner = _CODE_IN_TEXT.search(text)
    code = (inner[1] or inner[2]) if inner else error_code
    return _with_advice(Failure(REFUSALS.get(code, FailureClass.USER), text[:_MESSAGE_LIMIT]))


def classify_execution(error: str | None, cause: str | None) -> Failure:
    """The error and cause of a workflow execution: a described job as JSON, an AWS error as text, or anything."""
    job = _json_object(cause)
    if "TrainingJobStatus" in job:
        return _classify_described(job)
    known = error in REFUSALS or _CODE_IN_TEXT.search(cause or "")
    if known:
        return classify_refusal(error or "", cause)
    return Failure(FailureClass.UNKNOWN, (cause or error or _NO_REASON)[:_MESSAGE_LIMIT])


def _classify_described(job: dict[str, Any]) -> Failure:
    billed = job.get("BillableTimeInSeconds")
    reason = job.get("FailureReason")
    return classify_end(
        str(job["TrainingJobStatus"]),
        job.get("SecondaryStatus"),
        None if reason is None else str(reason),
        billed if isinstance(billed, int) else None,
    )


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "")
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


_QUOTA_NAME = re.compile(r"service limit '([^']+)'")


def _with_advice(failure: Failure) -> Failure:
    if failure.failure_class is not FailureClass.QUOTA:
        return failure
    named = _QUOTA_NAME.search(failure.message)
    quota = f"quota '{named[1]}'" if named else "SageMaker quota it names"
    return Failure(FailureClass.QUOTA, f"{failure.message} Raise the {quota} in Service Quotas, or allow another type.")


# ------------------------------------------------------------------------------------------------ class -> action

_K = ActionKind

# What a class leads to: the first kind, and the one after it once the first is spent (see _SPENT).
ACTIONS: dict[FailureClass, tuple[ActionKind, ...]] = {
    FailureClass.CAPACITY: (_K.NEXT_CANDIDATE, _K.WAIT_FOR_CAPACITY),
    FailureClass.QUOTA: (_K.NEXT_CANDIDATE, _K.WAIT_FOR_CAPACITY),
    FailureClass.THROTTLED: (_K.RETRY_SAME,),  # the message returns to its queue; no attempt is used up
    FailureClass.PLATFORM: (_K.RETRY_SAME,),
    FailureClass.INTERRUPTED: (_K.RETRY_SAME,),
    FailureClass.MEMORY: (_K.NEXT_CANDIDATE,),  # with more memory: the container has tried smaller micro-batches itself
    FailureClass.NUMERICS: (_K.NEW_LINEAGE, _K.GIVE_UP),
    FailureClass.USER: (_K.GIVE_UP,),
    FailureClass.DEADLINE: (_K.STOP,),
    FailureClass.STOPPED: (_K.STOP,),
    FailureClass.UNKNOWN: (_K.GIVE_UP,),
}

NO_ROOM = frozenset({FailureClass.CAPACITY, FailureClass.QUOTA})
BILLED_ATTEMPTS_WITHOUT_PROGRESS = 3
FIRST_WAIT_S = 60
LONGEST_WAIT_S = 1800
_FREE_RETRIES = 2  # unbilled failures in a row before the next one waits: a free loop is still a loop


def action_for(failure: Failure, history: Sequence[AttemptSummary], *, candidates: int | None = None) -> Action:
    """What to do after `failure`.

    Args:
        failure: of the newest attempt.
        history: the settled attempts, oldest first, the one that just failed last.
        candidates: how many plans there are to choose from; None = one sweep ends when a plan comes up again.
    """
    kinds = ACTIONS[failure.failure_class]
    kind = kinds[-1] if _is_spent(failure.failure_class, history, candidates) else kinds[0]
    if kind in (ActionKind.GIVE_UP, ActionKind.STOP):
        return Action(kind, reason=_repeated(failure) if len(kinds) > 1 else "")
    if billed_without_progress(history) >= BILLED_ATTEMPTS_WITHOUT_PROGRESS:
        return Action(ActionKind.GIVE_UP, reason=_no_progress(failure))
    if failure.failure_class in NO_ROOM:
        return _try_or_wait(kind, waits=_sweep_excess(history, candidates))
    return _try_or_wait(kind, waits=_free_excess(history) if kind is ActionKind.RETRY_SAME else 0)


def _try_or_wait(kind: ActionKind, *, waits: int) -> Action:
    """`kind` at once, or the n-th wait: 1, 2, 4 … 30 minutes."""
    if waits <= 0:
        return Action(kind)
    return Action(ActionKind.WAIT_FOR_CAPACITY, wait_s=min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(waits - 1, 10)))


def _is_spent(failure_class: FailureClass, history: Sequence[AttemptSummary], candidates: int | None) -> bool:
    match failure_class:
        case FailureClass.CAPACITY | FailureClass.QUOTA:
            return _sweep_excess(history, candidates) > 0
        case FailureClass.NUMERICS:
            return any(each.failure_class is FailureClass.NUMERICS for each in history[:-1])
    return False


def no_room_streak(history: Sequence[AttemptSummary]) -> list[AttemptSummary]:
    """The newest attempts, back to the last that got a machine: each found no capacity or no quota."""
    return _trailing(history, lambda each: each.failure_class in NO_ROOM)


def _sweep_excess(history: Sequence[AttemptSummary], candidates: int | None) -> int:
    """0 while plans are left that were not tried in this streak; then 1, 2, … with every attempt more."""
    streak = no_room_streak(history)
    tried = {(each.instance_type, each.spot) for each in streak}
    return len(streak) - (len(tried) if candidates is None else candidates - 1)


def _free_excess(history: Sequence[AttemptSummary]) -> int:
    """How many attempts that cost nothing, and so count for nothing, are beyond the few that go on at once."""
    return len(_trailing(history, lambda each: each.billed_s == 0)) - _FREE_RETRIES


def _trailing(history: Sequence[AttemptSummary], belongs: Callable[[AttemptSummary], bool]) -> list[AttemptSummary]:
    """The longest end of `history` in which every attempt belongs, oldest first."""
    start = len(history)
    while start and belongs(history[start - 1]):
        start -= 1
    return list(history[start:])


def billed_without_progress(history: Sequence[AttemptSummary]) -> int:
    """How many billed attempts in a row, up to the newest, left no newer checkpoint of their lineage."""
    count, newest_by_lineage = 0, dict[int, int]()
    for each in history:
        if each.billed_s == 0:
            continue
        newest, step = newest_by_lineage.get(each.lineage, -1), each.checkpoint_step
        made_progress = step is not None and step > newest
        count = 0 if made_progress else count + 1
        newest_by_lineage[each.lineage] = max(newest, -1 if step is None else step)
    return count


def _no_progress(failure: Failure) -> str:
    return f"{BILLED_ATTEMPTS_WITHOUT_PROGRESS} billed attempts in a row made no newer checkpoint: {failure.message}"


def _repeated(failure: Failure) -> str:
    return f"it happened again after a new lineage: {failure.message}"
