"""User code that forks, in a process that serves requests: the child must not come back to that. Imports nothing heavy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


def in_one_process(work: Callable[[], T]) -> Callable[[], T]:
    """`work`, out of which this process alone comes back: a child that user code forked in it would answer a second time.

    The child ends where it leaves `work`, as a script ends.
    """
    own_pid = os.getpid()

    def guarded() -> T:
        try:
            return work()
        finally:
            if os.getpid() != own_pid:
                _end(sys.exception())

    return guarded


def _end(error: BaseException | None) -> NoReturn:
    """With the exit status of a script that ended so, whatever telling about it raises."""
    status = _status(error)
    try:
        if error is not None and not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)
