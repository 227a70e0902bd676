"""Budgets in a whole stage: what is over its budget saves and stops, what waits is told why, a raise lets them go on."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from microtuning_core.domain.budget import STOPS, WARNINGS, run_usd
from microtuning_core.domain.cost import shown
from microtuning_core.domain.layout import answer_key
from microtuning_core.domain.run import Run, RunStatus
from microtuning_core.domain.tenants import StageTenants, Tenant, TenantLimits
from tests.unit.small_cloud import SmallCloud

S = RunStatus


def trains(cloud: SmallCloud, *numbers: int) -> None:
    """Those runs have their machines, of 1.408 USD an hour, and a checkpoint."""
    cloud.deliver_all(rounds=4)
    for number in numbers:
        job = the_run(cloud, number).attempts[-1].job_name
        cloud.jobs.get_a_machine(job)
        cloud.jobs.save(job, 4)
    cloud.deliver_all(rounds=2)


def the_run(cloud: SmallCloud, number: int = 0) -> Run:
    return list(cloud.runs.records.values())[number]


def stops(cloud: SmallCloud, number: int = 0) -> Run:
    """The job of the run leaves, as it was asked to."""
    name = the_run(cloud, number).attempts[-1].job_name
    assert cloud.jobs.made[name].status == "Stopping"
    cloud.jobs.save(name, 7)
    cloud.jobs.end(name, "stopped")
    cloud.deliver_all(rounds=4)
    return the_run(cloud, number)


def completes(cloud: SmallCloud, number: int = 0) -> Run:
    trains(cloud, number)
    cloud.jobs.end(the_run(cloud, number).attempts[-1].job_name, "completed")
    cloud.deliver_all(rounds=4)
    return the_run(cloud, number)


def gives(cloud: SmallCloud, usd: str, number: int = 0) -> dict[str, Any]:
    """Another budget; the answer to it."""
    run_id, command = the_run(cloud, number).run_id, len(cloud.objects.bodies)
    cloud.command(run_id, command, verb="budget", usd=usd)
    cloud.deliver(cloud.messages[-1])
    answer: dict[str, Any] = json.loads(cloud.objects.bodies[answer_key(run_id, f"c{command}")])
    return answer


# -- a run's own


@pytest.mark.parametrize("how", ["a tick", "an event"])
def test_a_run_over_its_budget_is_stopped_by_whoever_looks_at_it_and_goes_on_after_a_raise(how):
    cloud = SmallCloud(1, 1)
    trains(cloud, 0)
    gives(cloud, "1.5")
    cloud.now += timedelta(minutes=55)
    cloud.tick()
    assert (cloud.counts[WARNINGS], cloud.counts[STOPS], the_run(cloud).stop_requested) == (1, 0, None)
    cloud.now += timedelta(minutes=10)
    if how == "a tick":
        cloud.tick()
    else:
        cloud.send("training-events", job=the_run(cloud).attempts[0].job_name)
        cloud.deliver(cloud.messages[-1])
    assert (cloud.counts[WARNINGS], cloud.counts[STOPS]) == (1, 1)
    over = stops(cloud)
    assert (over.status, over.attempts[0].checkpoint_step, cloud.admissions.held) == (S.STOPPED, 7, {})
    assert over.reason.startswith("budget: it has spent 1.5253 USD at most, of 1.5000")
    too_little = gives(cloud, "1.52")
    (error,) = too_little["errors"]
    spent = shown(run_usd(over, cloud.now))
    assert error == {
        "field": "usd",
        "line": None,
        "message": f"is more than what the run has spent: {spent} USD at most",
    }
    assert the_run(cloud) == over
    assert gives(cloud, "10")["budget_usd"] == "10"
    ended = completes(cloud)
    assert (ended.status, ended.lineage, ended.reopenings, len(ended.attempts)) == (S.COMPLETED, 1, 1, 2)


def test_a_budget_that_is_lowered_below_what_was_spent_acts_at_once():
    cloud = SmallCloud(1, 1)
    trains(cloud, 0)
    cloud.now += timedelta(minutes=1)
    gives(cloud, "0.001")
    assert stops(cloud).status == S.STOPPED


def test_an_attempt_that_the_budget_does_not_buy_stops_the_run_and_does_not_fail_it():
    cloud = SmallCloud(1, 1)
    trains(cloud, 0)
    gives(cloud, "0.3")
    cloud.now += timedelta(minutes=8)
    cloud.jobs.end(the_run(cloud).attempts[0].job_name, "lost")
    cloud.deliver_all(rounds=4)
    run = the_run(cloud)
    assert (run.status, len(run.attempts), run.reason.startswith("budget: The cheapest plan costs")) == (
        S.STOPPED,
        1,
        True,
    )
    gives(cloud, "3")
    assert completes(cloud).status == S.COMPLETED


def test_a_raise_that_comes_while_the_job_is_stopping_lets_the_run_go_on_once_it_has_stopped():
    cloud = SmallCloud(1, 1)
    trains(cloud, 0)
    cloud.now += timedelta(minutes=1)
    gives(cloud, "0.001")
    gives(cloud, "5")
    assert stops(cloud).reopenings == 1
    assert completes(cloud).status == S.COMPLETED


def test_a_command_without_an_amount_is_refused_by_its_field():
    cloud = SmallCloud(1, 1)
    trains(cloud, 0)
    cloud.command(the_run(cloud).run_id, 1, verb="budget")
    cloud.deliver(cloud.messages[-1])
    (error,) = json.loads(cloud.objects.bodies[answer_key(the_run(cloud).run_id, "c1")])["errors"]
    assert error["field"] == "usd"


# -- a tenant's


def two_tenants(**budgets: Decimal) -> SmallCloud:
    """Runs 0, 2 of acme and 1, 3 of beta; three of them run."""
    cloud = SmallCloud(4, 3, StageTenants(tenants={"acme": Tenant(**budgets), "beta": Tenant()}))
    trains(cloud, 0, 1, 2)
    assert [run.status for run in cloud.runs.records.values()] == [S.TRAINING, S.TRAINING, S.TRAINING, S.QUEUED]
    return cloud


def test_all_runs_of_a_tenant_are_stopped_once_its_budget_of_the_day_is_used_up_and_nobody_elses():
    cloud = two_tenants(budget_usd_per_day=Decimal(2))
    cloud.now += timedelta(minutes=35)
    cloud.tick()
    assert (cloud.counts[WARNINGS], cloud.counts[STOPS]) == (1, 0)  # 2 x 0.82
    cloud.tick()
    cloud.now += timedelta(minutes=8)
    cloud.tick()
    cloud.tick()
    assert (cloud.counts[WARNINGS], cloud.counts[STOPS]) == (1, 2)
    for number in (0, 2):
        run = stops(cloud, number)
        assert (run.status, run.attempts[0].checkpoint_step) == (S.STOPPED, 7)
        assert run.reason == "budget: tenant acme has spent 2.0181 USD at most in 2026-01-02 (UTC), of 2.0000"
    assert [the_run(cloud, number).stop_requested for number in (1, 3)] == [None, None]
    assert the_run(cloud, 3).status == S.TRAINING  # it got a slot that became free


def test_a_run_of_a_tenant_without_budget_waits_says_why_and_goes_on_the_next_day():
    cloud = two_tenants(budget_usd_per_day=Decimal(2))
    cloud.now += timedelta(minutes=60)
    cloud.tick()
    for number in (0, 2):
        stops(cloud, number)
        gives(cloud, "50", number)
    cloud.deliver_all(rounds=4)
    cloud.tick()
    for number in (0, 2):
        run = the_run(cloud, number)
        assert (run.status, run.reason.startswith("budget: tenant acme has spent")) == (S.QUEUED, True)
    cloud.now += timedelta(hours=24)
    cloud.tick()
    assert the_run(cloud, 0).reason is None
    assert completes(cloud, 0).status == S.COMPLETED


def test_a_month_is_not_over_with_the_day_and_a_raised_limit_lets_its_runs_in():
    cloud = two_tenants(budget_usd_per_month=Decimal(2))
    cloud.now += timedelta(minutes=60)
    cloud.tick()
    for number in (0, 2):
        stops(cloud, number)
    gives(cloud, "50", 0)
    cloud.deliver_all(rounds=4)
    cloud.now += timedelta(hours=48)
    cloud.tick()
    assert the_run(cloud, 0).status == S.QUEUED
    cloud.admissions.changes["acme"] = TenantLimits(budget_usd_per_month=Decimal(50))
    cloud.tick()
    assert completes(cloud, 0).status == S.COMPLETED
