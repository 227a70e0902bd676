"""What is known of runs as plain JSON: the shapes of `--json`, whose keys never change their meaning.

    runs list     {"runs": [{"run_id", "tenant", "name", "status", "reason", "place", "created_at",
                   "cost_usd"}]}
    runs show     {"run_id", "status", "reason", "place", "attempts", "recoveries", "checkpoints", "checkpointed_at",
                   "mirror_late_since", "metrics", "cost", "events": [{"at", "kind", "message"}], "execution_arn"}
    a recovery    {"cause", "at", "detect_ms", "decide_ms", "provision_ms", "restore_ms", "first_step_ms", "total_ms"}
    checkpoints   {"checkpoints": [{"lineage", "step", "uri", "whole"}]}
    a run's cost  {"amount_usd", "state", "at_most_usd", "budget_usd", "lines"}
    cost          {"total_usd", "lines"}

Money is a string with every decimal, so that no reader makes a float of it; times are UTC, ISO 8601.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.budget import clock_usd
from microtuning_core.domain.cost import latest, total
from microtuning_core.domain.recovery import STAGES, recoveries, total_ms
from microtuning_core.domain.run import RunStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from microtuning_core.aws.runs import Checkpoint
    from microtuning_core.domain.cost import LedgerEntry
    from microtuning_core.domain.run import Attempt, Recovery, Run

View = dict[str, Any]


def runs_view(runs: Iterable[Run], places: Mapping[str, int]) -> View:
    return {"runs": [_run_row(run, place_of(run, places)) for run in runs]}


def place_of(run: Run, places: Mapping[str, int]) -> int | None:
    """1 is next; only of a run that waits, whatever was written down of it before."""
    return places.get(run.run_id) if run.status == RunStatus.QUEUED else None


def _run_row(run: Run, place: int | None) -> View:
    return {
        "run_id": run.run_id,
        "tenant": run.tenant,
        "name": run.name,
        "status": run.status.value,
        "reason": run.reason,
        "place": place,
        "created_at": when(run.created_at),
        "cost_usd": None if run.cost_usd is None else money(run.cost_usd),
    }


def run_view(
    run: Run,
    checkpoints: Sequence[Checkpoint],
    entries: Sequence[LedgerEntry],
    execution_arn: str,
    place: int | None = None,
    events: Sequence[Mapping[str, Any]] = (),
) -> View:
    """events: what happened, as the stage wrote it down for people, oldest first."""
    return {
        "run_id": run.run_id,
        "status": run.status.value,
        "reason": run.reason,
        "place": place,
        "attempts": [_attempt_view(attempt) for attempt in run.attempts],
        "recoveries": [_recovery_view(each) for each in recoveries(run)],
        **checkpoints_view(checkpoints),
        "checkpointed_at": when(run.checkpointed_at),
        "mirror_late_since": when(run.mirror_late_since),
        "metrics": {
            "first": run.metrics.first | run.metrics.eval_before,
            "last": run.metrics.last | run.metrics.eval_after,
        },
        "cost": run_cost_view(run, entries),
        "events": [{key: event[key] for key in ("at", "kind", "message")} for event in events],
        "execution_arn": execution_arn,
    }


def _attempt_view(attempt: Attempt) -> View:
    return {
        "attempt": attempt.attempt,
        "job_name": attempt.job_name,
        "instance_type": attempt.plan.instance_type,
        "count": attempt.plan.count,
        "spot": attempt.plan.spot,
        "outcome": attempt.outcome,
        "failure_class": attempt.failure.failure_class.value if attempt.failure else None,
        "created_at": when(attempt.created_at),
        "started_at": when(attempt.started_at),
        "ended_at": when(attempt.ended_at),
        "billed_s": attempt.billed_s,
        "recoveries": [recovery.model_dump(mode="json") for recovery in attempt.recoveries],
    }


def _recovery_view(recovery: Recovery) -> View:
    return (
        {"cause": recovery.cause, "at": when(recovery.at)}
        | {name: getattr(recovery, name) for name in STAGES}
        | {"total_ms": total_ms(recovery)}
    )


def checkpoints_view(checkpoints: Iterable[Checkpoint]) -> View:
    keys = ("lineage", "step", "uri", "whole")
    return {"checkpoints": [{key: getattr(each, key) for key in keys} for each in checkpoints]}


def run_cost_view(run: Run, entries: Sequence[LedgerEntry], now: datetime | None = None) -> View:
    """`state` is final once no amount may change any more; at once for a run that ended before it had a job.

    `at_most_usd`: until then, with every machine at the on-demand price by the clock, since spot's bill comes at the end.
    """
    lines = latest(entries)
    amount, is_final = total(lines), run.is_final and run.costs_are_final
    at_most = amount if is_final else max(amount, clock_usd(run, now or datetime.now(UTC)))
    return {
        "amount_usd": money(amount),
        "state": "final" if is_final else "estimate",
        "at_most_usd": money(at_most),
        "budget_usd": None if run.budget_usd is None else money(run.budget_usd),
        "lines": [_line_view(entry) for entry in lines],
    }


def cost_view(entries: Sequence[LedgerEntry]) -> View:
    lines = latest(entries)
    return {"total_usd": money(total(lines)), "lines": [_line_view(entry) for entry in lines]}


def _line_view(entry: LedgerEntry) -> View:
    return entry.model_dump(mode="json", exclude={"schema_version"})


def when(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def money(usd: Decimal) -> str:
    """All decimals that count, never in exponent form: "0.0031", "0"."""
    text = f"{usd:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
