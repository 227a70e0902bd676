"""progress.json: written by rename, at most every ten seconds, and at once when others wait for what has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from microtuning_core.domain.manifest import CheckpointManifest
from microtuning_core.domain.progress import (
    PROGRESS_NAME,
    PhaseMs,
    Progress,
    ProgressMetrics,
    Restart,
    Saved,
    Start,
    TokenCounts,
    Written,
    sign_after_s,
)

from .metrics import finite_only
from .paths import write_durably

Phase = Literal["load", "rollout", "reward", "update", "checkpoint"]
# A reward has its own limits, and a disk is as slow as it is.
_LIMITED = ("reward", "checkpoint")


@dataclass(frozen=True)
class RestartClock:
    """What the supervisor knows of a restart; the worker adds how long restoring and the first step took."""

    cause: str
    at: datetime
    detect_ms: int
    decide_ms: int
    forked_at_s: float  # time.monotonic()
    halvings: int = 0  # of the micro-batches, where memory ran out


@dataclass
class Meter:
    """Time by phase (seconds), tokens by kind, steps, what was saved, and the longest step of this attempt.

    resting: around phases that have a time limit of their own, so that nobody misses a sign of life.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    longest_step_s: float = 0.0
    steps: int = 0
    saved: Saved = field(default_factory=Saved)
    resting: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            with self.resting() if name in _LIMITED else nullcontext():
                yield
        finally:
            self.add_seconds(name, time.monotonic() - started_s)

    def add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def count_step(self, seconds: float) -> None:
        self.steps += 1
        self.longest_step_s = max(self.longest_step_s, seconds)

    def count_saved(self, manifest: CheckpointManifest) -> None:
        self.saved = Saved(
            checkpoints=self.saved.checkpoints + 1,
            files=self.saved.files + len(manifest.files) + 1,
            bytes=self.saved.bytes + manifest.total_bytes,
        )

    def count(self, **tokens: int) -> None:
        for kind, number in tokens.items():
            self.tokens[kind] = self.tokens.get(kind, 0) + number


class ProgressWriter:
    """Keeps progress.json of one attempt; a worker started in place goes on from what the last one wrote.

    Of several processes only the main one writes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        attempt: int,
        lineage: int,
        every_s: float,
        started_at_s: float,
        writes: bool = True,
    ) -> None:
        self._path, self._writes = folder / PROGRESS_NAME, writes
        self._identity = {"run_id": run_id, "attempt": attempt, "lineage": lineage}
        self._every_s, self._started_at_s, self._written_at_s = every_s, started_at_s, -float("inf")
        self.began_at_s, self.worker_began_at_s = started_at_s, time.monotonic()
        self.meter = Meter()
        self.restarts: list[Restart] = []
        self.starts: list[Start] = []
        self.checkpoint: Written | None = None
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self._go_on_from(self._read())

    def _read(self) -> Progress | None:
        try:
            found = Progress.model_validate_json(self._path.read_bytes())
        except (OSError, ValueError):
            return None  # none yet, or from another version: begin anew
        return found if {key: getattr(found, key) for key in self._identity} == self._identity else None

    def _go_on_from(self, earlier: Progress | None) -> None:
        if earlier is None:
            return
        self.meter.seconds = {name: ms / 1000 for name, ms in earlier.phase_ms.model_dump().items()}
        self.meter.tokens = earlier.tokens.model_dump()
        self.meter.longest_step_s = earlier.longest_step_ms / 1000
        self.meter.steps, self.meter.saved = earlier.steps_done, earlier.saved
        self._started_at_s -= sum(self.meter.seconds.values())
        self.restarts, self.starts = list(earlier.restarts), list(earlier.starts)
        self.checkpoint = earlier.checkpoint
        self.first, self.last = dict(earlier.metrics.first), dict(earlier.metrics.last)

    def write(self, step: int, total_steps: int, *, eval_before: Any, eval_after: Any, at_once: bool = False) -> None:
        """Write when it is time, or `at_once`."""
        now_s = time.monotonic()
        every_s = sign_after_s(now_s - self._started_at_s, self._every_s)
        if not self._writes or (not at_once and now_s - self._written_at_s < every_s):
            return
        self._written_at_s = now_s
        busy_s = sum(seconds for name, seconds in self.meter.seconds.items() if name != "idle")
        self.meter.seconds["idle"] = max(0.0, now_s - self._started_at_s - busy_s)
        progress = Progress(
            **self._identity,
            step=step,
            total_steps=total_steps,
            at=datetime.now(UTC),
            phase_ms=PhaseMs(**{name: round(1000 * seconds) for name, seconds in self.meter.seconds.items()}),
            tokens=TokenCounts(**self.meter.tokens),
            steps_done=self.meter.steps,
            saved=self.meter.saved,
            restarts=tuple(self.restarts),
            starts=tuple(self.starts),
            checkpoint=self.checkpoint,
            longest_step_ms=round(1000 * self.meter.longest_step_s),
            metrics=ProgressMetrics(
                first=finite_only(self.first),
                last=finite_only(self.last),
                eval_before=finite_only(eval_before),
                eval_after=finite_only(eval_after),
            ),
        )
        write_durably(self._path, progress.model_dump_json())
