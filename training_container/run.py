"""What a recipe gets beside the engine: the rows, where the run stands, and how to report and to keep its state.

    def train(engine, run):
        for indices in run.steps(rows=len(prompts), batch=32):
            …
            run.end_step({"loss": loss}, tokens=…)

`end_step` counts the step and reports it; before the next one a checkpoint is saved when it is due, and the process ends
when a stop was asked for. Where one rollout serves several optimizer steps, they are a window:

        for indices in run.steps(rows=len(prompts), batch=32, updates=4):
            run.memory = run.memory or draw(indices)       # kept in every checkpoint made inside the window
            for update in run.updates():
                …
                run.end_step({"loss": loss}, tokens=…)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from microtuning_core.domain.algorithms import RewardSpec
from microtuning_core.domain.datasets import Row
from microtuning_core.domain.manifest import CheckpointManifest
from microtuning_core.domain.progress import Restart, Start, Written

from .cadence import Cadence
from .checkpoints import Checkpoint, CheckpointWriter
from .data import Cursor
from .engine import Engine
from .engine.snapshot import bytes_of_state
from .failures import NumericsFailure
from .job import Job
from .metrics import EventLog, finite_only
from .processes import has_room_for
from .progress import ProgressWriter, RestartClock

LOOP = "loop.json"
MAX_SKIPPED_IN_A_ROW = 5


class Stopped(Exception):
    """A stop was asked for (SIGTERM) and the state is saved."""


@dataclass
class LoopState:
    """Where a run stands; part of every checkpoint. `step` counts optimizer steps of the main phase.

    after, update, memory: inside a window of several updates: the cursor after its rows, the updates done, and whatever
    the recipe must find again. warm_step, warm_cursor: the supervised phase before it. constant_steps: steps in a row
    without any spread of reward.
    skipped_steps: steps in a row whose gradient was not finite. health: what its warnings compare with (health.py).
    eval_before, eval_after: metrics kept for the end.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    after: Cursor | None = None
    update: int = 0
    memory: Any = None
    warm_step: int = 0
    warm_cursor: Cursor = field(default_factory=Cursor)
    constant_steps: int = 0
    skipped_steps: int = 0
    health: dict[str, Any] = field(default_factory=dict)
    eval_before: dict[str, float] = field(default_factory=dict)
    eval_after: dict[str, float] = field(default_factory=dict)
    finished: bool = False

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, path: Path) -> LoopState:
        saved = json.loads(path.read_text("utf-8"))
        names = ("cursor", "after", "warm_cursor")
        cursors = {name: Cursor(**saved[name]) for name in names if saved.get(name)}
        return cls(**(saved | cursors))


class Run:
    """One worker's view of a run, from its restored state to its last step."""

    def __init__(
        self,
        job: Job,
        engine: Engine,
        state: LoopState,
        *,
        rows: dict[str, list[Row]],
        log: EventLog,
        progress: ProgressWriter,
        stop_requested: Callable[[], bool],
        restart: RestartClock | None = None,
    ) -> None:
        self.job, self.spec, self.settings = job, job.spec, job.algorithm
        self.engine, self.state, self.rows = engine, state, rows
        self.log, self.progress, self.meter = log, progress, progress.meter
        self.total_steps = state.step
        self._stop_requested, self._restart, self._has_started = stop_requested, restart, False
        self._writer = CheckpointWriter()
        self._parent_pid = os.getppid()
        self._ready_at_s = self._step_began_at_s = time.monotonic()
        self._epoch_ended = False
        self._updates = 1
        self._cadence = Cadence(self.spec.checkpoint, mtbf_s=job.plan.mtbf_s, now_s=time.monotonic())

    @property
    def reward(self) -> RewardSpec:
        assert self.spec.reward is not None  # a spec whose recipe needs one is refused without
        return self.spec.reward

    # --- steps ----------------------------------------------------------------------------------------------------------

    def steps(self, *, rows: int, batch: int, updates: int = 1) -> Iterator[list[int]]:
        """Row indices for every window of `updates` steps that is left; `max_train_steps` caps what the epochs would give.

        A run resumed inside a window gets that window's rows again, with `memory` and the updates that are left.
        """
        windows = self.state.cursor.steps_left(rows, batch, self.settings.epochs)
        left = windows * updates - self.state.update
        self.total_steps = min(self.state.step + left, self.settings.max_train_steps or self.state.step + left)
        self._updates = updates
        if notice := self._cadence.fit_to(self.total_steps or None, steps_per_epoch=-(-rows // batch) * updates):
            self.log.emit("notice", message=notice)
        self.write_progress(at_once=True)
        while self.state.step < self.total_steps and self.state.cursor.epoch < self.settings.epochs:
            self._step_began_at_s = time.monotonic()
            indices, after = self.state.cursor.take(rows, batch, self.spec.seed)
            self.state.after = self.state.after or after
            yield indices
            self._epoch_ended = self.state.after.epoch > self.state.cursor.epoch
            self.state.cursor, self.state.after = self.state.after, None
            self.state.update, self.state.memory = 0, None
            self._close_step()

    def updates(self) -> Iterator[int]:
        """The window's updates that are left, each ended by `end_step`."""
        while self.state.update < self._updates and self.state.step < self.total_steps:
            yield self.state.update
            self.state.update += 1
            if self.state.update < self._updates and self.state.step < self.total_steps:
                self._epoch_ended = False
                self._close_step()
                self._step_began_at_s = time.monotonic()

    def more(self, rows: int, batch: int) -> list[int]:
        """Further rows for this window, after those it has; none at the end of the last epoch."""
        assert self.state.after is not None  # only inside a window
        if self.state.after.epoch >= self.settings.epochs:
            return []
        indices, self.state.after = self.state.after.take(rows, batch, self.spec.seed)
        return indices

    @property
    def memory(self) -> Any:
        """What this window must find again when it is resumed: anything that JSON holds exactly."""
        return self.state.memory

    @memory.setter
    def memory(self, value: Any) -> None:
        self.state.memory = value

    def end_step(self, metrics: Mapping[str, Any], *, tokens: int) -> None:
        """Report the step whose rows `steps` gave last. `tokens` sampled or trained in it make tokens_per_s."""
        seconds = time.monotonic() - self._step_began_at_s
        self.meter.count_step(seconds)
        self.engine.beat()
        self.state.step += 1
        reported = {**metrics, "tokens_per_s": tokens / max(seconds, 1e-9)}
        if self.engine.world.size > 1:
            reported["bytes_sent"] = self.engine.bytes_sent
        epoch = self.state.cursor.epoch + 1
        self.log.emit("metrics", reported, step=self.state.step, total_steps=self.total_steps, epoch=epoch)
        self.progress.first = self.progress.first or dict(reported)
        self.progress.last = dict(reported)

    def _close_step(self) -> None:
        is_last = self.state.step == self.total_steps
        saved = not is_last and self._checkpoint_is_due(self.state.step, epoch_ended=self._epoch_ended)
        if saved:
            self.save(self.progress.last)
        self._note_what_is_written()
        self._finish_start()
        self.write_progress(at_once=is_last or self.state.step == 1)
        self.leave_if_asked(saved=saved)

    def end_warm_step(self) -> None:
        """After each step of the warm start but the last: save on the same cadence, as checkpoint 0."""
        due = self._checkpoint_is_due(self.state.warm_step)
        if due:
            self.save({})
        self.write_progress()
        self.leave_if_asked(saved=due)

    def _checkpoint_is_due(self, step: int, *, epoch_ended: bool = False) -> bool:
        due = self._cadence.is_due(step, epoch_ended=epoch_ended, now_s=time.monotonic())
        return bool(self.engine.world.most(int(due))) if self._cadence.asks_the_clock else due

    def learning_rate(self, default: float) -> float:
        """Of the coming step: rising over warmup_steps, then constant."""
        rise: float = min(1.0, (self.state.step + 1) / max(1, self.settings.warmup_steps))
        return float(self.settings.learning_rate or default) * rise

    def count_skipped(self, applied: bool, what: str) -> None:
        """Tolerate a few steps in a row whose loss or gradient is not finite; their weights stay as they were."""
        self.state.skipped_steps = 0 if applied else self.state.skipped_steps + 1
        if not applied:
            self.log.emit(
                "notice", step=self.state.step + 1, message=f"{what} is not finite; this step changes nothing"
            )
        if self.state.skipped_steps > MAX_SKIPPED_IN_A_ROW:
            raise NumericsFailure(
                f"{what} was not finite in {self.state.skipped_steps} steps in a row (up to step {self.state.step + 1}). "
                "Lower learning_rate or max_grad_norm."
            )

    # --- keeping --------------------------------------------------------------------------------------------------------

    def save(self, metrics: Mapping[str, Any], *, final: bool = False) -> None:
        """Keep everything the next step depends on as checkpoint `state.step`. Every process calls, the main one writes.

        The next step waits for a copy of the state alone, and for the checkpoint before this one; the final one, and one
        that memory has no room to copy, is on disk when this returns.
        """
        began_at_s = time.monotonic()
        self._note_what_is_written(wait=True)
        with self.meter.phase("checkpoint"):
            self._begin_to_write(finite_only(metrics), final)
        now_s = time.monotonic()
        self._cadence.saved(now_s=now_s, stalled_s=now_s - began_at_s)
        self._note_what_is_written()

    def _begin_to_write(self, metrics: dict[str, float], final: bool) -> None:
        snapshot = self.engine.snapshot(copies=not final and has_room_for(bytes_of_state(self.engine.model)))
        if snapshot is None:
            return
        loop, step = self.state.as_json(), self.state.step

        def fill(folder: Path) -> None:
            snapshot.write(folder)
            (folder / LOOP).write_text(loop, encoding="utf-8")

        described = self._description(metrics, final)
        self._writer.begin(self.job.tree.checkpoints, step, fill, described, self.spec.checkpoint)
        if final or snapshot.weights is None:
            self._writer.wait()

    def _note_what_is_written(self, *, wait: bool = False) -> None:
        """Say that a checkpoint is whole; what went wrong with it is raised here."""
        if wait and self._writer.is_busy:
            with self.meter.phase("checkpoint"):
                self._writer.wait()
        if (written := self._writer.take()) is not None:
            self._say_what_is_written(written, self._writer.took_s)

    def _say_what_is_written(self, written: Checkpoint, took_s: float) -> None:
        self._cadence.written(took_s=took_s)
        self.meter.count_saved(written.manifest)
        self.progress.checkpoint = Written(step=written.manifest.step, at=datetime.now(UTC))
        manifest, best = written.manifest, self.spec.checkpoint.best_metric
        self.log.emit(
            "checkpoint",
            step=manifest.step,
            bytes=manifest.total_bytes,
            final=manifest.final,
            written_ms=round(1000 * took_s),
        )
        if best is not None and best not in manifest.metrics and manifest.step > 0:
            known = ", ".join(sorted(manifest.metrics)) or "none"
            self.log.emit(
                "notice", message=f"checkpoint.best_metric: no {best} at step {manifest.step}; metrics are {known}"
            )

    def await_checkpoint(self) -> None:
        """Go on only once the last checkpoint is on disk."""
        self._note_what_is_written(wait=True)

    def let_it_be_written(self) -> None:
        """Wait for a checkpoint that is being written, whatever becomes of it: the run ends for another reason."""
        self._writer.wait()

    def _description(self, metrics: dict[str, float], final: bool) -> CheckpointManifest:
        """The manifest, its files to come."""
        return CheckpointManifest(
            run_id=self.job.run_id,
            attempt=self.job.plan.attempt,
            lineage=self.job.plan.lineage,
            step=self.state.step,
            epoch=self.state.cursor.epoch,
            world_size=self.engine.world.size,
            global_batch=self.settings.batch_size,
            spec_sha256=self.spec.sha256,
            code_sha256=self.spec.code.sha256 if self.spec.code else None,
            base_model=self.job.base_model,
            revision=self.spec.model.revision,
            files=(),
            metrics=metrics,
            final=final,
            created_at=datetime.now(UTC),
        )

    def finish(self) -> None:
        """The last checkpoint, marked final and carrying both evaluations; then the model itself."""
        self.state.finished = True
        before = {f"{name}_before": value for name, value in self.state.eval_before.items()}
        after = {f"{name}_after": value for name, value in self.state.eval_after.items()}
        self.save({**self.progress.last, **before, **after}, final=True)
        self._finish_start()
        self.write_progress(at_once=True)

    # --- reporting ------------------------------------------------------------------------------------------------------

    def report_eval(self, when: str, metrics: dict[str, float]) -> dict[str, float]:
        self.log.emit("eval", metrics, when=when, step=self.state.step)
        return finite_only(metrics)

    def write_progress(self, *, at_once: bool = False) -> None:
        self.progress.write(
            self.state.step,
            self.total_steps,
            eval_before=self.state.eval_before,
            eval_after=self.state.eval_after,
            at_once=at_once,
        )

    def leave_if_asked(self, *, saved: bool) -> None:
        """At a boundary between steps: end the process when a stop was asked for, keeping the state first.

        A signal comes to processes at different moments: they leave at the first boundary where one of them knows.
        """
        is_orphan = os.getppid() != self._parent_pid
        asked = self.engine.world.most(2 if is_orphan else int(self._stop_requested()))
        if asked == 2:
            raise Stopped("the supervisor is gone")
        if asked:
            if not saved:
                self.save(self.progress.last)
            self._note_what_is_written(wait=True)
            self.write_progress(at_once=True)
            raise Stopped("asked to stop")

    def announce_start(self) -> None:
        """Record how this worker came to be, as soon as it can train; its first step is timed when it ends."""
        self._ready_at_s = now_s = time.monotonic()
        if self._restart is None:
            restore_ms = round(1000 * (now_s - self.progress.began_at_s))
            self.progress.starts.append(Start(at=datetime.now(UTC), restore_ms=restore_ms))
            return
        clock = self._restart
        self.progress.restarts.append(
            Restart(
                cause=clock.cause,
                at=clock.at,
                detect_ms=clock.detect_ms,
                decide_ms=clock.decide_ms,
                provision_ms=round(1000 * (self.progress.worker_began_at_s - clock.forked_at_s)),
                restore_ms=round(1000 * (now_s - self.progress.worker_began_at_s)),
            )
        )
        self.write_progress(at_once=True)

    def _finish_start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        first_step_ms = round(1000 * (time.monotonic() - self._ready_at_s))
        if self._restart is None:
            self.progress.starts[-1] = self.progress.starts[-1].model_copy(update={"first_step_ms": first_step_ms})
        else:
            self.progress.restarts[-1] = self.progress.restarts[-1].model_copy(update={"first_step_ms": first_step_ms})
            self.log.emit("recovery", step=self.state.step, **self.progress.restarts[-1].model_dump(mode="json"))
        self.write_progress(at_once=True)
