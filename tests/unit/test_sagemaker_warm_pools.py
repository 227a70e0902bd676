"""Warm pools of the local SageMaker: how one stands by the record and the time, who takes it, and what it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from microtuning_local.sagemaker import jobs, rules, warm_pools
from microtuning_local.sagemaker.faults import Faults, FaultSpec
from microtuning_local.sagemaker.pool import Pool
from tests.unit.test_sagemaker_rules import a_request, resources

if TYPE_CHECKING:
    from pathlib import Path

ARN = "arn:aws:sagemaker:us-east-1:000000000000:training-job/x"
KEEPS = 600


def a_job(name: str = "first", *, keep: int | None = KEEPS, **changes: Any) -> jobs.Job:
    """One that trains since second 1000."""
    config = changes.pop("config", {})
    request = a_request(TrainingJobName=name, **resources(KeepAlivePeriodInSeconds=keep, **config)) | changes
    job = jobs.new_job(request, ARN, 1000.0)
    job.segments.append([1000.0, None])
    return job


def ended(job: jobs.Job, at: float = 1100.0, status: str = "Completed", reason: str | None = None) -> jobs.Job:
    job.failure_reason = reason
    jobs.moved(job, status, status, at)
    return job


def told(job: jobs.Job, at: float) -> dict[str, Any] | None:
    return jobs.description(job, at).get("WarmPoolStatus")


# -- how it stands -----------------------------------------------------------------------------------------------------


def test_a_job_that_asks_for_no_pool_is_told_of_none() -> None:
    assert told(ended(a_job(keep=None)), 1101) is None
    assert told(ended(a_job(keep=0)), 1101) is None


def test_a_pool_is_in_use_then_available_for_its_time_then_gone_and_its_seconds_are_told_at_the_end() -> None:
    job = a_job()
    assert told(job, 1050) == {"Status": "InUse"}
    ended(job)
    assert told(job, 1100) == told(job, 1699) == {"Status": "Available"}
    assert told(job, 1700) == told(job, 9999) == {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 600}


@pytest.mark.parametrize(
    ("status", "reason", "stands"),
    [
        ("Completed", None, "Available"),
        ("Stopped", None, "Available"),
        ("Failed", "AlgorithmError: , exit code: 137", "Available"),
        ("Failed", "ClientError: Data download failed", "Available"),
        ("Failed", "InternalServerError: We encountered an internal error.", "Terminated"),
    ],
)
def test_machines_are_kept_unless_something_may_be_wrong_with_them(status: str, reason: str, stands: str) -> None:
    pool = told(ended(a_job(), status=status, reason=reason), 1101)
    assert pool is not None and pool["Status"] == stands
    assert pool.get("ResourceRetainedBillableTimeInSeconds", 0) == 0


def test_a_job_that_never_had_a_machine_keeps_none() -> None:
    job = a_job()
    job.segments.clear()
    pool = told(ended(job, status="Stopped"), 1101)
    assert pool == {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 0}


def test_a_record_survives_a_restart_with_its_pool(tmp_path: Path) -> None:
    kept = jobs.Jobs(tmp_path)
    kept.add(ended(a_job()))
    again = jobs.Jobs(tmp_path)
    again.load()
    assert told(again.get("first"), 1101) == {"Status": "Available"}


# -- updates -----------------------------------------------------------------------------------------------------------


def test_an_update_to_0_ends_the_pool_and_a_second_one_is_refused() -> None:
    job = ended(a_job())
    warm_pools.update(job, 0, 1130.4)
    assert told(job, 1131) == {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 31}
    with pytest.raises(rules.Refusal, match="its status is Terminated"):
        warm_pools.update(job, 0, 1132)


def test_an_update_while_the_job_runs_counts_from_its_end() -> None:
    longer, none = a_job(), a_job()
    warm_pools.update(longer, 900, 1050)
    warm_pools.update(none, 0, 1050)
    assert told(ended(longer), 1999) == {"Status": "Available"}
    assert told(longer, 2000) == {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 900}
    assert told(ended(none), 1101) is None


def test_a_job_without_a_pool_gets_none_by_an_update() -> None:
    with pytest.raises(rules.Refusal, match="its status is None"):
        warm_pools.update(a_job(keep=None), 600, 1050)


# -- who takes it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"keep": None}, True),
        ({"Environment": {"A": "b"}, "HyperParameters": {"x": "y"}}, True),
        ({"EnableNetworkIsolation": False}, True),
        ({"EnableNetworkIsolation": True}, False),
        ({"EnableInterContainerTrafficEncryption": True}, False),
        ({"RoleArn": "arn:aws:iam::000000000000:role/another"}, False),
        ({"VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}}, False),
        ({"config": {"InstanceType": "ml.m5.xlarge"}}, False),
        ({"config": {"InstanceCount": 2}}, False),
        ({"config": {"VolumeSizeInGB": 31}}, False),
        ({"config": {"VolumeKmsKeyId": "key"}}, False),
        ({"EnableManagedSpotTraining": True, "keep": None}, False),
    ],
)
def test_a_job_takes_kept_machines_when_all_that_must_agree_does(changes: dict[str, Any], fits: bool) -> None:
    assert warm_pools.matches(a_job("second", **changes).request, a_job().request) is fits


def test_a_matching_job_takes_the_machines_and_the_first_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "now", lambda: 1130.0)
    store = jobs.Jobs(tmp_path)
    pool = Pool(1, Faults(), store)
    first, second, other = a_job(), a_job("second"), a_job("other", config={"VolumeSizeInGB": 31})
    for job in (first, second, other):
        store.add(job)
    assert (pool.take(first), pool.take_kept(second)) == ("ml.m5.large", None)
    ended(first)
    pool.leave(first, "ml.m5.large")
    assert (pool.take(other), pool.take_kept(other), pool.count_in_use()) == (None, None, 1)
    assert (pool.take_kept(second), pool.take_kept(a_job("third")), pool.count_in_use()) == ("ml.m5.large", None, 1)
    assert told(first, 1131) == {
        "Status": "Reused",
        "ResourceRetainedBillableTimeInSeconds": 30,
        "ReusedByJob": "second",
    }
    ended(second, 1200, "Failed", "InternalServerError: lost")
    pool.leave(second, "ml.m5.large")
    assert (pool.count_in_use(), pool.take(other)) == (0, "ml.m5.large")


def test_machines_are_free_once_their_time_is_over_or_their_pool_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1130.0
    monkeypatch.setattr(jobs, "now", lambda: now)
    pool = Pool(2, Faults(), jobs.Jobs(tmp_path))
    expires, updated = a_job(), a_job("second", keep=3600)
    for job in (expires, updated):
        pool.take(job)
        ended(job)
        pool.leave(job, "ml.m5.large")
    assert pool.count_in_use() == 2
    now = 1700.0
    assert pool.count_in_use() == 1
    warm_pools.update(updated, 0, now)
    assert (pool.count_in_use(), pool.in_use["ml.m5.large"], pool.keepers) == (0, 0, [])


def test_more_kept_machines_than_the_quota_are_refused_by_its_name_and_a_match_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "now", lambda: 1130.0)
    store = jobs.Jobs(tmp_path)
    pool = Pool(4, Faults(FaultSpec(warm_pool_quota={"ml.m5.large": 1, "ml.g5.xlarge": 0})), store)
    none = pool.warm_pool_refusal(a_job(config={"InstanceType": "ml.g5.xlarge"}))
    assert none is not None and none.code == "ResourceLimitExceeded"
    assert "'ml.g5.xlarge for training warm pool usage' is 0 Instances" in none.message
    assert pool.warm_pool_refusal(a_job(keep=None, config={"InstanceType": "ml.g5.xlarge"})) is None
    first = a_job()
    store.add(first)
    assert pool.warm_pool_refusal(first) is None
    pool.take(first)
    assert "utilization of 1 Instances" in str(pool.warm_pool_refusal(a_job("second")))
    ended(first)
    assert pool.warm_pool_refusal(a_job("second")) is None
