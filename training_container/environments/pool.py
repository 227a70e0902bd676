"""The processes of environments as the trainer sees them: questions to many at once, each within its time limit.

A process that does not answer in time is killed with everything it started, and its episode counts as timed out; the others
go on. What user code raises, or answers in a wrong form, ends the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..failures import UserFailure
from ..processes import descendants_of, kill_all
from ..user_code import named, python_path, receive, send
from .protocol import Action, Turn

# Loading user code may import much more than playing does.
_LOAD_LIMIT_S = 300.0
_START_LIMIT_S = 60.0
# The order of sets must be the same after a restart; a pool of threads would not survive the fork; what is printed is
# seen although the process is killed in the end.
_OF_THE_PROCESS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Environments:
    """The user's environment, as often as it is needed: `open` loads it, `close` ends all its processes.

    Args:
        entry: "module:name" in the code folder, or "pickle:file".
        code: the folder with the user's sources.
        options: keyword arguments of the class.
        time_limit_s: of one reset, step or grading, while those of the same turn run beside it.
    """

    def __init__(self, entry: str, code: Path, *, options: dict[str, Any], time_limit_s: float) -> None:
        self._entry, self._code, self._options = entry, code, options
        self._name = named(entry, code)
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._seats: dict[int, _Seat] = {}

    # --- episodes -------------------------------------------------------------------------------------------------------

    def begin(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[int, Turn]:
        """Begin episode i with row i and its chance with seed i; those that timed out are missing."""
        for index in range(len(rows)):
            if index not in self._seats:
                self._seats[index] = self._fork()
        requests = {
            index: {"begin": dict(row), "seed": seed} for index, (row, seed) in enumerate(zip(rows, seeds, strict=True))
        }
        return {index: Turn(**answer) for index, answer in self._ask(requests).items()}

    def act(self, actions: Mapping[int, Action]) -> dict[int, Turn]:
        """What the environments answer; those that timed out are missing."""
        answers = self._ask({index: {"act": asdict(action)} for index, action in actions.items()})
        return {index: Turn(**answer) for index, answer in answers.items()}

    def grade(self, indices: Iterable[int]) -> dict[int, float | None]:
        """The rewards of whole episodes, None where the form has none; those that timed out are missing."""
        answers = self._ask({index: {"grade": True} for index in indices})
        return {index: answer["reward"] for index, answer in answers.items()}

    def _ask(self, requests: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        deadline_s = time.monotonic() + self._time_limit_s
        for index, request in requests.items():
            with contextlib.suppress(ConnectionError):  # it has ended; reading its answer says so
                send(self._seats[index].channel, request)
        answers = {}
        for index in requests:
            with contextlib.suppress(TimeoutError):
                answers[index] = self._answer_of(index, deadline_s)
        return answers

    def _answer_of(self, index: int, deadline_s: float) -> dict[str, Any]:
        seat = self._seats[index]
        try:
            # Those read later have had their time as well: what is there already is taken, however late.
            answer = receive(seat.channel, deadline_s=max(deadline_s, time.monotonic() + 0.01))
        except TimeoutError:
            self._seats.pop(index).kill()
            raise
        except (EOFError, ConnectionError) as error:
            raise UserFailure(f"A process of the environment {self._name} ended by itself.") from error
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer

    # --- processes ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the process that loads the user's code.

        Raises:
            UserFailure: it cannot be loaded.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            module = "training_container.environments.worker"
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), self._entry, str(self._code)]
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), json.dumps(self._options)],
                pass_fds=[theirs.fileno()],
                env=os.environ | _OF_THE_PROCESS | {"PYTHONPATH": python_path()},
                cwd=self._code,
                start_new_session=True,
            )
        self._channel = ours
        answer = self._hear(_LOAD_LIMIT_S, f"The code of the environment {self._name} did not load in")
        if "error" in answer:
            self.close()
            raise self._failure(answer["error"])

    def _fork(self) -> _Seat:
        assert self._channel is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._channel, [b"+"], [theirs.fileno()])
        answer = self._hear(_START_LIMIT_S, f"A process for the environment {self._name} did not start in")
        return _Seat(answer["pid"], ours)

    def _hear(self, limit_s: float, otherwise: str) -> dict[str, Any]:
        assert self._channel is not None
        try:
            return receive(self._channel, deadline_s=time.monotonic() + limit_s)
        except TimeoutError as error:
            raise UserFailure(f"{otherwise} {limit_s:g} s.") from error
        except (EOFError, ConnectionError) as error:
            raise UserFailure(f"The process of the environment {self._name} ended by itself.") from error

    def close(self) -> None:
        """End every process and everything it started, in sessions of their own as well."""
        for seat in self._seats.values():
            seat.channel.close()
        self._seats.clear()
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            kill_group(self._process.pid)
            self._process.wait()
        self._process = self._channel = None

    def _failure(self, error: dict[str, Any]) -> UserFailure:
        if trace := error.get("traceback"):
            print(trace, file=sys.stderr, flush=True)
        message = f"The environment {self._name}: {error['message']}"
        return UserFailure(message, file=error.get("file"), line=error.get("line"))


class _Seat:
    """One process that plays episodes."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel

    def kill(self) -> None:
        self.channel.close()
        kill_group(self.pid)


def kill_group(pid: int) -> None:
    """Kill a process that leads a session, and what it started, in sessions of their own as well."""
    started = descendants_of(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and left no children
        os.killpg(pid, signal.SIGKILL)
    kill_all([pid, *started])


def episode_seed(seed: int, salt: str) -> int:
    """For python's and numpy's generators: from the run's seed and what tells this episode from others."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{salt}".encode()).digest()[:8], "big")
