"""Machines kept between the attempts of a fast run: asked for, taken again, refused, and given back."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from microtuning_core.aws.training_jobs import Refused, TrainingJobs
from microtuning_core.domain.failures import classify_refusal
from microtuning_core.domain.job import job_facts
from microtuning_core.domain.names import parse_job_name
from microtuning_core.domain.run import Attempt, AttemptPlan, Run
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.domain.warm_pools import (
    KEEP_ALIVE_S,
    fits_pool,
    is_about_pool,
    keep_alive_s,
    kept_usd,
    pools_left,
    recovery_usd,
)
from microtuning_core.usecases.launch import job_request
from tests.unit import small_cloud
from tests.unit.records import RUN_ID, a_plan
from tests.unit.small_cloud import BEGAN, Jobs, SmallCloud

NO_POOLS = (
    "The account-level service limit 'ml.g5.xlarge for training warm pool usage' is 0 Instances, with current "
    "utilization of 0 Instances and a request delta of 1 Instances."
)
NO_MACHINES = NO_POOLS.replace("training warm pool usage", "training job usage")
# What must agree for a job to take kept machines (docs/scale.md), by its path in the request.
MATCHING = ("RoleArn", "VpcConfig", "EnableInterContainerTrafficEncryption", "EnableNetworkIsolation")
MATCHING_RESOURCES = ("InstanceType", "InstanceCount", "VolumeSizeInGB", "VolumeKmsKeyId")


def shape(request: dict[str, Any]) -> list[Any]:
    resources = request["ResourceConfig"]
    return [request.get(each) for each in MATCHING] + [resources.get(each) for each in MATCHING_RESOURCES]


class KeepingJobs(Jobs):
    """Training jobs whose machines are kept as the service keeps them; `may_keep`: the account's quota is not 0."""

    def __init__(self, cloud: SmallCloud, *, may_keep: bool = True) -> None:
        super().__init__(cloud)
        self.may_keep = may_keep
        self.requests: list[dict[str, Any]] = []
        self.given_back: list[str] = []

    def create(self, request: dict[str, Any]) -> None:
        self.requests.append(request)
        keeps = "KeepAlivePeriodInSeconds" in request["ResourceConfig"]
        if keeps and not self.may_keep:
            raise Refused(classify_refusal("ResourceLimitExceeded", NO_POOLS))
        super().create(request)
        for name in [name for name, job in self.made.items() if job.warm_pool_status == "Available"]:
            if shape(self.request_of(name)) == shape(request):
                self.made[name] = replace(self.made[name], warm_pool_status="Reused", warm_pool_s=7)
        if keeps:
            name = request["TrainingJobName"]
            self.made[name] = replace(self.made[name], warm_pool_status="InUse")

    def end(self, name: str, how: str) -> None:
        super().end(name, how)
        job = self.made[name]
        if job.warm_pool_status:
            self.made[name] = replace(job, warm_pool_status="Terminated" if how == "lost" else "Available")

    def end_pool(self, job_name: str) -> None:
        self.given_back.append(job_name)
        self.made[job_name] = replace(self.made[job_name], warm_pool_status="Terminated", warm_pool_s=1)

    def request_of(self, name: str) -> dict[str, Any]:
        return next(each for each in self.requests if each["TrainingJobName"] == name)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a stage with one fast run whose first attempt waits for its job."""
    document = small_cloud.spec().model_dump(mode="json")
    document["compute"] |= {"recovery": "fast", "fallbacks": ["ml.p4d.24xlarge"]}
    monkeypatch.setattr(small_cloud, "spec", lambda: parse_spec(document))

    def make(*, may_keep: bool = True) -> SmallCloud:
        cloud = SmallCloud(run_count=1, quota=1)
        cloud.jobs = cloud.services.jobs = KeepingJobs(cloud, may_keep=may_keep)
        cloud.deliver_all(rounds=3)
        return cloud

    return make


def the_run(cloud: SmallCloud) -> Run:
    (run,) = cloud.runs.records.values()
    return run


def train(cloud: SmallCloud, ending: str) -> str:
    """The newest job trains for a minute and ends like that; the name of the job."""
    name = the_run(cloud).attempts[-1].job_name
    cloud.jobs.get_a_machine(name)
    cloud.now += timedelta(minutes=1)
    cloud.jobs.end(name, ending)
    cloud.deliver_all(rounds=6)
    return name


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_only_fast_runs_keep_machines_and_never_those_of_spot():
    kept = {(recovery, spot): keep_alive_s(recovery, spot=spot) for recovery in ("fast", "cheap") for spot in (0, 1)}
    assert kept == {("fast", 0): KEEP_ALIVE_S, ("fast", 1): 0, ("cheap", 0): 0, ("cheap", 1): 0}


def test_a_record_of_before_warm_pools_reads_as_one_without():
    document = a_plan(keep_alive_s=600).model_dump(mode="json")
    del document["keep_alive_s"]
    assert AttemptPlan.model_validate(document).keep_alive_s == 0


def test_the_next_attempt_asks_for_the_very_machines_that_are_kept(fast):
    cloud = fast()
    first = train(cloud, "platform")
    second = the_run(cloud).attempts[-1].job_name
    asked = [cloud.jobs.request_of(each) for each in (first, second)]
    assert second != first and shape(asked[0]) == shape(asked[1])
    assert [each["ResourceConfig"]["KeepAlivePeriodInSeconds"] for each in asked] == [KEEP_ALIVE_S] * 2
    assert not any(each["EnableManagedSpotTraining"] for each in asked)
    assert cloud.jobs.made[first].warm_pool_status == "Reused"
    assert cloud.jobs.given_back == []


def test_a_cheap_run_says_nothing_of_keeping(fast):
    run = the_run(fast())
    cheap = run.attempts[0].model_copy(update={"plan": a_plan()})
    settings = small_cloud.StageSettings(small_cloud.NAMES, "image:1", 1)
    assert "KeepAlivePeriodInSeconds" not in job_request(settings, run, cheap)["ResourceConfig"]


# -- an account that may keep none -------------------------------------------------------------------------------------


def test_a_refused_pool_is_told_from_a_refused_job():
    assert is_about_pool(classify_refusal("ResourceLimitExceeded", NO_POOLS))
    assert not is_about_pool(classify_refusal("ResourceLimitExceeded", NO_MACHINES))
    assert not is_about_pool(classify_refusal("ValidationException", NO_POOLS))


def test_where_the_account_may_keep_no_machines_the_same_attempt_starts_without_and_says_what_to_request(
    fast, monkeypatch
):
    notes: list[tuple[str, str]] = []
    monkeypatch.setattr(small_cloud.Runs, "note", lambda _, _run, kind, message, **_more: notes.append((kind, message)))
    cloud = fast(may_keep=False)
    (attempt,) = the_run(cloud).attempts
    with_pool, without = cloud.jobs.requests
    assert with_pool["TrainingJobName"] == without["TrainingJobName"] == attempt.job_name
    assert (attempt.plan.keep_alive_s, attempt.is_settled, attempt.plan.spot) == (0, False, False)
    assert "KeepAlivePeriodInSeconds" not in without["ResourceConfig"]
    (said,) = [message for kind, message in notes if kind == "no_warm_pool"]
    assert "'ml.g5.xlarge for training warm pool usage'" in said and "Service Quotas" in said
    train(cloud, "completed")
    assert the_run(cloud).status == "completed"
    assert cloud.jobs.given_back == []


def test_a_run_that_is_cancelled_while_its_pool_is_refused_gets_no_job(fast):
    cloud = SmallCloud(run_count=1, quota=1)
    cloud.jobs = cloud.services.jobs = KeepingJobs(cloud, may_keep=False)
    run_id, refused = the_run(cloud).run_id, KeepingJobs.create

    def cancelled_meanwhile(request: dict[str, Any]) -> None:
        if not cloud.jobs.requests:
            cloud.runs.update(run_id, lambda run: run.with_(stop_requested="by its user"))
        refused(cloud.jobs, request)

    cloud.jobs.create = cancelled_meanwhile
    cloud.deliver_all(rounds=6)
    assert len(cloud.jobs.requests) == 1 and cloud.jobs.made == {}
    assert the_run(cloud).status == "stopped"


# -- given back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["completed", "user"])
def test_a_run_that_is_over_gives_its_machines_back_once(fast, ending):
    cloud = fast()
    train(cloud, "platform")
    last = train(cloud, ending)
    assert the_run(cloud).is_final
    cloud.tick()
    cloud.deliver_all(rounds=3)
    assert cloud.jobs.given_back == [last]


def test_a_pool_that_nobody_lived_to_give_back_is_given_back_by_the_next_tick(fast, monkeypatch):
    cloud = fast()
    with monkeypatch.context() as lost:
        lost.setattr(cloud.jobs, "end_pool", lambda _: None)
        last = train(cloud, "completed")
    assert the_run(cloud).is_final and cloud.jobs.made[last].keeps_pool
    for _ in range(2):
        cloud.tick()
    assert cloud.jobs.given_back == [last]
    assert the_run(cloud).costs_are_final


def test_a_machine_that_failed_is_not_kept_and_the_next_attempt_begins_on_a_cold_one(fast):
    cloud = fast()
    lost = train(cloud, "lost")
    assert cloud.jobs.made[lost].warm_pool_status == "Terminated"
    last = train(cloud, "completed")
    assert cloud.jobs.given_back == [last]


def test_machines_that_the_next_attempt_cannot_use_are_given_back_when_it_starts(fast):
    cloud = fast()
    too_small = train(cloud, "memory")  # what follows needs a type with more of it
    assert [each.plan.instance_type for each in the_run(cloud).attempts] == ["ml.g5.xlarge", "ml.p4d.24xlarge"]
    assert cloud.jobs.given_back == [too_small]


def test_only_attempts_that_may_keep_something_are_asked_about():
    def attempt(number: int, **facts: Any) -> Attempt:
        given = {"plan": a_plan(keep_alive_s=600), "launched_at": BEGAN, **facts}
        return Attempt(attempt=number, job_name=f"prod-{RUN_ID}-a00{number}", lineage=1, created_at=BEGAN, **given)

    now = BEGAN + timedelta(hours=1)
    attempts = [
        attempt(1, ended_at=BEGAN),  # long over
        attempt(2, plan=a_plan()),
        attempt(3, launched_at=None),
        attempt(4, ended_at=now - timedelta(minutes=5)),
        attempt(5),  # still trains
    ]
    assert [each.attempt for each in pools_left(attempts, now)] == [5, 4]


def test_a_pool_is_of_one_type_and_number_and_never_for_spot():
    pool = a_plan(keep_alive_s=600)
    assert fits_pool(a_plan(), pool)
    others = [{"spot": True}, {"count": 2}, {"instance_type": "ml.g6.xlarge"}]
    assert not any(fits_pool(a_plan(**each), pool) for each in others)


def sagemaker() -> Any:
    return boto3.client("sagemaker", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")


@pytest.mark.parametrize(
    ("code", "message"),
    [("ResourceNotFound", "gone"), ("ValidationException", "The warm pool is no longer available."), (None, "")],
)
def test_giving_back_what_is_gone_already_is_success(code, message):
    client = sagemaker()
    with Stubber(client) as stub:
        asked = {"TrainingJobName": "j", "ResourceConfig": {"KeepAlivePeriodInSeconds": 0}}
        if code:
            stub.add_client_error("update_training_job", code, message, expected_params=asked)
        else:
            stub.add_response("update_training_job", {"TrainingJobArn": "arn:aws:sagemaker:::job/j"}, asked)
        TrainingJobs(client).end_pool("j")
        stub.assert_no_pending_responses()


def test_a_role_that_may_not_end_a_pool_is_no_success():
    client = sagemaker()
    with Stubber(client) as stub, pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
        stub.add_client_error("update_training_job", "AccessDeniedException", "AccessDenied")
        TrainingJobs(client).end_pool("j")


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_described_job_says_what_became_of_its_machines():
    answer = {"TrainingJobName": "j", "TrainingJobStatus": "Failed", "CreationTime": BEGAN}
    pool = {"Status": "Reused", "ResourceRetainedBillableTimeInSeconds": 12, "ReusedByJob": "k"}
    reused, kept = (job_facts(answer | {"WarmPoolStatus": each}) for each in (pool, {"Status": "Available"}))
    assert (reused.warm_pool_status, reused.warm_pool_s, reused.keeps_pool) == ("Reused", 12, False)
    assert (kept.warm_pool_s, kept.keeps_pool, job_facts(answer).keeps_pool) == (None, True, False)


def test_a_recovery_costs_at_most_the_machines_for_as_long_as_they_are_kept():
    assert recovery_usd(Decimal("1.408"), 1).quantize(Decimal("0.0001")) == Decimal("0.2347")
    assert recovery_usd(Decimal("1.408"), 2, 0) == 0


def test_of_a_budget_the_kept_time_counts_until_the_next_attempt_began_and_never_longer_than_it_was_asked_for():
    plan = a_plan(keep_alive_s=600, price_usd_per_hour=Decimal(36))  # a cent a second

    def attempt(number: int, **facts: Any) -> Attempt:
        name = parse_job_name(f"prod-{RUN_ID}-a{number:03d}")
        return Attempt(attempt=number, job_name=str(name), lineage=1, plan=plan, created_at=BEGAN, **facts)

    end, now = BEGAN + timedelta(minutes=1), BEGAN + timedelta(hours=2)
    first = attempt(1, ended_at=end, billed_s=60)
    second = attempt(2, started_at=end + timedelta(seconds=20), ended_at=end + timedelta(minutes=5), billed_s=100)
    never = attempt(3, ended_at=now)
    assert kept_usd([], now) == 0
    assert kept_usd([first, second, never], now) == Decimal("0.20") + Decimal(6)
    assert kept_usd([first], end + timedelta(seconds=5)) == Decimal("0.05")
