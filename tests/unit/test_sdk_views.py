"""What people and programs are shown of runs: JSON shapes, progress lines, receipts."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import microtuning_sdk
from microtuning_core.aws.runs import Checkpoint
from microtuning_core.domain.cost import LedgerEntry
from microtuning_core.domain.errors import StageUnreachable, SubmitRefused
from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.run import (
    Attempt,
    AttemptPlan,
    CheckpointRef,
    FailureNote,
    Recovery,
    Run,
    RunMetrics,
    RunStatus,
    new_run,
)
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_sdk import _views
from microtuning_sdk._display import Display, Standing, changes, detached, ending, event_line, standing_line
from microtuning_sdk._follow import _show
from microtuning_sdk._logs import LogLine, metrics_in
from microtuning_sdk._run import _reason
from microtuning_sdk._submit import run_id_in
from microtuning_sdk.cli._runs import _cost_in_short

RUN_ID = "default-sort-digits-0z3k8q5m1c7t"
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def a_run(**changed: Any) -> Run:
    spec = parse_spec(
        {"name": "sort digits", "model": {"arch": "Transformer"}, "algorithm": {"type": "sft"},
         "data": {"train": "s3://bucket/rows.jsonl"}}
    )  # fmt: skip
    return new_run(RUN_ID, spec, START).with_(**changed)


def an_attempt(**changed: Any) -> Attempt:
    plan = AttemptPlan(
        instance_type="ml.m5.large", count=1, spot=False, micro_batch_size=None, max_runtime_s=3600,
        price_usd_per_hour=Decimal("0.115"),
    )  # fmt: skip
    fields = {"attempt": 1, "job_name": f"local-{RUN_ID}-a001", "lineage": 1, "plan": plan, "created_at": START}
    return Attempt(**fields | changed)  # type: ignore[arg-type]


def an_entry(**changed: Any) -> LedgerEntry:
    fields = {
        "id": f"{RUN_ID}#a001#compute#2026-01-02", "tenant": "default", "run_id": RUN_ID, "attempt": 1,
        "line": "compute", "day": date(2026, 1, 2), "phase_ms": {}, "metered_ms": 0, "billed_s": 36,
        "instance_type": "ml.m5.large", "instance_count": 1, "quantity": "0.01", "unit": "instance-hour",
        "unit_price_usd": "0.115", "price_source": "a list", "price_as_of": date(2026, 9, 1),
        "amount_usd": "0.0011500000", "state": "final",
    }  # fmt: skip
    return LedgerEntry(**fields | changed)  # type: ignore[arg-type]


def test_runs_list_has_exactly_its_keys() -> None:
    view = _views.runs_view([a_run(cost_usd=Decimal("0.0011500000"))], {})
    assert view == {
        "runs": [
            {"run_id": RUN_ID, "tenant": "default", "name": "sort digits", "status": "submitted", "reason": None,
             "place": None, "created_at": "2026-01-02T03:04:05Z", "cost_usd": "0.00115"}
        ]
    }  # fmt: skip


def test_only_a_run_that_waits_has_a_place() -> None:
    waits, runs = a_run(status=RunStatus.QUEUED), a_run(status=RunStatus.PLANNING)
    assert [_views.place_of(run, {RUN_ID: 3}) for run in (waits, runs)] == [3, None]
    assert _views.place_of(waits, {}) is None


def test_runs_show_has_exactly_its_keys_and_is_json() -> None:
    recovery = Recovery(cause="worker killed", at=START, detect_ms=10)
    failure = FailureNote(failure_class=FailureClass.PLATFORM, message="the host was lost")
    run = a_run(
        attempts=(an_attempt(outcome="failed", failure=failure, billed_s=36, recoveries=(recovery,)),),
        metrics=RunMetrics(first={"reward": 0.1}, last={"reward": 0.9}, eval_before={"eval_loss": 2.0}),
    )
    checkpoint = Checkpoint(1, 40, "s3://bucket/step-40/", True, {}, "2026-01-02T03:05:05+00:00")
    event = {"at": "2026-01-02T03:04:05Z", "kind": "planned", "message": "", "attempt": 1}
    view = json.loads(json.dumps(_views.run_view(run, [checkpoint], [an_entry()], "arn:execution", None, [event])))
    assert list(view) == [
        "run_id", "status", "reason", "place", "attempts", "recoveries", "checkpoints", "checkpointed_at",
        "mirror_late_since", "metrics", "cost", "events", "execution_arn",
    ]  # fmt: skip
    assert view["events"] == [{"at": "2026-01-02T03:04:05Z", "kind": "planned", "message": ""}]
    assert view["recoveries"] == [
        {
            "cause": "worker killed", "at": "2026-01-02T03:04:05Z", "detect_ms": 10, "decide_ms": None,
            "provision_ms": None, "restore_ms": None, "first_step_ms": None, "total_ms": None,
        }
    ]  # fmt: skip
    assert list(view["attempts"][0]) == [
        "attempt", "job_name", "instance_type", "count", "spot", "outcome", "failure_class", "created_at",
        "started_at", "ended_at", "billed_s", "recoveries",
    ]  # fmt: skip
    assert view["attempts"][0]["failure_class"] == "platform"
    assert view["checkpoints"] == [{"lineage": 1, "step": 40, "uri": "s3://bucket/step-40/", "whole": True}]
    assert view["metrics"] == {"first": {"reward": 0.1, "eval_loss": 2.0}, "last": {"reward": 0.9}}
    assert (view["cost"]["amount_usd"], len(view["cost"]["lines"])) == ("0.00115", 1)


def test_money_is_text_and_adds_up_without_rounding() -> None:
    tenth = an_entry(amount_usd="0.1000000000")
    fifth = an_entry(id=f"{RUN_ID}#a002#compute#2026-01-02", attempt=2, amount_usd="0.2000000000")
    view = _views.cost_view([tenth, fifth, tenth])
    assert (view["total_usd"], [line["amount_usd"] for line in view["lines"]]) == (
        "0.3",
        ["0.1000000000", "0.2000000000"],
    )


LAUNCHED = an_attempt(launched_at=START, cost_state="final")


@pytest.mark.parametrize(
    ("status", "attempts", "state"),
    [
        ("submitted", (), "estimate"),
        ("training", (LAUNCHED,), "estimate"),  # an attempt may follow
        ("completed", (LAUNCHED,), "final"),
        ("failed", (an_attempt(launched_at=START, cost_state="estimate"),), "estimate"),
        ("failed", (LAUNCHED, an_attempt(attempt=2, launched_at=START)), "estimate"),
        ("stopped", (), "final"),  # before it had a job
        ("failed", (an_attempt(),), "final"),  # refused at CreateTrainingJob
        ("failed", (LAUNCHED, an_attempt(attempt=2)), "final"),
    ],
)
def test_a_cost_is_final_once_the_run_is_over_and_every_job_it_had_is_settled(
    status: str, attempts: tuple[Attempt, ...], state: str
) -> None:
    run = a_run(status=RunStatus(status), attempts=attempts, executions_costed=1)
    assert _views.run_cost_view(run, [])["state"] == state
    assert _views.run_view(run, [], [], "arn")["cost"]["state"] == state


def test_what_a_run_costs_at_most_takes_billed_seconds_where_they_are_known_and_the_clock_where_not() -> None:
    settled = an_attempt(started_at=START, billed_s=3600)
    running = an_attempt(attempt=2, started_at=START)
    now = START + timedelta(seconds=1800)
    cost = _views.run_cost_view(a_run(attempts=(settled, running), raised_budget_usd=Decimal(2)), [an_entry()], now)
    assert (cost["amount_usd"], cost["at_most_usd"], cost["budget_usd"]) == ("0.00115", "0.1725", "2")
    over = a_run(attempts=(settled,), status=RunStatus.FAILED, executions_costed=1)
    assert _views.run_cost_view(over, [an_entry()], now)["at_most_usd"] == "0.00115"
    assert _cost_in_short(cost) == "cost: 0.0012 USD (estimate, at most 0.1725); budget: 2.0000 USD"
    assert _cost_in_short(_views.run_cost_view(over, [an_entry()], now)) == "cost: 0.0012 USD (final)"


def test_the_moving_line_says_step_reward_accuracy_speed_and_cost() -> None:
    metrics = {"step": 12, "total_steps": 80, "reward": 0.4321, "accuracy": 0.31, "tokens_per_s": 5120.4, "loss": None}
    assert standing_line(Standing("training", metrics, Decimal("0.00031"))) == (
        "step 12/80 · reward 0.432 · accuracy 0.31 · 0.0003 USD · 5,120 tokens/s"
    )


def test_before_the_first_step_the_moving_line_says_the_status() -> None:
    assert standing_line(Standing("queued", {}, Decimal(0))) == "queued · 0.0000 USD"


def test_the_warm_start_moves_the_line_by_the_events_that_its_recipe_emits() -> None:
    recipe = (Path(__file__).parents[2] / "training_container" / "recipes" / "supervised.py").read_text("utf-8")
    assert 'emit("phase", phase="warm_start", warm_step=state.warm_step, warm_loss=' in recipe
    line = LogLine(
        0, "stream", json.dumps({"event": "phase", "phase": "warm_start", "warm_step": 30, "warm_loss": 1.5})
    )
    seen = _show(line, {}, Display(Console(file=io.StringIO())))
    assert standing_line(Standing("training", seen, Decimal(0))) == "warm start, step 30 · warm loss 1.5 · 0.0000 USD"


def test_each_attempt_recovery_checkpoint_and_end_is_said_once() -> None:
    before = a_run(status=RunStatus.TRAINING, attempts=(an_attempt(),))
    failure = FailureNote(failure_class=FailureClass.CAPACITY, message="no machine")
    ended = an_attempt(failure=failure, recoveries=(Recovery(cause="spot", at=START),))
    after = before.with_(
        status=RunStatus.FAILED, reason="gave up", attempts=(ended, an_attempt(attempt=2)),
        last_checkpoint=CheckpointRef(lineage=1, step=40),
    )  # fmt: skip
    assert changes(before, after) == [
        "attempt 1 ended: no machine (capacity)",
        "attempt 1 recovered (spot)",
        "attempt 2: ml.m5.large, at most 0.115 USD an hour",
        "checkpoint at step 40",
    ]
    assert ending(after) == f"run {RUN_ID} failed: gave up"
    assert changes(after, after) == []


def test_an_evaluation_is_shown_in_words_and_metrics_only_on_the_moving_line() -> None:
    assert event_line({"event": "eval", "when": "after", "step": 9, "eval_accuracy": 0.98}) == (
        "evaluation after training: accuracy 0.98"
    )
    assert event_line({"event": "metrics", "step": 1}) is None


def test_detaching_says_that_the_run_goes_on_and_how_to_come_back() -> None:
    text = detached(RUN_ID)
    assert "GOES ON" in text
    assert f"microtuning runs wait {RUN_ID}" in text
    assert f"microtuning runs cancel {RUN_ID}" in text


def test_a_step_that_was_done_again_counts_once_and_as_done_last() -> None:
    events = [
        {"event": "metrics", "step": step, "reward": reward}
        for step, reward in ((1, 0.1), (3, 0.3), (2, 0.2), (3, 0.4))
    ]
    assert [event["reward"] for event in metrics_in([*events, {"event": "eval", "step": 3}])] == [0.1, 0.2, 0.4]


@pytest.mark.parametrize("text", ["step 1", '{"step": 1}', '{"event": 3}', "{", '{"event": "x"', "[1]"])
def test_a_users_own_line_is_never_taken_for_an_event(text: str) -> None:
    assert LogLine(0, "stream", text).event is None


def test_a_failure_says_where_in_the_users_code_it_lies() -> None:
    failure = FailureNote(failure_class=FailureClass.USER, message="ValueError: no", file="rewards.py", line=7)
    assert _reason(a_run(reason="the reward raised", failure=failure)) == "the reward raised (rewards.py, line 7)"
    assert _reason(a_run()) == "no reason was recorded"


def test_a_receipt_counts_only_when_it_answers_this_upload() -> None:
    assert run_id_in(None, "abc") is None
    assert run_id_in({"etag": "of another upload", "run_id": RUN_ID}, "abc") is None
    assert run_id_in({"etag": '"abc"', "run_id": RUN_ID}, "abc") == RUN_ID


def test_a_receipt_with_errors_raises_them_by_field_and_line() -> None:
    errors = [
        {"field": "algorithm.epochs", "line": 5, "message": "must be 1 or more"},
        {"field": "name", "message": "x"},
    ]
    with pytest.raises(SubmitRefused, match=r"Nothing was started: algorithm\.epochs \(line 5\): must be") as refused:
        run_id_in({"etag": "abc", "errors": errors}, "abc")
    assert [(each.field, each.line) for each in refused.value.errors] == [("algorithm.epochs", 5), ("name", None)]


def test_the_public_names_are_exactly_these() -> None:
    assert dir(microtuning_sdk) == microtuning_sdk.__all__ == sorted(microtuning_sdk.__all__)
    assert all(getattr(microtuning_sdk, name).__name__ == name for name in microtuning_sdk.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        microtuning_sdk.Trainer  # type: ignore[attr-defined]  # noqa: B018


def test_the_sdk_starts_without_torch_and_without_the_local_cloud() -> None:
    import subprocess
    import sys

    heavy = "{'torch', 'transformers', 'microtuning_local', 'training_container', 'functions'} & set(sys.modules)"
    code = f"import sys; from microtuning_sdk import *; import microtuning_sdk.cli._parser; print({heavy} or [])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_answer_names_the_stage_and_the_next_step() -> None:
    assert str(StageUnreachable("dev", "gave no receipt in 180 s")) == (
        "The stage 'dev' gave no receipt in 180 s. See `microtuning doctor --stage dev`."
    )
