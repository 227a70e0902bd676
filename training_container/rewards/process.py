"""Asking a reward function in processes of its own, which can be killed.

A thread cannot be stopped while user code holds the interpreter's lock, and a function that uses SIGALRM as its own time
limit works in a main thread only; so the function lives in the main thread of a separate process (worker.py). What takes
longer than its limit is killed with everything it started. Which completion it was is known where a function scores one at
a time; a batch is then asked about one by one. It is counted as timed out, and the run goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ..failures import UserFailure
from ..processes import descendants_of, kill_all
from ..user_code import named, python_path, receive, send
from .scores import TIMED_OUT, Answer, Answers, Question

# Loading user code may import much more than scoring does.
_LOAD_LIMIT_S = 300.0
# After something timed out: what one completion may take, and how long to go on trying, as shares of the limit.
_SINGLE_SHARE, _RETRY_SHARE = 0.25, 2.0
# The order of sets must be the same after a restart.
_OF_THE_PROCESS = {"PYTHONHASHSEED": "0"}
# A function of one completion that takes longer than this for all of them gets further processes.
_PAYS_FROM_S = 1.0


class TimedOut(Exception):
    """The reward process did not answer in time and is gone."""


class FunctionReward:
    """A function of the user's or of reasoning-gym, in one process, or several where it takes long.

    Args:
        entry: "module:name" in the code folder, "pickle:reward.pkl", or "reasoning_gym:<task>".
        code: the folder with the user's sources.
        time_limit_s: of one call: of all completions of a batch, or of each where they are scored one at a time.
        seed: python's and numpy's generators are seeded from it and the step before each call, so that a reward with
            chance in it gives the same numbers after a restart, in however many processes.
    """

    def __init__(self, entry: str, code: Path, *, time_limit_s: float, seed: int = 0) -> None:
        self._make = partial(_Process, entry, code, time_limit_s=time_limit_s, seed=seed)
        self._processes = [self._make()]
        self._processes[0].start()
        self._threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="reward")

    def score(self, question: Question, *, step: int) -> Answers:
        """As Reward.score.

        Raises:
            UserFailure: as there, with the user's file and line.
        """
        began_s = time.monotonic()
        answers = Answers.joined(self._asked(question, step))
        if self._processes[0].form == "one" and time.monotonic() - began_s > _PAYS_FROM_S:
            self._processes += [self._make() for _ in range((os.cpu_count() or 1) - len(self._processes))]
        return answers

    def _asked(self, question: Question, step: int) -> list[Answers]:
        """One share of the completions a process, the shares as equal as can be."""
        count = min(len(self._processes), len(question))
        edges = [len(question) * index // count for index in range(count + 1)] if count else [0]
        work = [
            self._threads.submit(process.score, question.part(start, stop), step, start)
            for process, start, stop in zip(self._processes, edges, edges[1:], strict=False)
        ]
        return [each.result() for each in work]

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._threads.shutdown()
        for process in self._processes:
            process.close()  # one that was started again meanwhile


class _Process:
    """One process of a reward, started when it is needed and again after it was killed."""

    def __init__(self, entry: str, code: Path, *, time_limit_s: float, seed: int) -> None:
        self._entry, self._code, self._time_limit_s, self._seed = entry, code, time_limit_s, seed
        self._name = named(entry, code)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._number = 0
        self.form = "batch"

    # --- asking ---------------------------------------------------------------------------------------------------------

    def score(self, question: Question, step: int, first: int) -> Answers:
        """Answers about the completions from number `first` of the step on."""
        answers: list[Answer] = []
        metrics: dict[str, float] = {}
        try:
            self._ask(question, step, first, self._time_limit_s, answers, metrics)
        except TimedOut:
            (self._skip_what_hangs if self.form == "one" else self._one_by_one)(question, step, first, answers)
        return Answers(answers, metrics)

    def _one_by_one(self, question: Question, step: int, first: int, answers: list[Answer]) -> None:
        """A batch again, to find what hangs: each has a quarter of the limit, all together have twice the limit."""
        ends_at_s = time.monotonic() + _RETRY_SHARE * self._time_limit_s
        for index in range(len(question)):
            limit_s = min(_SINGLE_SHARE * self._time_limit_s, ends_at_s - time.monotonic())
            self._try(question.part(index, index + 1), step, first + index, limit_s, answers)

    def _skip_what_hangs(self, question: Question, step: int, first: int, answers: list[Answer]) -> None:
        """The next completion hangs. Those after it have a quarter of the limit, until twice the limit is lost."""
        answers.append(TIMED_OUT)
        lost_s = 0.0
        while (done := len(answers)) < len(question):
            limit_s = _SINGLE_SHARE * self._time_limit_s if lost_s < _RETRY_SHARE * self._time_limit_s else 0.0
            lost_s += self._try(question.part(done, len(question)), step, first + done, limit_s, answers)

    def _try(self, question: Question, step: int, first: int, limit_s: float, answers: list[Answer]) -> float:
        """Ask, and count the completion at which it hangs as timed out; the seconds lost there."""
        try:
            if limit_s <= 0:
                raise TimedOut
            self._ask(question, step, first, limit_s, answers, {})
        except TimedOut:
            answers.append(TIMED_OUT)
            return limit_s
        return 0.0

    def _ask(
        self,
        question: Question,
        step: int,
        first: int,
        limit_s: float,
        answers: list[Answer],
        metrics: dict[str, float],
    ) -> None:
        """Add the answers as they come; each message has the limit for itself."""
        self.start()
        self._number += 1
        request: dict[str, Any] | None = {
            "number": self._number,
            "seed": self._seed * 1_000_003 + step,
            "step": step,
            "first": first,
            "limit_s": limit_s,
            "arguments": question.as_arguments(),
        }
        ends_at = len(answers) + len(question)
        for index in itertools.count():
            if len(answers) >= ends_at:
                return
            reply = self._exchange(request, limit_s, to=[self._number, index])
            request = None
            if "error" in reply:
                raise _user_failure(self._name, reply["error"])
            answers += map(Answer.from_json, reply["answers"])
            metrics |= reply.get("metrics", {})

    # --- the process ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "training_container.rewards.worker", str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*command, self._entry, str(self._code), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=os.environ | _OF_THE_PROCESS | {"PYTHONPATH": python_path()},
                cwd=self._code,  # where the user's relative paths lead; -P keeps its names from shadowing Python's own
                start_new_session=True,
            )
        self._socket = ours
        try:
            answer = self._exchange(None, max(_LOAD_LIMIT_S, self._time_limit_s), to=[0, 0])
        except TimedOut as error:
            raise UserFailure(f"The code of the reward {self._name} did not load in {_LOAD_LIMIT_S:g} s.") from error
        if "error" in answer:
            self.close()
            raise _user_failure(self._name, answer["error"])
        self.form = answer["form"]

    def _exchange(self, request: dict[str, Any] | None, limit_s: float, *, to: list[int]) -> dict[str, Any]:
        """Send a request (None: only wait for its next answer) and give the answer `to` it, or kill the process."""
        assert self._socket is not None
        try:
            self._socket.settimeout(limit_s)
            if request is not None:
                send(self._socket, request)
            return _answer(self._socket, to, time.monotonic() + limit_s)
        except TimeoutError as error:
            self.close()
            raise TimedOut from error
        except (EOFError, ConnectionError) as error:
            code = self._wait_for_end()
            self.close()
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise UserFailure(f"The process of the reward {self._name} ended by itself ({how}).") from error

    def _wait_for_end(self) -> int:
        assert self._process is not None
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return 0

    def close(self) -> None:
        """End the process and everything it started, in sessions of their own as well."""
        if self._process is not None:
            started = descendants_of(self._process.pid)
            with contextlib.suppress(ProcessLookupError):  # it has ended, and left no children
                os.killpg(self._process.pid, signal.SIGKILL)
            kill_all(started)
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None


def _answer(channel: socket.socket, to: list[int], deadline_s: float) -> dict[str, Any]:
    """The message that answers `to`; one that answers something else is nobody's, and is let go."""
    while True:
        message = receive(channel, deadline_s=deadline_s)
        if message.get("to") == to:
            return message


def _user_failure(name: str, error: dict[str, Any]) -> UserFailure:
    if trace := error.get("traceback"):
        print(trace, file=sys.stderr, flush=True)
    return UserFailure(f"The reward {name}: {error['message']}", file=error.get("file"), line=error.get("line"))
