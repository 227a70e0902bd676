"""What a person sees while a run is waited for.

On a terminal one line that moves; elsewhere a plain line now and then. Log lines and notices pass above it.

    step 12/80 · reward 0.43 · accuracy 0.31 · 5,120 tokens/s · 0.0003 USD
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from microtuning_core.domain.cost import shown
from microtuning_core.domain.run import RunStatus

if TYPE_CHECKING:
    from decimal import Decimal
    from types import TracebackType

    from microtuning_core.domain.run import Attempt, Run

Event = dict[str, Any]

PLAIN_EVERY_S = 5.0
_SHOWN_METRICS = ("reward", "accuracy", "loss", "warm_loss")


@dataclass(frozen=True)
class Standing:
    """How far a run is, for one line."""

    status: str
    metrics: Event
    cost_usd: Decimal


class Display:
    """Writes to stderr, so that stdout keeps what a program prints."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)
        self._is_live = self._console.is_terminal or self._console.is_jupyter
        self._last = ""
        self._last_at = 0.0

    def __enter__(self) -> Display:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays: a log line or a notice. Never markup: a user's line may hold brackets."""
        self._console.print(Text(text))

    def standing(self, standing: Standing, *, now: bool = False) -> None:
        """The moving line; where nothing can move, at most one line every five seconds, and only of something new."""
        if self._is_live:
            self._live.update(Text(standing_line(standing)))
            return
        what = _step(standing.metrics) or standing.status
        if what != self._last and (now or time.monotonic() - self._last_at >= PLAIN_EVERY_S):
            self._last, self._last_at = what, time.monotonic()
            self.say(standing_line(standing))


def standing_line(standing: Standing) -> str:
    metrics = standing.metrics
    parts = [_step(metrics) or standing.status]
    parts += [
        f"{name.replace('_', ' ')} {round(metrics[name], 4) + 0.0:.3g}"
        for name in _SHOWN_METRICS
        if _is_number(metrics.get(name))
    ]
    parts.append(f"{shown(standing.cost_usd)} USD")  # before what a narrow terminal may cut
    if _is_number(metrics.get("tokens_per_s")):
        parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    return " · ".join(parts)


def _step(metrics: Event) -> str:
    if metrics.get("warm_step") is not None:
        return f"warm start, step {metrics['warm_step']}"
    if metrics.get("step") is None:
        return ""
    total = metrics.get("total_steps")
    return f"step {metrics['step']}/{total}" if total else f"step {metrics['step']}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def event_line(event: Event) -> str | None:
    """One of the container's events in words; None for those that the moving line shows, or that nobody asks for."""
    match event["event"]:
        case "eval":
            values = ", ".join(
                f"{name.removeprefix('eval_')} {value:.3g}"
                for name, value in event.items()
                if name.startswith("eval_") and _is_number(value)
            )
            return f"evaluation {event.get('when', '')} training: {values}"
        case "notice":
            return f"notice: {event.get('message', '')}"
        case "recovery":
            return f"recovered at step {event.get('step')} ({event.get('cause', 'the worker died')})"
    return None


def changes(before: Run | None, after: Run) -> list[str]:
    """What happened to the run between two looks at it, in words."""
    return [*_attempt_changes(before, after), *_checkpoint_change(before, after), *_waiting(before, after)]


def _attempt_changes(before: Run | None, after: Run) -> list[str]:
    known = {each.attempt: each for each in before.attempts} if before else {}
    lines = []
    for attempt in after.attempts:
        old = known.get(attempt.attempt)
        if old is None:
            lines.append(_attempt_line(attempt))
        if attempt.failure and (old is None or old.failure is None):
            lines.append(
                f"attempt {attempt.attempt} ended: {attempt.failure.message} ({attempt.failure.failure_class})"
            )
        new_recoveries = attempt.recoveries[len(old.recoveries) if old else 0 :]
        lines += [f"attempt {attempt.attempt} recovered ({recovery.cause})" for recovery in new_recoveries]
    return lines


def _attempt_line(attempt: Attempt) -> str:
    plan = attempt.plan
    machines = plan.instance_type if plan.count == 1 else f"{plan.count} x {plan.instance_type}"
    spot = ", spot" if plan.spot else ""
    return f"attempt {attempt.attempt}: {machines}{spot}, at most {plan.price_usd_per_hour} USD an hour"


def _checkpoint_change(before: Run | None, after: Run) -> list[str]:
    if after.last_checkpoint is None or (before and before.last_checkpoint == after.last_checkpoint):
        return []
    return [f"checkpoint at step {after.last_checkpoint.step}"]


def _waiting(before: Run | None, after: Run) -> list[str]:
    waits = after.status is RunStatus.QUEUED and after.reason
    is_new = before is None or (before.status, before.reason) != (after.status, after.reason)
    return [f"waiting: {after.reason}"] if waits and is_new else []


def ending(run: Run) -> str:
    return f"run {run.run_id} {run.status}" + (f": {run.reason}" if run.reason else "")


def detached(run_id: str) -> str:
    return (
        f"Detached. Run {run_id} GOES ON without this program.\n"
        f"  come back: microtuning runs wait {run_id}\n"
        f"  stop it:   microtuning runs cancel {run_id}"
    )
