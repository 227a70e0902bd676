"""How a job ends badly: a class that the control plane acts on, a sentence, and the user's file and line.

    memory     the host or the accelerator ran out; a smaller micro-batch or a larger machine may do
    numerics   losses or gradients that are not finite, beyond what is tolerated
    user       an exception in user code, bad data, a bad reward: trying again cannot help
    platform   everything else: the machine, or a fault of ours

The failure file is one JSON line of at most 900 bytes; SageMaker wraps it and cuts at 1,024.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from microtuning_core.domain.errors import InvalidCode, InvalidData, InvalidSpec

from .texts import printable, text_of

FailureClass = Literal["memory", "numerics", "user", "platform"]
MAX_FAILURE_BYTES = 900


class JobFailure(Exception):
    """A failure whose class is known where it happens."""

    failure_class: FailureClass = "platform"

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.message, self.file, self.line = message, file, line


class PlatformFailure(JobFailure):
    """The machine, or something of ours."""


class UserFailure(JobFailure):
    """User code or data; never retried."""

    failure_class: FailureClass = "user"


class NumericsFailure(JobFailure):
    """Not finite, again and again."""

    failure_class: FailureClass = "numerics"


class MemoryFailure(JobFailure):
    """Out of memory, as told by the kernel or a child's last words."""

    failure_class: FailureClass = "memory"


@dataclass(frozen=True)
class Failure:
    """What goes into the failure file."""

    failure_class: FailureClass
    message: str
    file: str | None = None
    line: int | None = None

    def as_line(self) -> str:
        """The JSON line; a long message loses its end, never its class, file or line."""
        message = printable(self.message)[:MAX_FAILURE_BYTES]
        while len(text := self._dump(message).encode()) > MAX_FAILURE_BYTES:
            message = message[: len(message) - max(1, (len(text) - MAX_FAILURE_BYTES) // 6 + 1)]
        return self._dump(message)

    def _dump(self, message: str) -> str:
        file = None if self.file is None else printable(self.file)
        fields = {"class": self.failure_class, "message": message, "file": file, "line": self.line}
        return json.dumps({key: value for key, value in fields.items() if value is not None}, ensure_ascii=False)


def classify(error: BaseException, *, user_code: Path | None = None) -> Failure:
    """The failure an exception stands for. `user_code` is the folder whose frames are the user's own."""
    if isinstance(error, JobFailure):
        return Failure(error.failure_class, error.message, error.file, error.line)
    if is_out_of_memory(error):
        return Failure("memory", f"Out of memory: {first_line(error)}")
    if isinstance(error, InvalidData | InvalidSpec | InvalidCode):
        return Failure("user", text_of(error), getattr(error, "file", None), getattr(error, "line", None))
    frame = innermost_frame(error, user_code)
    failure_class: FailureClass = "user" if frame and user_code and frame[0].startswith(str(user_code)) else "platform"
    return Failure(failure_class, f"{type(error).__name__}: {first_line(error)}", *(frame or (None, None)))


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises its own class on an accelerator and a RuntimeError on the host."""
    text = text_of(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def innermost_frame(error: BaseException, prefer: Path | None = None) -> tuple[str, int] | None:
    """(file, line) of the innermost frame, or of the innermost one under `prefer` when there is one."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if prefer and frame[0].startswith(str(prefer))]
    chosen = own or frames
    return chosen[-1] if chosen else None


def first_line(error: BaseException) -> str:
    return (text_of(error).strip().splitlines() or [type(error).__name__])[0]


def write_failure(path: Path, failure: Failure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(failure.as_line(), encoding="utf-8")
    print(f"failed ({failure.failure_class}): {printable(failure.message)}", file=sys.stderr, flush=True)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Files that libraries cannot make anything of, whatever they raise, are the user's to mend; memory is not.

    Raises:
        UserFailure: `what` cannot be loaded.
    """
    try:
        yield
    except JobFailure:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserFailure(f"{what} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
