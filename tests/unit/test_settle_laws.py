"""Laws of the settle loop, over random lives of a run: what holds whatever happens, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microtuning_core.domain.branching import asked_to_go_back
from microtuning_core.domain.command import Command
from microtuning_core.domain.failures import BILLED_ATTEMPTS_WITHOUT_PROGRESS, billed_without_progress, classify_refusal
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.run import (
    FINAL,
    TRANSITIONS,
    Attempt,
    CheckpointRef,
    Run,
    RunStatus,
    new_run,
)
from microtuning_core.domain.settle import MAX_EXECUTIONS, ExecutionFacts, Facts, closed, decide, history
from tests.unit.records import RUN_ID, a_plan, a_spec

BEGAN = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
SPEC = a_spec()
PLAN = a_plan()

# How a job may end: (status, secondary, reason, seconds billed).
ENDS = {
    "completed": ("Completed", "Completed", None, 60),
    "lost": ("Failed", "Failed", "InternalServerError: lost", 60),
    "no capacity": ("Failed", "Failed", "CapacityError: none", None),
    "memory": ("Failed", "Failed", 'AlgorithmError: {"class": "memory", "message": "m"}, exit code: 1', 60),
    "numerics": ("Failed", "Failed", 'AlgorithmError: {"class": "numerics", "message": "n"}, exit code: 1', 60),
    "user": ("Failed", "Failed", 'AlgorithmError: {"class": "user", "message": "u"}, exit code: 1', 60),
    "stopped": ("Stopped", "Stopped", None, 60),
    "max runtime": ("Stopped", "MaxRuntimeExceeded", None, 3600),
    "spot gone": ("Stopped", "MaxWaitTimeExceeded", None, 60),
    "unknown": ("Failed", "Failed", "nobody knows", 60),
}


def job(name: str, status: str = "InProgress", secondary: str = "Training", reason=None, billed=None) -> JobFacts:
    return JobFacts(
        job_name=name,
        status=status,
        secondary=secondary,
        created_at=BEGAN,
        started_at=BEGAN if billed is not None or secondary == "Training" else None,
        failure_reason=reason,
        ended_at=None if status == "InProgress" else BEGAN,
        billed_s=billed,
        training_s=billed,
    )


def ended(name: str, how: str) -> JobFacts:
    return job(name, *ENDS[how])


@dataclass
class World:
    """A run, and what is true around it. Each step is something that may happen at any time."""

    run: Run = field(default_factory=lambda: new_run(RUN_ID, SPEC, BEGAN))
    now: datetime = BEGAN
    jobs: dict[str, JobFacts] = field(default_factory=dict)
    step: int = 0
    commands: int = 0

    def facts(self, **changes) -> Facts:
        current = self.run.current
        found = self.jobs.get(current.job_name) if current else None
        known = {"job": found, "job_is_missing": current is not None and found is None, "logs_asked": True}
        return Facts(now=self.now, newest_step=self.step or None, **(known | changes))

    def decided(self, facts: Facts) -> None:
        decision = decide(self.run, facts)
        assert decide(decision.run, facts).run == decision.run, "deciding again on the same facts changed something"
        self.run = decision.run

    # -- what may happen -------------------------------------------------------------------------------------------

    def look(self, _: str) -> None:
        self.decided(self.facts())

    def cancel(self, _: str) -> None:
        self.decided(self.facts(command=Command(verb="cancel", issued_at=self.now)))

    def goes_back(self, _: str) -> None:
        self.commands += 1
        self.run = asked_to_go_back(self.run, CheckpointRef(lineage=1, step=1), f"c-{self.commands}")
        self.decided(self.facts())

    def execution_dies(self, _: str) -> None:
        self.decided(self.facts(execution=ExecutionFacts(self.run.execution, "FAILED")))

    def execution_is_missing(self, _: str) -> None:
        self.decided(self.facts(execution=ExecutionFacts(self.run.execution, "MISSING")))

    def refused(self, _: str) -> None:
        if self.run.current and self.run.current.job_name not in self.jobs:
            self.decided(self.facts(refusal=classify_refusal("ResourceLimitExceeded", "none")))

    def time_passes(self, _: str) -> None:
        self.now += timedelta(minutes=20)

    def checkpoint(self, _: str) -> None:
        self.step += 1

    def queued(self, _: str) -> None:
        if self.run.status == RunStatus.SUBMITTED and not self.run.verdict:
            self.run = self.run.moved_to(RunStatus.QUEUED)

    def admitted(self, _: str) -> None:
        if self.run.status == RunStatus.QUEUED and not self.run.verdict:
            self.run = self.run.moved_to(RunStatus.PLANNING)

    def planned(self, _: str) -> None:
        if self.run.status in (RunStatus.PLANNING, RunStatus.RECOVERING) and not self.run.verdict:
            number = len(self.run.attempts) + 1
            made = Attempt(
                attempt=number, job_name=f"prod-{number}", lineage=self.run.lineage, plan=PLAN, created_at=self.now
            )
            self.run = self.run.moved_to(RunStatus.TRAINING, attempts=(*self.run.attempts, made))

    def launched(self, _: str) -> None:
        current = self.run.current
        if current and not current.is_settled and not self.run.verdict:
            self.jobs.setdefault(current.job_name, job(current.job_name, secondary="Starting"))

    def job_starts(self, _: str) -> None:
        current = self.run.current
        if current and current.job_name in self.jobs and not self.jobs[current.job_name].is_terminal:
            self.jobs[current.job_name] = job(current.job_name)

    def job_ends(self, how: str) -> None:
        current = self.run.current
        if current and current.job_name in self.jobs and not self.jobs[current.job_name].is_terminal:
            self.jobs[current.job_name] = ended(current.job_name, how)

    def model_registered(self, _: str) -> None:
        if self.run.status == RunStatus.EVALUATING and not self.run.verdict:
            self.run = self.run.with_(verdict="completed")

    def closes(self, _: str) -> None:
        if self.run.verdict:
            self.run = closed(self.run, self.now)


STEPS = (
    World.look,
    World.cancel,
    World.goes_back,
    World.execution_dies,
    World.execution_is_missing,
    World.refused,
    World.time_passes,
    World.checkpoint,
    World.queued,
    World.admitted,
    World.planned,
    World.launched,
    World.job_starts,
    World.job_ends,
    World.model_registered,
    World.closes,
)
OFTEN = [step for step in STEPS if step is not World.cancel] * 5  # a cancel ends a life; most should be longer
LIFE = st.lists(st.tuples(st.sampled_from([*OFTEN, World.cancel]), st.sampled_from(sorted(ENDS))), max_size=60)


def assert_nothing_was_undone(before: Run, after: Run) -> None:
    assert after.status == before.status or after.status in TRANSITIONS[before.status]
    taken_up = after.reopenings == before.reopenings + 1
    if before.is_final and not taken_up:
        assert after == before.with_(rollback_to=after.rollback_to, obeyed=after.obeyed)
    if before.verdict and not taken_up:
        assert after.verdict == before.verdict
    assert not taken_up or (before.is_final and after.lineage == before.lineage + 1)
    assert after.lineage - before.lineage in (0, 1)
    for old, new in zip(before.attempts, after.attempts, strict=False):
        assert new == old or not old.is_settled
    assert len(after.attempts) >= len(before.attempts)
    assert all(each.is_settled for each in after.attempts[:-1])


@settings(max_examples=300, deadline=None)
@given(LIFE)
def test_whatever_happens_only_listed_transitions_no_settled_attempt_changes_and_the_end_is_the_end(life):
    world = World()
    for step, how in life:
        before = world.run
        step(world, how)
        assert_nothing_was_undone(before, world.run)
        assert world.run.executions - world.run.reopenings <= MAX_EXECUTIONS
        assert billed_without_progress(history(world.run)) <= BILLED_ATTEMPTS_WITHOUT_PROGRESS
        assert Run.model_validate_json(world.run.model_dump_json()) == world.run


@settings(max_examples=150, deadline=None)
@given(LIFE, st.sampled_from(sorted(ENDS)))
def test_from_wherever_a_run_is_it_ends_when_its_events_come_at_last(life, how):
    world = World()
    for step, end in life:
        step(world, end)
    for _ in range(100):
        for step in (World.queued, World.admitted, World.planned, World.launched):
            step(world, how)
        for step in (World.look, World.job_ends, World.look):
            step(world, how)
        world.now += timedelta(minutes=30)
        for step in (World.model_registered, World.closes):
            step(world, how)
        if world.run.is_final:
            break
    assert world.run.status in FINAL


@pytest.mark.parametrize("how", sorted(ENDS))
def test_the_order_and_number_of_looks_at_one_job_do_not_matter(how):
    looks = [
        Facts(now=BEGAN, job=job("prod-1", secondary="Starting")),
        Facts(now=BEGAN, job=job("prod-1")),
        Facts(now=BEGAN, job=ended("prod-1", how), newest_step=4),
        Facts(now=BEGAN, job=ended("prod-1", how), newest_step=4),
    ]
    results = set()
    for order in permutations(looks):
        run = under_way()
        for facts in order:
            run = decide(run, facts).run
        results.add(run.model_dump_json())
    assert len(results) == 1


@pytest.mark.parametrize("how", ["completed", "stopped", "lost", "no capacity", "memory", "spot gone"])
def test_a_cancel_before_or_after_an_end_that_another_attempt_could_follow_stops_the_run(how):
    word = Facts(now=BEGAN, command=Command(verb="cancel", issued_at=BEGAN))
    end = Facts(now=BEGAN, job=ended("prod-1", how))
    for order in ((word, end), (end, word), (word, word, end, end, word)):
        run = under_way()
        for facts in order:
            run = decide(run, facts).run
        assert run.verdict == "stopped"


def under_way() -> Run:
    made = Attempt(attempt=1, job_name="prod-1", lineage=1, plan=PLAN, created_at=BEGAN, launched_at=BEGAN)
    return new_run(RUN_ID, SPEC, BEGAN).with_(status=RunStatus.TRAINING, attempts=(made,))


@pytest.mark.parametrize("how", sorted(ENDS))
def test_a_late_look_at_a_job_that_still_ran_reopens_nothing(how):
    settled = decide(under_way(), Facts(now=BEGAN, job=ended("prod-1", how))).run
    late = decide(settled, Facts(now=BEGAN + timedelta(hours=9), job=replace(job("prod-1")), logs_asked=True)).run
    assert late == settled
