"""Fast runs on the local cloud: the second attempt takes the machine of the first, and nothing is kept for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.warm_pools import KEEP_ALIVE_S
from microtuning_local import cloud as local

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.conftest import StageUnderTest

pytestmark = pytest.mark.cloud

FAST = {"recovery": "fast", "spot": "auto"}


def pool_of(stage: StageUnderTest, job_name: str) -> dict[str, Any]:
    told = stage.client("sagemaker").describe_training_job(TrainingJobName=job_name)
    pool: dict[str, Any] = told.get("WarmPoolStatus", {})
    return pool


def test_a_fast_run_comes_back_on_the_machine_it_had_and_gives_it_back_when_it_is_over(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit("platform_once", compute=FAST))
    assert [each.outcome for each in run.attempts] == ["failed", "completed"]
    assert {(each.plan.spot, each.plan.keep_alive_s) for each in run.attempts} == {(False, KEEP_ALIVE_S)}
    first, second = (each.job_name for each in run.attempts)
    taken = pool_of(stage, first)
    assert (taken["Status"], taken["ReusedByJob"]) == ("Reused", second)
    stage.until(lambda: pool_of(stage, second)["Status"] == "Terminated", "the machine was not given back")
    assert pool_of(stage, second)["ResourceRetainedBillableTimeInSeconds"] < KEEP_ALIVE_S
    local.tick()  # the end of a pool is no event: what it cost is asked for by the reconciler
    assert stage.ended_and_paid(run.run_id).status == "completed"


def test_a_fast_run_that_is_cancelled_gives_its_machine_back(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang", compute=FAST)
    job = stage.training(run_id).attempts[0].job_name
    stage.cancel(run_id)
    assert stage.ended(run_id).status == "stopped"
    stage.until(lambda: pool_of(stage, job)["Status"] == "Terminated", "the machine was not given back")


def test_where_no_machine_may_be_kept_a_fast_run_trains_all_the_same_and_says_what_to_request(
    stage: StageUnderTest, faults: Callable[[dict[str, Any]], Any]
) -> None:
    faults({"warm_pool_quota": {"ml.m5.large": 0}})
    run = stage.ended(stage.submit("platform_once", compute=FAST))
    assert [each.outcome for each in run.attempts] == ["failed", "completed"]
    assert {each.plan.keep_alive_s for each in run.attempts} == {0}
    assert {each.failure.failure_class for each in run.attempts if each.failure} == {"platform"}
    said = stage.events(run.run_id, "no_warm_pool")
    assert len(said) == 2 and all("'ml.m5.large for training warm pool usage'" in each for each in said)
