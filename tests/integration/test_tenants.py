"""Tenants are kept apart on the running cloud: real calls, with the credentials of the tenants' own roles.

The emulator enforces the template's own policies for S3 and logs. What it cannot judge (leading keys, KMS, SageMaker) is
judged in tests/infrastructure/test_tenants.py by the same policies.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError

from microtuning_core.domain.names import TRAINING_LOG_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.conftest import StageUnderTest

TENANTS = ("default", "acme", "beta")  # infrastructure/stages/local.yaml
DENIED = ("AccessDenied", "AccessDeniedException")


class Actor:
    """Somebody with a role's credentials, as STS gave them."""

    def __init__(self, stage: StageUnderTest, role_arn: str) -> None:
        given = stage.client("sts").assume_role(RoleArn=role_arn, RoleSessionName="tests")["Credentials"]
        self._session = boto3.Session(
            aws_access_key_id=given["AccessKeyId"],
            aws_secret_access_key=given["SecretAccessKey"],
            aws_session_token=given["SessionToken"],
            region_name=stage.names.region,
        )
        self._url = stage.cloud.endpoint.endpoint_url
        self.bucket = stage.names.bucket

    def client(self, service: str) -> Any:
        return self._session.client(service, endpoint_url=self._url)

    def put(self, key: str) -> Any:
        return self.client("s3").put_object(Bucket=self.bucket, Key=key, Body=b"x")

    def get(self, key: str) -> Any:
        return self.client("s3").get_object(Bucket=self.bucket, Key=key)

    def delete(self, key: str) -> Any:
        return self.client("s3").delete_object(Bucket=self.bucket, Key=key)

    def list(self, prefix: str) -> Any:
        return self.client("s3").list_objects_v2(Bucket=self.bucket, Prefix=prefix)


def may(call: Callable[[], Any]) -> bool:
    """Whether it was allowed; any other refusal is an error of the test."""
    try:
        call()
    except ClientError as error:
        if error.response["Error"]["Code"] not in DENIED:
            raise
        return False
    return True


@pytest.fixture(scope="module")
def users(stage: StageUnderTest) -> dict[str, Actor]:
    return {tenant: Actor(stage, stage.names.user_role_arn(tenant)) for tenant in TENANTS}


@pytest.fixture(scope="module")
def jobs(stage: StageUnderTest) -> dict[str, Actor]:
    return {tenant: Actor(stage, stage.names.job_role_arn(tenant)) for tenant in TENANTS}


@pytest.fixture(scope="module", autouse=True)
def objects(stage: StageUnderTest) -> None:
    """Something of every tenant's to reach for, in every folder; no spec and no command, which would start something."""
    for tenant in (*TENANTS, "nobody"):
        for key in ("datasets/d/x", "receipts/s.yaml.json", "models/g/v0001.json", "runs/r/run.json",
                    "runs/r/checkpoints/l01/x", "runs/r/output/x"):  # fmt: skip
            stage.put(f"tenants/{tenant}/{key}", "x")


@pytest.mark.parametrize(("actor", "owner"), list(product(TENANTS, TENANTS)))
def test_what_a_user_may_touch_of_whom(actor: str, owner: str, users: dict[str, Actor]) -> None:
    user, at = users[actor], f"tenants/{owner}/"
    reads = ("datasets/d/x", "receipts/s.yaml.json", "models/g/v0001.json", "runs/r/run.json", "runs/r/output/x")
    # Not under specs/ and commands/ themselves but below: what lies deeper starts nothing.
    puts = ("specs/below/x", "commands/a/b/x", "datasets/d/y", "code/c/code.zip", "models/base/h/x")
    done = {f"get {key}": may(lambda key=key: user.get(at + key)) for key in reads}  # type: ignore[misc]
    done |= {f"put {key}": may(lambda key=key: user.put(at + key)) for key in puts}  # type: ignore[misc]
    done["list"] = may(lambda: user.list(at + "runs/"))
    assert set(done.values()) == {actor == owner}, done


@pytest.mark.parametrize(("actor", "owner"), list(product(TENANTS, TENANTS)))
def test_what_a_training_job_may_touch_of_whom(actor: str, owner: str, jobs: dict[str, Actor]) -> None:
    job, at = jobs[actor], f"tenants/{owner}/"
    done = {
        "read data": may(lambda: job.get(at + "datasets/d/x")),
        "read output": may(lambda: job.get(at + "runs/r/output/x")),
        "write a checkpoint": may(lambda: job.put(at + "runs/r/checkpoints/l01/x")),
        "write output": may(lambda: job.put(at + "runs/r/output/x")),
        "tidy": may(lambda: job.delete(at + "runs/r/checkpoints/l01/gone")),
        "list": may(lambda: job.list(at + "runs/r/checkpoints/")),
    }
    assert set(done.values()) == {actor == owner}, done


@pytest.mark.parametrize("tenant", TENANTS)
def test_what_nobody_may_not_even_with_what_is_theirs(
    tenant: str, users: dict[str, Actor], jobs: dict[str, Actor]
) -> None:
    at, user, job = f"tenants/{tenant}/", users[tenant], jobs[tenant]
    for key in ("runs/r/run.json", "receipts/x", "models/g/v0002.json", "runs/r/checkpoints/l01/x"):
        assert not may(lambda key=key: user.put(at + key)), key  # type: ignore[misc]
    assert not may(lambda: user.delete(at + "datasets/d/x"))
    for key in ("specs/x.yaml", "specs/runs/x/output/y.yaml", "commands/r/c.json", "datasets/d/x", "runs/r/run.json"):
        assert not may(lambda key=key: job.put(at + key)), key  # type: ignore[misc]
    for actor in (user, job):
        assert not may(lambda actor=actor: actor.list("tenants/"))  # type: ignore[misc]
        assert not may(lambda actor=actor: actor.list(""))  # type: ignore[misc]


def test_a_user_of_a_tenant_may_make_no_table_role_or_execution(stage: StageUnderTest, users: dict[str, Actor]) -> None:
    user, names = users["acme"], stage.names
    calls = {
        "scan": lambda: user.client("dynamodb").scan(TableName=names.table("runs")),
        "write a row": lambda: user.client("dynamodb").put_item(
            TableName=names.table("tenants"), Item={"pk": {"S": "LIMITS"}, "sk": {"S": "acme"}}
        ),
        "read idempotency": lambda: user.client("dynamodb").get_item(
            TableName=names.table("idempotency"), Key={"id": {"S": "x"}}
        ),
        "start": lambda: user.client("stepfunctions").start_execution(stateMachineArn=names.state_machine_arn),
        "become a job": lambda: user.client("sts").assume_role(
            RoleArn=names.job_role_arn("acme"), RoleSessionName="tests"
        ),
        "become another": lambda: user.client("sts").assume_role(
            RoleArn=names.user_role_arn("beta"), RoleSessionName="tests"
        ),
        "write logs": lambda: user.client("logs").put_log_events(
            logGroupName=TRAINING_LOG_GROUP, logStreamName="x", logEvents=[{"timestamp": 1, "message": "x"}]
        ),
        "change its role": lambda: user.client("iam").delete_role_policy(
            RoleName="microtuning-local-user-acme", PolicyName="grants"
        ),
    }
    assert {name: may(call) for name, call in calls.items()} == dict.fromkeys(calls, False)


@pytest.mark.parametrize("owner", [*TENANTS, "nobody"])
def test_the_role_that_undeclared_tenants_share_reaches_nobody_who_is_declared(
    owner: str, stage: StageUnderTest
) -> None:
    shared, at = Actor(stage, stage.names.job_role_arn(None)), f"tenants/{owner}/"
    done = {
        "read": may(lambda: shared.get(at + "datasets/d/x")),
        "write": may(lambda: shared.put(at + "runs/r/checkpoints/l01/x")),
        "list": may(lambda: shared.list(at + "runs/")),
    }
    assert set(done.values()) == {owner == "nobody"}, done


@pytest.mark.parametrize("tenant", ["acme", "somebody"])
def test_a_run_trains_on_the_role_and_key_of_its_tenant(tenant: str, stage: StageUnderTest) -> None:
    from tests.integration.conftest import StageUnderTest as Stage

    own = Stage(stage.cloud, tenant=tenant)
    run = own.ended(own.submit())
    assert run.status == "completed", own.story(run.run_id)
    job = own.client("sagemaker").describe_training_job(TrainingJobName=run.attempts[0].job_name)
    declared = tenant in TENANTS
    assert job["RoleArn"] == stage.names.job_role_arn(tenant if declared else None)
    assert (job["OutputDataConfig"].get("KmsKeyId") == stage.names.tenant_key_arn("acme")) is declared
