"""Ctrl-C as a person means it: pressed once, or a few times in a hurry, it is one wish.

Python raises KeyboardInterrupt for every press, also while the first one is being answered: a second press would then cut
off the farewell, or end the program by the signal.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HURRY_S = 2.0


class _Ear:
    """Raises KeyboardInterrupt, and is deaf for a while; who presses again after that is still here and means it."""

    def __init__(self) -> None:
        self._deaf_until = 0.0

    def __call__(self, *_: object) -> None:
        now = time.monotonic()
        if now >= self._deaf_until:
            self._deaf_until = now + HURRY_S
            raise KeyboardInterrupt


@contextmanager
def one_interrupt(*, ends_program: bool = False) -> Iterator[None]:
    """Within, presses of Ctrl-C in a hurry count once; with `ends_program` those that come after it count no more.

    Only in the main thread and with Python's own handler: another one is the business of who set it.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _Ear())
    try:
        yield
    finally:
        # Python gives up its own handlers while it ends, and the signal would kill it then; ignoring lasts.
        signal.signal(signal.SIGINT, signal.SIG_IGN if ends_program else signal.default_int_handler)
