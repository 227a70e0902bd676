"""Limits of tenants on the running cloud: races for slots and GPUs, a queue that is full, and who is told of it."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.quota import Holding, Limits
from microtuning_core.domain.tenants import TenantLimits
from microtuning_local import cloud as local
from microtuning_sdk.cli import main
from tests.integration.conftest import StageUnderTest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from microtuning_core.aws.admissions import AdmissionStore

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def run_id(number: int, tenant: str = "acme") -> str:
    return f"{tenant}-run-{number:012d}"


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each of them gave; all begin together."""
    gate, results = threading.Barrier(len(calls)), list[Any]()

    def go(call: Callable[[], Any]) -> None:
        gate.wait()
        results.append(call())

    threads = [threading.Thread(target=go, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# -- slots and GPUs, in a table of their own ---------------------------------------------------------------------------


def test_c63_twenty_racing_starts_of_a_tenant_that_may_run_five_start_five(own_admissions: AdmissionStore) -> None:
    limits = Limits(20, per_tenant={"acme": 5})

    def start(number: int) -> list[str]:
        own_admissions.wait(run_id(number), "acme", NOW)
        return own_admissions.grant(limits, NOW).run_ids

    given = at_once(*(lambda number=number: start(number) for number in range(20)))  # type: ignore[misc]
    admitted = [each for some in given for each in some]
    assert (len(admitted), len(set(admitted))) == (5, 5)
    assert set(own_admissions.slots().held) == set(admitted)
    own_admissions.wait(admitted[0], "acme", NOW)  # delivered again: still five, and not counted twice
    assert own_admissions.grant(limits, NOW).run_ids == []
    assert len(own_admissions.slots().held) == 5


def test_racing_runs_are_given_slots_up_to_their_tenants_gpus(own_admissions: AdmissionStore) -> None:
    limits = Limits(20, gpus={"acme": {"A10G": 8}})
    for number in range(6):
        own_admissions.wait(run_id(number), "acme", NOW, gpus={"A10G": 4})
        own_admissions.wait(run_id(number, "beta"), "beta", NOW, gpus={"A10G": 4})
    given = at_once(*[lambda: own_admissions.grant(limits, NOW).run_ids] * 8)
    tenants = [each.split("-")[0] for some in given for each in some]
    assert (tenants.count("acme"), tenants.count("beta")) == (2, 6)
    held = own_admissions.slots().held
    assert held[run_id(0)] == Holding("acme", {"A10G": 4})


def test_racing_claims_of_another_plan_never_pass_the_limit(own_admissions: AdmissionStore) -> None:
    limits = Limits(20, gpus={"acme": {"A10G": 4, "L4": 10}})
    for number in range(10):
        own_admissions.wait(run_id(number), "acme", NOW, gpus={"L4": 1})
    assert len(own_admissions.grant(limits, NOW).run_ids) == 10
    claims = [lambda number=number: own_admissions.claim(run_id(number), {"A10G": 1}, limits) for number in range(10)]  # type: ignore[misc]
    assert sorted(at_once(*claims)) == [False] * 6 + [True] * 4
    families = [next(iter(each.gpus)) for each in own_admissions.slots().held.values()]
    assert (families.count("A10G"), families.count("L4")) == (4, 6)
    winner = next(run for run, each in own_admissions.slots().held.items() if "A10G" in each.gpus)
    assert own_admissions.claim(winner, {"A10G": 1}, limits)  # the launch, delivered again
    own_admissions.release(winner)
    assert own_admissions.claim(winner, {"A10G": 4}, limits)  # it has no slot any more, and claims nothing
    assert winner not in own_admissions.slots().held


def test_changes_of_limits_add_up_and_are_taken_back(own_admissions: AdmissionStore) -> None:
    own_admissions.change_limits("acme", TenantLimits(max_running_runs=3))
    own_admissions.change_limits("acme", TenantLimits(weight=2, budget_usd_per_day=None))
    assert own_admissions.limit_changes()["acme"].model_fields_set == {
        "max_running_runs",
        "weight",
        "budget_usd_per_day",
    }
    own_admissions.change_limits("acme", None)
    assert own_admissions.limit_changes() == {}


# -- the stage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def beta(stage: StageUnderTest) -> Iterator[StageUnderTest]:
    """A tenant that may start nothing and let one run wait, until the test is over."""
    admissions = stage.services.admissions
    admissions.change_limits("beta", TenantLimits(max_running_runs=0, max_waiting_runs=1))
    yield StageUnderTest(stage.cloud, tenant="beta")
    admissions.change_limits("beta", None)
    local.tick()


def test_a_run_waits_and_says_its_place_and_one_beyond_the_queue_is_refused(beta: StageUnderTest) -> None:
    first = beta.submit()
    standing = beta.until(
        lambda: (found := beta.services.admissions.standing("beta")) and found.places.get(first) and found,
        "the run has no place in the queue",
    )
    assert (standing.places, standing.running, standing.limits.max_waiting_runs) == ({first: 1}, 0, 1)
    refused = beta.receipt(*beta.upload(beta.spec()))
    (error,) = refused["errors"]
    assert error["field"] == "tenant"
    assert error["message"].startswith("beta has 1 runs in the queue, and 1 may wait")
    beta.services.admissions.change_limits("beta", TenantLimits(max_running_runs=1))
    local.tick()
    assert beta.ended(first).status == "completed"
    assert beta.services.admissions.standing("beta").places == {}  # type: ignore[union-attr]


def test_a_type_with_more_gpus_than_the_tenant_may_use_is_refused_in_the_receipt(stage: StageUnderTest) -> None:
    own = StageUnderTest(stage.cloud, tenant="acme")
    admissions = stage.services.admissions
    admissions.change_limits("acme", TenantLimits(gpus={"A10G": 2}))
    try:
        refused = own.receipt(*own.upload(own.spec(compute={"instance": "ml.g5.12xlarge", "spot": False})))
    finally:
        admissions.change_limits("acme", None)
    (error,) = refused["errors"]
    assert error["field"].startswith("compute")
    assert "may use 2 A10G GPUs at a time, and 1 x ml.g5.12xlarge has 4" in error["message"]


# -- microtuning tenants -----------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tenants_are_listed_shown_and_limited_from_the_command_line(
    beta: StageUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    run = beta.submit()
    local.tick()
    shown = told(capsys, "tenants", "show", "beta")
    assert (shown["running"], shown["waiting"], shown["places"]) == (0, 1, {run: 1})
    assert shown["limits"]["max_running_runs"] == 0
    assert told(capsys, "runs", "show", run)["place"] == 1
    (row,) = [each for each in told(capsys, "runs", "list", "--tenant", "beta")["runs"] if each["run_id"] == run]
    assert row["place"] == 1
    names = [each["tenant"] for each in told(capsys, "tenants", "list")["tenants"]]
    assert {"default", "acme", "beta"} <= set(names)  # whoever is declared, before any run of it
    assert told(capsys, "tenants", "limit", "beta", "--max-running-runs", "none", "--gpus", "H100=8")["changed"] == {
        "max_running_runs": None, "max_waiting_runs": 1, "gpus": {"H100": 8},
    }  # fmt: skip
    local.tick()
    assert beta.ended(run).status == "completed"
    assert told(capsys, "runs", "show", run)["place"] is None
    assert told(capsys, "tenants", "limit", "beta", "--reset")["changed"] == {}
    local.tick()
    after = told(capsys, "tenants", "show", "beta")
    assert (after["limits"]["max_running_runs"], after["limits"]["weight"], after["places"]) == (None, 2, {})
    assert float(after["month_usd"]) >= float(after["day_usd"]) > 0
    for verb in (["list"], ["show", "beta"]):
        assert main(["tenants", *verb]) == 0
    assert "spent: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["beta"], "at least one of the options"),
        (["beta", "--weight", "0"], "--weight"),
        (["beta", "--max-running-runs", "many"], "--max-running-runs"),
        (["beta", "--budget-usd-per-day", "-1"], "--budget-usd-per-day"),
        (["nobodyelse", "--weight", "2"], "This stage has no tenant 'nobodyelse'"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_in_words(
    arguments: list[str], said: str, stage: StageUnderTest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tenants", "limit", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert stage.services.admissions.limit_changes() == {}
