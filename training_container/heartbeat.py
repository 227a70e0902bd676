"""A worker's sign of life to its supervisor: a few numbers in memory that both see, so that neither waits for the other.

The worker beats between pieces of its work: a micro-batch, a token drawn for all rows, a step. Whatever has a time limit of
its own, as a reward, is inside `resting`, where no beat is missed. The supervisor learns how long the worker's longest
silence was and calls it hung after ten times that, but not before a floor: a kernel is compiled once, a disk is slow once.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

# last beat (seconds of time.monotonic, the same clock for all processes of a machine), longest silence, resting (0 or 1)
_SLOT = struct.Struct("ddd")
LOADING_S, FLOOR_S, OF_A_LOOP_S, TIMES = 3600.0, 600.0, 3600.0, 10.0


class Heartbeat:
    """One worker's. Made before the fork; `begin` starts it anew for the next worker."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOT.size)
        self.begin()

    def begin(self) -> None:
        self._write(0.0, 0.0, 0.0)

    # --- the worker -----------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        last_s, longest_s, _ = self._read()
        now_s = time.monotonic()
        self._write(now_s, max(longest_s, now_s - last_s) if last_s else longest_s, 0.0)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Around what watches over itself."""
        last_s, longest_s, _ = self._read()
        self._write(last_s, longest_s, 1.0)
        try:
            yield
        finally:
            self._write(time.monotonic(), longest_s, 0.0)

    # --- the supervisor -------------------------------------------------------------------------------------------------

    def hung_for_s(self, began_at_s: float, floor_s: float) -> float | None:
        """How long the worker has been silent, if that is longer than it may be; else None.

        Args:
            began_at_s: when it was forked; until its first beat it loads a model, and has an hour.
            floor_s: the shortest silence that counts.
        """
        last_s, longest_s, resting = self._read()
        limit_s = max(floor_s, TIMES * longest_s) if last_s else max(floor_s, LOADING_S)
        silent_s = time.monotonic() - (last_s or began_at_s)
        return silent_s if not resting and silent_s > limit_s else None

    def _read(self) -> tuple[float, float, float]:
        last_s, longest_s, resting = _SLOT.unpack(self._memory[: _SLOT.size])
        return last_s, longest_s, resting

    def _write(self, last_s: float, longest_s: float, resting: float) -> None:
        self._memory[: _SLOT.size] = _SLOT.pack(last_s, longest_s, resting)
