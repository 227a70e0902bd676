"""Asking the user's reward function, in a process of its own that can be killed.

A thread cannot be stopped while user code holds the interpreter's lock, and a function that uses SIGALRM as its own time
limit works in a main thread only; so the function lives in the main thread of a separate process (reward_worker.py). A call
that takes longer than its limit is killed with everything it started; its completions are then asked about one by one, so
that the one that hangs is found, counted as timed out, and the run goes on.

Scores are floats; NaN stands for "not scored" (abstained, not finite, or timed out), and each of the three is counted.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .failures import UserFailure
from .processes import descendants_of, kill_all
from .reward_worker import receive, send

NOT_SCORED = math.nan
# Loading user code may import much more than scoring does.
_LOAD_LIMIT_S = 300.0
# After a call timed out: what one completion may take, and all of them together, as shares of the call's limit.
_SINGLE_SHARE, _RETRY_SHARE = 0.25, 2.0
_MAX_ALL_TIMED_OUT = 3


class TimedOut(Exception):
    """The reward process did not answer in time and is gone."""


@dataclass(frozen=True)
class Question:
    """What a reward is asked about; one entry a completion in each list. Texts, or lists of messages for chat rows."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]

    def only(self, index: int) -> Question:
        part = slice(index, index + 1)
        columns = {name: values[part] for name, values in self.columns.items()}
        return Question(self.prompts[part], self.completions[part], self.completion_ids[part], columns)

    def as_arguments(self) -> dict[str, Any]:
        own = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        return self.columns | own


@dataclass(frozen=True)
class Scores:
    """One value a completion (NaN = not scored), and why some have none."""

    values: list[float]
    abstained: int = 0
    not_finite: int = 0
    timed_out: int = 0

    @property
    def scored(self) -> list[float]:
        return [value for value in self.values if not math.isnan(value)]

    @property
    def mean(self) -> float:
        """Over the scored completions; NaN when there is none."""
        return sum(self.scored) / len(self.scored) if self.scored else math.nan

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        return cls(
            values=[value for part in parts for value in part.values],
            abstained=sum(part.abstained for part in parts),
            not_finite=sum(part.not_finite for part in parts),
            timed_out=sum(part.timed_out for part in parts),
        )

    @property
    def why_unscored(self) -> str:
        """As a sentence says it: "3 abstained (None), 1 timed out"."""
        found = {
            "abstained (None)": self.abstained,
            "not finite (NaN or infinite)": self.not_finite,
            "timed out": self.timed_out,
        }
        return ", ".join(f"{count} {name}" for name, count in found.items() if count)

    def counts(self) -> dict[str, int]:
        """The counts that are not 0, as metrics."""
        found = {"abstained": self.abstained, "not_finite": self.not_finite, "timed_out": self.timed_out}
        return {f"reward_{name}": count for name, count in found.items() if count}


class RewardFunction:
    """The user's reward function; a context manager that loads it on entry and ends its process on exit.

    Args:
        entry: "module:name" in the code folder, or "pickle:reward.pkl".
        code: the folder with the user's sources.
        time_limit_s: of one call.
        seed: python's and numpy's generators are seeded from it and the step before each call, so that a reward with
            chance in it gives the same numbers after a restart.
    """

    def __init__(self, entry: str, code: Path, *, time_limit_s: float, seed: int = 0) -> None:
        self._entry, self._code, self._time_limit_s, self._seed = entry, code, time_limit_s, seed
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._all_timed_out = 0

    def __enter__(self) -> RewardFunction:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, question: Question, *, step: int) -> Scores:
        """One score a completion.

        Raises:
            UserFailure: the function raised, or returned what is no list of numbers; with the user's file and line. Or
                three calls in a row timed out for every completion.
        """
        try:
            return _counted(self._ask(question, step, self._time_limit_s))
        except TimedOut:
            scores = self._score_one_by_one(question, step)
        self._all_timed_out = self._all_timed_out + 1 if scores.timed_out == len(scores.values) else 0
        if self._all_timed_out >= _MAX_ALL_TIMED_OUT:
            raise UserFailure(
                f"The reward {self._entry} gave no score within reward.time_limit_s = {self._time_limit_s:g} s in "
                f"{self._all_timed_out} steps in a row. Make it faster or raise the limit."
            )
        return scores

    def _score_one_by_one(self, question: Question, step: int) -> Scores:
        ends_at_s = time.monotonic() + _RETRY_SHARE * self._time_limit_s
        answers: list[Any] = []
        for index in range(len(question.completions)):
            left_s = min(_SINGLE_SHARE * self._time_limit_s, ends_at_s - time.monotonic())
            try:
                answers += self._ask(question.only(index), step, left_s) if left_s > 0 else ["timed out"]
            except TimedOut:
                answers.append("timed out")
        return _counted(answers)

    def _ask(self, question: Question, step: int, limit_s: float) -> list[Any]:
        self._start()
        request = {"seed": self._seed * 1_000_003 + step, "arguments": question.as_arguments()}
        answer = self._exchange(request, limit_s)
        if "error" in answer:
            raise _user_failure(self._entry, answer["error"])
        return list(answer["rewards"])

    # --- the process ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-P",
                "-m",
                "training_container.reward_worker",
                str(theirs.fileno()),
                self._entry,
            ]
            self._process = subprocess.Popen(
                [*command, str(self._code), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": _python_path()},
                cwd=self._code,  # where the user's relative paths lead; -P keeps its names from shadowing Python's own
                start_new_session=True,
            )
        self._socket = ours
        try:
            answer = self._exchange(None, max(_LOAD_LIMIT_S, self._time_limit_s))
        except TimedOut as error:
            raise UserFailure(f"The code of the reward {self._entry} did not load in {_LOAD_LIMIT_S:g} s.") from error
        if "error" in answer:
            self.close()
            raise _user_failure(self._entry, answer["error"])

    def _exchange(self, request: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
        """Send a request (None: only wait for the first answer) and give the answer, or kill the process."""
        assert self._socket is not None
        try:
            self._socket.settimeout(limit_s)
            if request is not None:
                send(self._socket, request)
            return receive(self._socket, deadline_s=time.monotonic() + limit_s)
        except TimeoutError as error:
            self.close()
            raise TimedOut from error
        except (EOFError, ConnectionError) as error:
            code = self._wait_for_end()
            self.close()
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise UserFailure(f"The process of the reward {self._entry} ended by itself ({how}).") from error

    def _wait_for_end(self) -> int:
        assert self._process is not None
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return 0

    def close(self) -> None:
        """End the process and everything it started, in sessions of their own as well."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            started = descendants_of(self._process.pid)
            with contextlib.suppress(ProcessLookupError):  # it has ended, and left no children
                os.killpg(self._process.pid, signal.SIGKILL)
            kill_all(started)
            self._process.wait()
        self._process = self._socket = None


def _python_path() -> str:
    """Where the child finds this package, however the parent found it."""
    here = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _user_failure(entry: str, error: dict[str, Any]) -> UserFailure:
    if trace := error.get("traceback"):
        print(trace, file=sys.stderr, flush=True)
    return UserFailure(f"The reward {entry}: {error['message']}", file=error.get("file"), line=error.get("line"))


def _counted(answers: Sequence[Any]) -> Scores:
    """Answers of the process (a float, None or "timed out") as scores."""
    values = [float(answer) if isinstance(answer, float | int) else NOT_SCORED for answer in answers]
    return Scores(
        values=[value if math.isfinite(value) else NOT_SCORED for value in values],
        abstained=sum(answer is None for answer in answers),
        not_finite=sum(isinstance(answer, float) and not math.isfinite(answer) for answer in answers),
        timed_out=sum(answer == "timed out" for answer in answers),
    )
