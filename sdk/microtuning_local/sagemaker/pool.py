"""The machines of this account: how many there are, and who waits for them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from microtuning_local.sagemaker import jobs as records
from microtuning_local.sagemaker import rules, warm_pools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from microtuning_local.sagemaker.faults import Faults
    from microtuning_local.sagemaker.jobs import Job, Jobs

ASK_AGAIN_S = 0.05


class Pool:
    """Hands out machines first come, first served. A fault may say that fewer of a type exist than the pool holds.

    keepers: jobs that hold machines, or held them, and want them kept in a warm pool; those count as in use until the
    warm pool has ended, which is looked at whenever somebody wants to know.
    """

    def __init__(self, machines: int, faults: Faults, jobs: Jobs) -> None:
        self.machines, self.faults, self.jobs = machines, faults, jobs
        self.in_use: Counter[str] = Counter()
        self.keepers: list[Job] = []
        self.waiting: list[object] = []
        self.changed = threading.Condition()

    def take(self, job: Job) -> str | None:
        """Take machines of the first type that has enough free ones; None when all have too few."""
        with self.changed:
            self._forget_ended()
            for instance_type in rules.instance_types(job.request):
                if self._free(instance_type) >= job.instance_count:
                    self.in_use[instance_type] += job.instance_count
                    self._remember(job)
                    return instance_type
            return None

    def take_kept(self, job: Job) -> str | None:
        """Take the machines of a warm pool that matches; None when there is none."""
        with self.changed:
            keeper = self._matching(job.request)
            if keeper is None:
                return None
            now = records.now()
            self.jobs.change(keeper, lambda kept: warm_pools.reuse(kept, job.name, now))
            self.keepers.remove(keeper)
            self._remember(job)
            return warm_pools.kept_type(keeper)

    def _remember(self, job: Job) -> None:
        if warm_pools.keep_alive_s(job):
            self.keepers.append(job)

    def _matching(self, request: Mapping[str, Any]) -> Job | None:
        now = records.now()
        kept = (each for each in self.keepers if warm_pools.status(each, now) == "Available")
        return next((each for each in kept if warm_pools.matches(request, each.request)), None)

    def wait(self, job: Job, *, give_up: Callable[[], bool]) -> str | None:
        """Take machines, waiting in line until they are free; None when `give_up` says so first."""
        ticket = object()
        with self.changed:
            self.waiting.append(ticket)
            try:
                while not give_up():
                    taken = self.take_kept(job) or (self.take(job) if self.waiting[0] is ticket else None)
                    if taken:
                        return taken
                    self.changed.wait(ASK_AGAIN_S)
            finally:
                self.waiting.remove(ticket)
                self.changed.notify_all()
        return None

    def leave(self, job: Job, instance_type: str) -> None:
        """The job needs its machines no longer: they are free, or its warm pool keeps them or has passed them on."""
        with self.changed:
            if job.kept_since is None:
                self._free_machines(job, instance_type)

    def _forget_ended(self) -> None:
        now = records.now()
        for keeper in [each for each in self.keepers if warm_pools.status(each, now) == "Terminated"]:
            if keeper.kept_since is not None:  # else its own thread still holds them, and frees them on leaving
                self._free_machines(keeper, warm_pools.kept_type(keeper))

    def _free_machines(self, job: Job, instance_type: str) -> None:
        if job in self.keepers:
            self.keepers.remove(job)
        self.in_use[instance_type] -= job.instance_count
        self.changed.notify_all()

    def count_in_use(self) -> int:
        """Machines that are held or kept."""
        with self.changed:
            self._forget_ended()
            return self.in_use.total()

    def warm_pool_refusal(self, job: Job) -> rules.Refusal | None:
        """What a create is refused with that wants more kept machines than the account's quota for them."""
        quota = self.faults.spec.warm_pool_quota.get(job.instance_type)
        if quota is None or not warm_pools.keep_alive_s(job):
            return None
        with self.changed:
            self._forget_ended()
            used = sum(each.instance_count for each in self.keepers if each.instance_type == job.instance_type)
            if self._matching(job.request) or used + job.instance_count <= quota:
                return None
        return rules.warm_pools_exceeded(job.instance_type, quota, used, job.instance_count)

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
