"""What functions count: the EMF line on their standard output, of which CloudWatch makes metrics and the emulator none."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from microtuning_core.domain.budget import STOPS, WARNINGS
from microtuning_core.domain.recovery import STAGES
from microtuning_core.domain.run import Recovery
from microtuning_core.usecases.reconciling import Tick

CONTEXT = SimpleNamespace(
    function_name="f",
    memory_limit_in_mb=128,
    invoked_function_arn="arn:aws:lambda:us-east-1:000000000000:function:f",
    aws_request_id="1",
)
COUNTS: Counter[str] = Counter()  # what use cases counted
RECOVERIES: list[tuple[str, Recovery]] = []  # … and heard of
PROGRESS_KEY = "tenants/acme/runs/acme-sort-0a1b2c3d4e5f/checkpoints/l01/progress.json"


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("POWERTOOLS_METRICS_NAMESPACE", "microtuning-prod")
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "on_checkpoint")
    monkeypatch.setattr("functions._entry.services", lambda: SimpleNamespace(counts=COUNTS, recoveries=RECOVERIES))
    return monkeypatch


def emitted(printed: str) -> dict[str, Any]:
    """The metrics of all EMF lines together; a metric written several times in one line is a list there."""
    lines = [json.loads(line) for line in printed.splitlines() if '"_aws"' in line]
    found: dict[str, Any] = {}
    for line in lines:
        (directive,) = line["_aws"]["CloudWatchMetrics"]
        found |= {each["Name"]: (line[each["Name"]], each["Unit"]) for each in directive["Metrics"]}
    return found


def test_a_recovery_is_a_metric_a_stage_and_one_of_them_all(
    counting: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from functions import on_checkpoint

    times = dict(zip(STAGES, [1, 20, 300, 4000, 50000], strict=True))
    recovery = Recovery(cause="killed by signal 9", at=datetime(2026, 1, 2, tzinfo=UTC), **times)
    counting.setattr(on_checkpoint, "services", lambda: SimpleNamespace(runs=SimpleNamespace(find=lambda _: object())))
    heard = lambda _services, _key: RECOVERIES.append(("acme-sort-0a1b2c3d4e5f", recovery))  # noqa: E731
    counting.setattr(on_checkpoint, "hear_progress", heard)
    stored = {"bucket": {"name": "b"}, "object": {"key": PROGRESS_KEY, "eTag": "e"}}
    body = {"Records": [{"s3": stored, "eventTime": "2026-01-02T03:04:05Z"}]}
    counting.setattr("functions._queue.services", on_checkpoint.services)
    on_checkpoint.handler({"Records": [{"messageId": "m", "body": json.dumps(body)}]}, CONTEXT)  # type: ignore[arg-type]
    metrics = emitted(capsys.readouterr().out)
    assert {name: value for name, value in metrics.items() if name.startswith("Recovery")} == {
        "RecoveryDetect": ([1.0], "Milliseconds"),
        "RecoveryDecide": ([20.0], "Milliseconds"),
        "RecoveryProvision": ([300.0], "Milliseconds"),
        "RecoveryRestore": ([4000.0], "Milliseconds"),
        "RecoveryFirstStep": ([50000.0], "Milliseconds"),
        "RecoveryTotal": ([54321.0], "Milliseconds"),
    }
    assert RECOVERIES == []


@pytest.mark.parametrize(("age_s", "expected"), [(77, ([77.0], "Seconds")), (None, None)])
def test_a_tick_counts_late_mirrors_and_the_age_of_the_oldest_checkpoint(
    age_s: int | None, expected: Any, counting: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from functions import reconcile

    tick = Tick(looked_at=["a", "b"], late=["b"], oldest_checkpoint_s=age_s)
    counting.setattr(reconcile, "services", lambda: None)
    counting.setattr(reconcile, "reconcile", lambda _services: tick)
    assert reconcile.handler({}, CONTEXT) == {"looked_at": ["a", "b"]}  # type: ignore[arg-type]
    metrics = emitted(capsys.readouterr().out)
    assert (metrics["OpenRuns"], metrics["LateMirrors"]) == (([2.0], "Count"), ([1.0], "Count"))
    assert metrics.get("OldestCheckpointAge") == expected


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_use_case_counted_leaves_with_the_function_that_did_it_once_also_if_it_then_fails(
    fails: bool, counting: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from functions import reconcile

    def ticks(_services: Any) -> Tick:
        COUNTS.update({STOPS: 2, WARNINGS: 1})
        if fails:
            raise ExceptionGroup("some runs could not be reconciled", [ValueError()])
        return Tick()

    counting.setattr(reconcile, "services", lambda: None)
    counting.setattr(reconcile, "reconcile", ticks)
    try:
        reconcile.handler({}, CONTEXT)  # type: ignore[arg-type]
    except ExceptionGroup:
        assert fails
    metrics = emitted(capsys.readouterr().out)
    assert (metrics["BudgetStops"], metrics["BudgetWarnings"], COUNTS) == (
        ([2.0], "Count"),
        ([1.0], "Count"),
        Counter(),
    )
