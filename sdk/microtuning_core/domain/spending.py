"""Where the money of runs went: by phase, by token, and by what became of the work.

    outcome    of the machine time of an attempt
    useful     steps whose result was kept: they lie before the checkpoint that went on, or in the finished model
    recovered  the same, but steps that an earlier attempt had done and lost: the price of coming back
    wasted     steps whose result was lost
    idle       billed, but no step: starting, loading, saving what the mirror needs, warm pools, volumes

useful + recovered is progress, wasted + idle is not: utilisation is the share of billed machine-seconds that made progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Literal

from microtuning_core.domain.run import Attempt, Run

Outcome = Literal["useful", "recovered", "wasted", "idle"]
OUTCOMES: tuple[Outcome, ...] = ("useful", "recovered", "wasted", "idle")
# Phases that make steps. A checkpoint is part of what a step costs: without it none would be kept.
STEP_PHASES = ("rollout", "reward", "update", "checkpoint")


def model_of(run: Run) -> str:
    """What is trained: a base model's name, or the preset."""
    return run.spec.model.base or run.spec.model.arch or ""


def entry_days(run: Run, now: datetime) -> tuple[date, date]:
    """The first and the last day of the run's entries: its execution, and a warm pool, may end a day after it."""
    return run.created_at.date(), ((run.ended_at or now) + timedelta(days=1)).date()


@dataclass(frozen=True)
class Steps:
    """Steps of one attempt, by what became of them; of a step done twice inside the attempt, once is `wasted`."""

    useful: int = 0
    recovered: int = 0
    wasted: int = 0

    @property
    def done(self) -> int:
        return self.useful + self.recovered + self.wasted


def steps_by_attempt(run: Run) -> dict[int, Steps]:
    """What became of every attempt's steps, by the number of the attempt."""
    found: dict[int, Steps] = {}
    reached: dict[int, int] = {}  # the furthest step of each lineage so far
    for attempt in run.attempts:
        began = _began_at(run, attempt)
        ended = max(began, attempt.metered.step if attempt.metered else began)
        kept = min(ended, max(began, _kept_step(attempt, ended)))
        again = max(0, min(kept, reached.get(attempt.lineage, 0)) - began)
        done = max(attempt.metered.steps_done if attempt.metered else 0, ended - began)
        found[attempt.attempt] = Steps(kept - began - again, again, done - (kept - began))
        reached[attempt.lineage] = max(reached.get(attempt.lineage, 0), ended)
    return found


def _began_at(run: Run, attempt: Attempt) -> int:
    """The step of the checkpoint that the attempt went on from."""
    before = [each for each in run.attempts if each.attempt < attempt.attempt]
    same = [each.checkpoint_step or 0 for each in before if each.lineage == attempt.lineage]
    if same:
        return max(same)
    start = run.resume_from if attempt.lineage == run.lineage else None
    return start.step if start else 0


def _kept_step(attempt: Attempt, ended: int) -> int:
    """Of an attempt that completed, or still runs, everything counts; of another what its checkpoint holds."""
    if attempt.outcome in (None, "completed"):
        return ended
    return attempt.checkpoint_step or 0


def outcome_ms(phase_ms: Mapping[str, int], billed_ms: int, steps: Steps) -> dict[Outcome, int]:
    """Milliseconds of one machine by outcome; they add up to what was billed.

    The time of the phases that make steps is shared out by the steps; whatever else was billed is idle. Spot bills fewer
    seconds than the machine worked: then all are scaled down alike.
    """
    metered_ms = sum(phase_ms.values())
    working_ms = sum(phase_ms.get(name, 0) for name in STEP_PHASES)
    if metered_ms > billed_ms:
        working_ms = working_ms * billed_ms // metered_ms
    if not steps.done:
        working_ms = 0
    useful_ms = working_ms * steps.useful // steps.done if steps.done else 0
    recovered_ms = working_ms * steps.recovered // steps.done if steps.done else 0
    wasted_ms = working_ms - useful_ms - recovered_ms
    return {
        "useful": useful_ms,
        "recovered": recovered_ms,
        "wasted": wasted_ms,
        "idle": billed_ms - working_ms,
    }


def utilisation(machine_ms: Mapping[str, int]) -> float | None:
    """The share of billed machine time that made progress; None where nothing was billed."""
    billed = sum(machine_ms.values())
    return (machine_ms.get("useful", 0) + machine_ms.get("recovered", 0)) / billed if billed else None


def added(parts: Iterable[Mapping[Outcome, int]]) -> dict[Outcome, int]:
    """Several such times together."""
    all_of_them = list(parts)
    return {name: sum(each.get(name, 0) for each in all_of_them) for name in OUTCOMES}
