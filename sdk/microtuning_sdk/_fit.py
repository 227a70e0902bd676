"""fit(), check() and spec() of every trainer: from settings and data to a draft, from a draft to a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from microtuning_core.domain.errors import InvalidData
from microtuning_sdk._connection import Stage, connect
from microtuning_sdk._display import detached
from microtuning_sdk._draft import Document, Draft, draft
from microtuning_sdk._estimates import as_the_stage_knows, estimates
from microtuning_sdk._gym import DEFAULT_ROWS, gym_rows
from microtuning_sdk._interrupts import one_interrupt
from microtuning_sdk._preflight import preflight, shown
from microtuning_sdk._rewards import gym_task
from microtuning_sdk._run import Run
from microtuning_sdk._settings import given_only
from microtuning_sdk._submit import submit

if TYPE_CHECKING:
    from collections.abc import Callable

    from microtuning_core.domain.calibration import Estimate
    from microtuning_core.domain.spec import RunSpec
    from microtuning_sdk._code import CodePackage
    from microtuning_sdk._inputs import Data


class Trainer:
    """What the trainers share: from settings to a draft, from a draft to a run."""

    def __init__(self, base: Document, code: Callable[[], CodePackage] | None, stage: Stage | str | None) -> None:
        self._base = base
        self._code = code
        self._stage = stage

    def fit(
        self,
        train_data: Data | int | None = None,
        eval_data: Data | int | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
        wait: bool = True,
        logs: bool = True,
        preflight: bool = True,
    ) -> Run:
        """Checks everything, uploads data and code, starts the run, and (with `wait`) shows it until it is over.

        Args:
            train_data: rows, a local file or folder, or an S3 address (a folder's ends in "/"). With a reward of
                reasoning-gym also the number of rows to make, 1,000 by default.
            eval_data: held-out rows, likewise; the model is evaluated on them before and after.
            epochs: passes over the data.
            batch_size: rows (RL: completions) an optimizer step.
            max_steps: optimizer steps at most.
            wait: return when the run is over; False returns at once (and then `logs` has no effect).
            logs: show log lines and progress while waiting.
            preflight: say beforehand what would go wrong or waste money (docs/sdk.md); the reward is tried on a few rows.

        Returns:
            The run. After Ctrl-C too: the run goes on, and a message says how to come back to it.

        Raises:
            InvalidSpec, InvalidData, InvalidCode, SubmitRefused: nothing was started; the message says what to correct.
            RunFailed, RunStopped: the run ended like that while it was waited for.
        """
        stage = self._connected()
        ready = self._draft(stage, train_data, eval_data, epochs, batch_size, max_steps)
        with one_interrupt():
            if preflight:
                _looked_at(stage, ready)
            started = submit(stage, ready, _say)
            run = Run(started.run_id, stage)
            if started.interrupted:
                _say(detached(run.run_id))
                return run
            _say(f"run {run.run_id} is submitted")
            if wait and run.wait(logs=logs).is_final:
                run.raise_if_unsuccessful()
            return run

    def check(
        self,
        train_data: Data | int | None = None,
        eval_data: Data | int | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
        preflight: bool = False,
    ) -> RunSpec:
        """What fit() would submit, checked in the same way; nothing is uploaded and nothing starts.

        preflight: also say what would go wrong or waste money, as fit() does; that takes seconds.
        """
        stage = self._connected()
        ready = self._draft(stage, train_data, eval_data, epochs, batch_size, max_steps)
        if preflight:
            _looked_at(stage, ready)
        return ready.spec

    def estimate(
        self,
        train_data: Data | int | None = None,
        eval_data: Data | int | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
    ) -> tuple[Estimate, ...]:
        """How long fit() would take and what it would cost: on the machine it would choose, and on the two next best.

        By what past attempts of the same model family and type measured, where there are any; each with its range. Empty
        where nobody can tell how much work it is (a script, a loop of your own). Nothing is uploaded, nothing starts.
        """
        stage = self._connected()
        drafted = self._draft(stage, train_data, eval_data, epochs, batch_size, max_steps)
        ready, past, _ = as_the_stage_knows(stage, drafted)
        return estimates(ready, past)

    def spec(
        self,
        train_data: Data | int | None = None,
        eval_data: Data | int | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
    ) -> str:
        """The same as the text of a spec file. Uploading it starts a run once its data and code are in the bucket."""
        return self._draft(self._connected(), train_data, eval_data, epochs, batch_size, max_steps).text

    def _connected(self) -> Stage:
        return self._stage if isinstance(self._stage, Stage) else connect(self._stage)

    def _draft(
        self,
        stage: Stage,
        train_data: Data | int | None,
        eval_data: Data | int | None,
        epochs: int | None,
        batch_size: int | None,
        max_steps: int | None,
    ) -> Draft:
        length = given_only({"epochs": epochs, "batch_size": batch_size, "max_train_steps": max_steps})
        document = self._base | {
            "algorithm": self._base["algorithm"] | length,
            "data": given_only({"train": self._train_rows(train_data), "eval": self._eval_rows(eval_data)}),
        }
        return draft(stage, document, code=self._code() if self._code else None)

    def _train_rows(self, given: Data | int | None) -> Data | None:
        """Rows as they were given, or made where a number of them was asked for."""
        task = gym_task(self._base.get("reward", {}))
        if task is not None and given is None:
            given = DEFAULT_ROWS
        return self._made(task, given, held_out=False) if isinstance(given, int) else given

    def _eval_rows(self, given: Data | int | None) -> Data | None:
        task = gym_task(self._base.get("reward", {}))
        return self._made(task, given, held_out=True) if isinstance(given, int) else given

    def _made(self, task: str | None, count: int, *, held_out: bool) -> Data:
        if task is None or count < 1:
            raise InvalidData(
                f"{count} rows",
                "rows are made only for a reward 'reasoning_gym:<task>', and at least one",
                next_step="Give rows, a file or an S3 address.",
            )
        return gym_rows(task, count, seed=int(self._base.get("seed", 0)), held_out=held_out)


def _looked_at(stage: Stage, ready: Draft) -> None:
    """Says what preflight found; an error of the user's own code is raised."""
    found = preflight(*as_the_stage_knows(stage, ready))
    for line in shown(found):
        _say(line)
    found.raise_if_broken()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
