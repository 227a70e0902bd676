"""The connection to one stage: where its bucket, tables and logs are, and how to talk to them.

    connect()            the stage that MICROTUNING_STAGE names, else the local cloud (started when it does not run)
    connect("dev")       a stage deployed in the AWS account that boto3 finds credentials for

Names follow from stage, account and region, so a user needs no right to describe the stack.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from microtuning_core.aws.admissions import AdmissionStore
from microtuning_core.aws.ledger import LedgerStore
from microtuning_core.aws.objects import ObjectStore
from microtuning_core.aws.runs import RunStore
from microtuning_core.domain.errors import StageUnreachable
from microtuning_core.domain.names import StackNames, check_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_logs import CloudWatchLogsClient
    from mypy_boto3_s3 import S3Client

LOCAL = "local"
DEFAULT_TENANT = "default"


class Stage:
    """One deployment. Clients of `session`, a boto3 session, reach this stage whatever the shell's settings are."""

    def __init__(self, names: StackNames, session: boto3.Session) -> None:
        self.names = names
        self.session = session

    def __repr__(self) -> str:
        return f"Stage({self.names.stage!r}, account={self.names.account!r}, region={self.names.region!r})"

    @property
    def is_local(self) -> bool:
        return self.names.stage == LOCAL

    @property
    def bucket(self) -> str:
        return self.names.bucket

    @cached_property
    def s3(self) -> S3Client:
        return self.session.client("s3")

    @cached_property
    def dynamodb(self) -> DynamoDBClient:
        return self.session.client("dynamodb")

    @cached_property
    def cloudwatch_logs(self) -> CloudWatchLogsClient:
        return self.session.client("logs")

    @cached_property
    def objects(self) -> ObjectStore:
        return ObjectStore(self.s3, self.bucket)

    @cached_property
    def runs(self) -> RunStore:
        return RunStore(self.dynamodb, self.names.table("runs"), self.objects)

    @cached_property
    def admissions(self) -> AdmissionStore:
        return AdmissionStore(self.dynamodb, self.names.table("tenants"))

    @cached_property
    def ledger(self) -> LedgerStore:
        return LedgerStore(self.dynamodb, self.names.table("ledger"))

    def places(self, tenant: str) -> dict[str, int]:
        """Of the tenant's runs that wait, by run_id; 1 is next in the stage's queue."""
        standing = self.admissions.standing(tenant)
        return standing.places if standing else {}


def connect(stage: str | None = None, region: str | None = None) -> Stage:
    """The stage to work with; `None` = what MICROTUNING_STAGE says, else "local".

    Raises:
        StageUnreachable: no credentials or no region for a stage in AWS.
        LocalCloudError: the local cloud cannot start.
    """
    name = check_stage(stage or os.environ.get("MICROTUNING_STAGE") or LOCAL)
    session = _local_session() if name == LOCAL else boto3.Session(region_name=region)
    if session.region_name is None:
        raise StageUnreachable(name, "needs a region", next_step="Give connect(region=…) or set AWS_REGION.")
    return Stage(StackNames(name, _account(session, name), session.region_name), session)


def _account(session: boto3.Session, stage: str) -> str:
    try:
        return session.client("sts").get_caller_identity()["Account"]
    except (BotoCoreError, ClientError) as error:
        raise StageUnreachable(
            stage,
            f"cannot be reached: {error}",
            next_step="Check your AWS credentials with `aws sts get-caller-identity`, or use the stage 'local'.",
        ) from error


def _local_session() -> boto3.Session:
    from microtuning_local import cloud

    return local_session(cloud.ensure_up().environment)


def local_session(environment: Mapping[str, str]) -> boto3.Session:
    """A session that talks to the local cloud; `environment` is what `microtuning local env` prints."""
    return _LocalSession(
        environment,
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )


class _LocalSession(boto3.Session):
    """boto3 takes endpoints by client or from the process's environment, and the latter belongs to the user."""

    def __init__(self, environment: Mapping[str, str], **settings: Any) -> None:
        super().__init__(**settings)
        self._environment = environment

    def client(self, service_name: Any, *args: Any, **settings: Any) -> Any:
        own = f"AWS_ENDPOINT_URL_{service_name.upper()}"
        settings.setdefault("endpoint_url", self._environment.get(own) or self._environment["AWS_ENDPOINT_URL"])
        # No proxy of the user's shell stands between a program and 127.0.0.1.
        ours = Config(proxies={}, retries={"max_attempts": 4, "mode": "standard"})
        settings["config"] = ours.merge(settings["config"]) if settings.get("config") else ours
        return super().client(service_name, *args, **settings)
