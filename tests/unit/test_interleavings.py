"""Whatever comes in whatever order, twice, late or not at all: the laws of runs, slots, jobs and money hold, and every run
ends. Random histories of a small stage in memory, which small_cloud.py describes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from microtuning_core.domain.cost import total
from microtuning_core.domain.tenants import StageTenants, Tenant, TenantLimits
from tests.unit.small_cloud import ENDS, HINTS, HOLDS_A_SLOT, REFUSALS, TICK, Died, Fault, Message, SmallCloud

PICKS = st.integers(0, 40)
DEATHS = st.sampled_from(["FAILED", "TIMED_OUT", "ABORTED"])
# Nothing happens to most functions; to some at their n-th call of a port: they die, or others come in between.
FAULTS = st.none() | st.tuples(st.integers(0, 25), st.none() | st.lists(PICKS, min_size=1, max_size=4))
# Two tenants, of which one may have no more than so many GPUs of a family and runs at a time.
SHARED = st.builds(
    lambda gpus, runs: StageTenants(tenants={"acme": Tenant(gpus=gpus, max_running_runs=runs), "beta": Tenant()}),
    st.sampled_from([{"A10G": 1}, {"A10G": 1, "L4": 1}, {"A10G": 2, "L4": 0}]),
    st.none() | st.just(1),
)
LIVES = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


class Stage(RuleBasedStateMachine):
    """What may happen to a stage that every run of it survives, if it does not happen too often."""

    cloud: SmallCloud

    @initialize(
        run_count=st.integers(1, 3), quota=st.integers(1, 2), rounds=st.integers(0, 8), tenants=st.none() | SHARED
    )
    def opens(self, run_count: int, quota: int, rounds: int, tenants: StageTenants | None) -> None:
        self.cloud = SmallCloud(run_count, quota, tenants)
        self.commands = 0
        self.deaths = 0
        self.step = 0
        self.all_goes_well(rounds)

    # -- messages

    @rule(pick=PICKS, fault=FAULTS, again=st.booleans())
    def a_message_comes(self, pick: int, fault: object, again: bool) -> None:
        if self.cloud.messages:
            message = self._message(pick)
            self.cloud.deliver(message, self._fault(fault, message), again=again)

    @rule(rounds=st.integers(1, 4))
    def all_goes_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self.cloud.deliver_all()
            self._with_job(0, self.cloud.jobs.get_a_machine, "Starting", "Interrupted")

    @rule(pick=PICKS)
    def a_hint_is_lost(self, pick: int) -> None:
        hints = [each for each in self.cloud.messages if each.queue in HINTS]
        if hints:
            self.cloud.messages.remove(hints[pick % len(hints)])

    @rule(fault=FAULTS)
    def the_schedule_ticks(self, fault: object) -> None:
        self.cloud.tick(self._fault(fault, None))

    @rule(minutes=st.sampled_from([1, 5, 9, 31, 180]))
    def time_passes(self, minutes: int) -> None:
        self.cloud.now += timedelta(minutes=minutes)

    # -- the cloud

    @rule(pick=PICKS)
    def a_job_gets_its_machine(self, pick: int) -> None:
        self._with_job(pick, lambda name: self.cloud.jobs.get_a_machine(name), "Starting", "Interrupted")

    @rule(pick=PICKS)
    def spot_takes_a_machine(self, pick: int) -> None:
        self._with_job(pick, lambda name: self.cloud.jobs.lose_the_machine(name), "Training")

    @rule(pick=PICKS)
    def a_checkpoint_is_whole(self, pick: int) -> None:
        self._with_job(pick, self._save, "Training", "Stopping")

    @rule(pick=PICKS, how=st.sampled_from(["completed", "lost", "no capacity", "spot gone"]))
    def a_job_ends(self, pick: int, how: str) -> None:
        self._with_job(pick, lambda name: self._end(name, how), "Starting", "Training", "Interrupted", "Stopping")

    @rule(pick=PICKS)
    def a_bill_will_come_late(self, pick: int) -> None:
        self._with_job(pick, self.cloud.jobs.late_bills.add, "Starting", "Training")

    @rule()
    def late_bills_come(self) -> None:
        for name in list(self.cloud.jobs.late_bills):
            self.cloud.jobs.send_bill(name)

    @rule(code=st.sampled_from(REFUSALS[:-1]), times=st.integers(1, 5), made=st.booleans())
    def the_next_launches_are_refused(self, code: str, times: int, made: bool) -> None:
        made_all_the_same = made and code == "InternalServerError"
        self.cloud.jobs.refusals = [(code, made_all_the_same)] * times

    @precondition(lambda self: self.deaths < 8)
    @rule(pick=PICKS, status=DEATHS)
    def an_execution_dies(self, pick: int, status: str) -> None:
        alive = [each for each in self.cloud.executions.by_name.values() if each.status == "RUNNING"]
        if alive:
            self.deaths += 1
            self.cloud.executions.die(alive[pick % len(alive)].name, status)

    # -- laws

    @invariant()
    def laws(self) -> None:
        cloud = getattr(self, "cloud", None)
        if cloud is None:
            return
        assert cloud.broken is None, cloud.broken
        for run in cloud.runs.records.values():
            if run.status in HOLDS_A_SLOT and not run.verdict:
                assert run.run_id in cloud.admissions.held, f"{run.status} without a slot"

    def teardown(self) -> None:
        if hasattr(self, "cloud"):
            self._every_end_is_heard_in_two_ticks()
            for _ in range(60):
                if self.cloud.runs.open or self.cloud.admissions.held or self.cloud.admissions.queue:
                    self._a_good_hour_of_the_cloud()
            self._everything_is_over()

    # -- helpers

    def _message(self, pick: int) -> Message:
        return self.cloud.messages[pick % len(self.cloud.messages)]

    def _fault(self, fault: object, message: Message | None) -> Fault | None:
        if not isinstance(fault, tuple):
            return None
        calls, others = fault
        may_die = message is None or message.queue != "invoke"
        if others is None:
            return Fault(calls, _die) if may_die else None
        return Fault(calls, lambda: self._others_work(others, message))

    def _others_work(self, picks: list[int], message: Message | None) -> None:
        for pick in picks:
            self._other_work(pick, [each for each in self.cloud.messages if each is not message or each.queue in HINTS])

    def _other_work(self, pick: int, messages: list[Message]) -> None:
        if pick == 0:
            self.cloud.tick()
        for message in messages if pick == 1 else messages[pick % (len(messages) or 1) :][:1]:
            self.cloud.deliver(message)

    def _with_job(self, pick: int, happens: Callable[[str], object], *secondaries: str) -> None:
        jobs = [job for job in self.cloud.jobs.made.values() if not job.is_terminal and job.secondary in secondaries]
        if jobs:
            happens(jobs[pick % len(jobs)].job_name)

    def _save(self, name: str) -> None:
        self.step += 1
        self.cloud.jobs.save(name, self.step)

    def _end(self, name: str, how: str) -> None:
        if self.cloud.jobs.made[name].started_at and how in ("lost", "spot gone", "no capacity"):
            self._save(name)  # three billed attempts without a newer checkpoint would be the end
        self.cloud.jobs.end(name, how)

    def _every_end_is_heard_in_two_ticks(self) -> None:
        self.cloud.lose_hints()
        runs = self.cloud.runs.records
        ended = [run for run in runs.values() if run.current and self._has_ended(run.current.job_name)]
        for _ in range(2):
            self.cloud.tick()
        for run in ended:
            assert runs[run.run_id].attempts[len(run.attempts) - 1].is_settled

    def _has_ended(self, job_name: str) -> bool:
        job = self.cloud.jobs.made.get(job_name)
        return job is not None and job.is_terminal

    def _a_good_hour_of_the_cloud(self) -> None:
        """Nothing fails, and no event comes: what Step Functions and users ask for, the jobs, and ticks."""
        self.cloud.jobs.refusals.clear()
        self.cloud.silent.clear()
        for _ in range(6):
            self.cloud.lose_hints()
            self.cloud.deliver_all()
        self._with_job(0, lambda name: self.cloud.jobs.end(name, "stopped"), "Stopping")
        self._with_job(0, lambda name: self._finish(name), "Training", "Interrupted")
        self._with_job(0, lambda name: self.cloud.jobs.get_a_machine(name), "Starting")
        self.late_bills_come()
        self.cloud.now += TICK
        self.cloud.tick()

    def _finish(self, name: str) -> None:
        self._save(name)
        self.cloud.jobs.end(name, "completed")

    def _everything_is_over(self) -> None:
        assert self.cloud.broken is None, self.cloud.broken
        for run in self.cloud.runs.records.values():
            self._is_over(run)
            jobs = {job.job_name: job for job in self.cloud.jobs.of_run(run.run_id)}
            assert all(job.is_terminal for job in jobs.values())
            billed = {each.job_name: each.billed_s for each in run.attempts if each.job_name in jobs}
            assert billed == {name: job.billed_s or 0 for name, job in jobs.items()}
            entries = self.cloud.ledger.entries(run.tenant, run.run_id)
            assert total(each for each in entries if each.line == "compute") == self.cloud.jobs.bill_usd(run.run_id)
            assert run.cost_usd == total(entries)
            assert [each.execution for each in entries if each.execution] == [*range(1, run.executions + 1)]
        assert (self.cloud.admissions.held, self.cloud.admissions.queue, self.cloud.runs.open) == ({}, {}, set())

    def _is_over(self, run) -> None:
        assert run.status == "completed", (run.status, run.reason)


class HarshStage(Stage):
    """The same with what ends a run: its user's word, failures that nothing mends, letters that nobody can deliver."""

    @rule(pick=PICKS, verb=st.sampled_from(["cancel", "rollback", "rollback", "rollback"]))
    def a_user_commands(self, pick: int, verb: str) -> None:
        runs = sorted(self.cloud.runs.records)
        self.commands += 1
        self.cloud.command(runs[pick % len(runs)], self.commands, verb=verb)

    @rule(pick=PICKS, verb=st.sampled_from(["cancel", "rollback", "rollback", "rollback"]), fault=FAULTS)
    def a_user_commands_at_once(self, pick: int, verb: str, fault: object) -> None:
        self.a_user_commands(pick, verb)
        message = self.cloud.messages[-1]
        self.cloud.deliver(message, self._fault(fault, message))

    @rule(pick=PICKS, usd=st.sampled_from(["0.001", "0.3", "1", "1000"]), fault=FAULTS)
    def a_user_sets_a_budget(self, pick: int, usd: str, fault: object) -> None:
        runs = sorted(self.cloud.runs.records)
        self.commands += 1
        self.cloud.command(runs[pick % len(runs)], self.commands, verb="budget", usd=usd)
        message = self.cloud.messages[-1]
        self.cloud.deliver(message, self._fault(fault, message))

    @rule(usd=st.none() | st.sampled_from(["0.1", "2", "1000"]))
    def the_tenant_has_another_budget(self, usd: str | None) -> None:
        self.cloud.admissions.changes["acme"] = TenantLimits(budget_usd_per_day=usd and Decimal(usd))

    def _a_good_hour_of_the_cloud(self) -> None:
        self.cloud.admissions.changes.clear()  # what waits for a budget waits for days
        super()._a_good_hour_of_the_cloud()

    def _other_work(self, pick: int, messages: list[Message]) -> None:
        if pick > 35:
            self.a_user_commands(pick, "rollback" if pick < 40 else "cancel")
            messages = self.cloud.messages[-1:]
        super()._other_work(pick, messages)

    @rule(pick=PICKS, how=st.sampled_from(sorted(ENDS)))
    def a_job_ends_somehow(self, pick: int, how: str) -> None:
        end = self.cloud.jobs.end
        self._with_job(pick, lambda name: end(name, how), "Starting", "Training", "Interrupted", "Stopping")

    @rule(pick=PICKS)
    def a_job_falls_silent(self, pick: int) -> None:
        self._with_job(pick, self.cloud.silent.add, "Training")

    @rule(what=st.sampled_from(["refusal", "dead letter", "dead state", *["nothing"] * 7]), pick=PICKS, calls=PICKS)
    def what_ends_a_run(self, what: str, pick: int, calls: int) -> None:
        """Seldom, since what comes after an end is less than what comes before it."""
        states = [each for each in self.cloud.messages if each.queue == "invoke"]
        letters = [each for each in self.cloud.messages if each.queue != "invoke"]
        if what == "refusal":
            self.cloud.jobs.refusals.append((REFUSALS[-1], False))
        elif what == "dead letter" and letters:
            self.cloud.bury(letters[pick % len(letters)])
        elif what == "dead state" and states:
            self.cloud.deliver(states[pick % len(states)], Fault(calls, _die))

    def _is_over(self, run) -> None:
        assert run.is_final, (run.status, run.reason)


def _die() -> None:
    raise Died


TestWhatRunsSurvive = Stage.TestCase
TestWhatRunsSurvive.settings = LIVES
TestWhateverHappens = HarshStage.TestCase
TestWhateverHappens.settings = LIVES
