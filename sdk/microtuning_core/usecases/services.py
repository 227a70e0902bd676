"""Everything a use case works with, made in one place from a session and the stage's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from microtuning_core.aws.admissions import AdmissionStore
from microtuning_core.aws.executions import Executions
from microtuning_core.aws.ledger import LedgerStore
from microtuning_core.aws.logs import JobLogs
from microtuning_core.aws.objects import ObjectStore
from microtuning_core.aws.runs import RunStore
from microtuning_core.aws.training_jobs import TrainingJobs
from microtuning_core.domain.quota import Limits

if TYPE_CHECKING:
    import boto3

    from microtuning_core.domain.names import StackNames


@dataclass(frozen=True)
class StageSettings:
    """What differs from stage to stage."""

    names: StackNames
    training_image_uri: str
    max_running_runs: int
    kms_key_arn: str | None = None

    @property
    def limits(self) -> Limits:
        return Limits(total=self.max_running_runs)


@dataclass(frozen=True)
class Services:
    settings: StageSettings
    objects: ObjectStore
    runs: RunStore
    ledger: LedgerStore
    admissions: AdmissionStore
    executions: Executions
    jobs: TrainingJobs
    logs: JobLogs

    @property
    def names(self) -> StackNames:
        return self.settings.names


def connect(session: boto3.Session, settings: StageSettings) -> Services:
    names = settings.names
    dynamodb = session.client("dynamodb")
    objects = ObjectStore(session.client("s3"), names.bucket)
    return Services(
        settings=settings,
        objects=objects,
        runs=RunStore(dynamodb, names.table("runs"), objects),
        ledger=LedgerStore(dynamodb, names.table("ledger")),
        admissions=AdmissionStore(dynamodb, names.table("tenants")),
        executions=Executions(session.client("stepfunctions"), names),
        jobs=TrainingJobs(session.client("sagemaker")),
        logs=JobLogs(session.client("logs")),
    )
