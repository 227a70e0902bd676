"""The machines of this account: how many there are, and who waits for them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from microtuning_local.sagemaker.faults import Faults

ASK_AGAIN_S = 0.05


class Pool:
    """Hands out machines first come, first served. A fault may say that fewer of a type exist than the pool holds."""

    def __init__(self, machines: int, faults: Faults) -> None:
        self.machines, self.faults = machines, faults
        self.in_use: Counter[str] = Counter()
        self.waiting: list[object] = []
        self.changed = threading.Condition()

    def take(self, types: Sequence[str], count: int) -> str | None:
        """Take machines of the first type that has enough free ones; None when all have too few."""
        with self.changed:
            for instance_type in types:
                if self._free(instance_type) >= count:
                    self.in_use[instance_type] += count
                    return instance_type
            return None

    def wait(self, types: Sequence[str], count: int, *, give_up: Callable[[], bool]) -> str | None:
        """Take machines, waiting in line until they are free; None when `give_up` says so first."""
        ticket = object()
        with self.changed:
            self.waiting.append(ticket)
            try:
                while not give_up():
                    taken = self.take(types, count) if self.waiting[0] is ticket else None
                    if taken:
                        return taken
                    self.changed.wait(ASK_AGAIN_S)
            finally:
                self.waiting.remove(ticket)
                self.changed.notify_all()
        return None

    def give_back(self, instance_type: str, count: int) -> None:
        with self.changed:
            self.in_use[instance_type] -= count
            self.changed.notify_all()

    def can_ever_hold(self, types: Sequence[str], count: int) -> bool:
        """False when no wait would help: the account has fewer machines of every type than are asked for."""
        return any(self._capacity(instance_type) >= count for instance_type in types)

    def _capacity(self, instance_type: str) -> int:
        return min(self.machines, self.faults.spec.capacity.get(instance_type, self.machines))

    def _free(self, instance_type: str) -> int:
        free = self.machines - self.in_use.total()
        return min(free, self._capacity(instance_type) - self.in_use[instance_type])


Ending = Literal["exited", "stop", "max_runtime", "max_wait", "reclaimed", "mirror_failed", "server_ends"]


class Control:
    """What others ask of a running job. Each flag is set once and read by the job's own thread."""

    def __init__(self) -> None:
        self.stop, self.reclaim, self.server_ends = False, False, False
        self.asked = threading.Event()

    def ask(self, *, stop: bool = False, reclaim: bool = False, server_ends: bool = False) -> None:
        self.stop, self.reclaim, self.server_ends = (
            self.stop or stop,
            self.reclaim or reclaim,
            self.server_ends or server_ends,
        )
        self.asked.set()

    @property
    def ends_waiting(self) -> bool:
        """Whether a job that has no machine yet need not wait for one; there is nothing to take back then."""
        return self.stop or self.server_ends

    def ending(self) -> Ending | None:
        """The strongest of what was asked."""
        if self.server_ends:
            return "server_ends"
        if self.reclaim:
            return "reclaimed"
        return "stop" if self.stop else None

    def forget_reclaim(self) -> None:
        """The machine that was taken back is gone; the job goes on with another."""
        self.reclaim = False
        self.asked.clear()
        if self.ending():
            self.asked.set()
