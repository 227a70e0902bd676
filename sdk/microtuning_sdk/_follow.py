"""Waiting for a run: look at its record, read its new log lines, show both, until it is over."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.budget import clock_usd
from microtuning_sdk._display import Display, Standing, changes, ending, event_line
from microtuning_sdk._logs import LogTail, load_cursor, save_cursor

if TYPE_CHECKING:
    from microtuning_core.domain.run import Run
    from microtuning_sdk._connection import Stage
    from microtuning_sdk._logs import LogLine

LOCAL_POLL_S = 0.3
CLOUD_POLL_S = 3.0  # the logs of one account share a few reads a second
_LAST_LINES_S = 0.5
_LAST_COSTS_S = 5.0  # what steered a run is known a moment after its end; on AWS, when its events are slow, later


def wait_silently(stage: Stage, run_id: str, timeout_s: float | None) -> Run:
    """The run once it is completed, failed or stopped."""
    give_up_at = _deadline(timeout_s)
    while not (run := stage.runs.get(run_id)).is_final:
        _pause(stage, run_id, give_up_at)
    return _paid(stage, run)


def _paid(stage: Stage, run: Run) -> Run:
    """The run that is over, with its costs final where that takes but a moment."""
    give_up_at = time.monotonic() + _LAST_COSTS_S
    while not run.costs_are_final and time.monotonic() < give_up_at:
        time.sleep(LOCAL_POLL_S)
        run = stage.runs.get(run.run_id)
    return run


def follow(stage: Stage, run_id: str, timeout_s: float | None) -> Run:
    """The same, with log lines, notices and progress shown; on from where this machine's user last saw them."""
    give_up_at = _deadline(timeout_s)
    tail = LogTail(stage.cloudwatch_logs, load_cursor(stage, run_id))
    try:
        with Display() as display:
            return _follow(stage, run_id, give_up_at, tail, display)
    finally:
        save_cursor(stage, run_id, tail.cursor)


def _follow(stage: Stage, run_id: str, give_up_at: float | None, tail: LogTail, display: Display) -> Run:
    seen: Run | None = None
    metrics: dict[str, Any] = {}
    while True:
        # The record first: once it says that all is over, the lines read after it are all there are.
        run = stage.runs.get(run_id)
        if run.is_final:
            time.sleep(_LAST_LINES_S)
            run = _paid(stage, run)
        for text in changes(seen, run):
            display.say(text)
        for line in tail.read(attempt.job_name for attempt in run.attempts):
            metrics = _show(line, metrics, display)
        metrics = metrics or dict(run.metrics.last)
        display.standing(Standing(run.status, metrics, clock_usd(run, datetime.now(UTC))), now=run.is_final)
        if run.is_final:
            display.say(ending(run))
            return run
        seen = run
        _pause(stage, run_id, give_up_at)


def _show(line: LogLine, metrics: dict[str, Any], display: Display) -> dict[str, Any]:
    """The newest metrics; everything else of a line goes to the display."""
    event = line.event
    if event is None:
        display.say(line.text)
        return metrics
    if event["event"] == "metrics" or "warm_loss" in event:
        return event
    if text := event_line(event):
        display.say(text)
    return metrics


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _pause(stage: Stage, run_id: str, give_up_at: float | None) -> None:
    if give_up_at is not None and time.monotonic() >= give_up_at:
        raise TimeoutError(
            f"Run {run_id} is not over yet and goes on. Wait again with `microtuning runs wait {run_id}`."
        )
    time.sleep(LOCAL_POLL_S if stage.is_local else CLOUD_POLL_S)
