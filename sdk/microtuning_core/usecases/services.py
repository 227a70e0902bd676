"""Everything a use case works with, made in one place from a session and the stage's names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from microtuning_core.aws.admissions import AdmissionStore
from microtuning_core.aws.budget_marks import BudgetMarks
from microtuning_core.aws.executions import Executions
from microtuning_core.aws.launcher import sagemaker_for
from microtuning_core.aws.ledger import LedgerStore
from microtuning_core.aws.logs import JobLogs
from microtuning_core.aws.objects import ObjectStore
from microtuning_core.aws.runs import RunStore
from microtuning_core.aws.training_jobs import TrainingJobs
from microtuning_core.domain.quota import Limits
from microtuning_core.domain.recovery import newly_complete
from microtuning_core.domain.tenants import StageTenants, serving_anyone

if TYPE_CHECKING:
    import boto3
    from mypy_boto3_dynamodb import DynamoDBClient

    from microtuning_core.domain.names import StackNames
    from microtuning_core.domain.run import Recovery, Run
    from microtuning_core.usecases.job_security import JobNetwork


@dataclass(frozen=True)
class StageSettings:
    """What differs from stage to stage."""

    names: StackNames
    training_image_uri: str
    max_running_runs: int
    kms_key_arn: str | None = None
    tenants: StageTenants = field(default_factory=serving_anyone)
    job_network: JobNetwork | None = None

    @property
    def limits(self) -> Limits:
        """As declared; what was changed since lies in the tenants table."""
        return self.tenants.quota(self.max_running_runs, {})

    def job_role_arn(self, tenant: str) -> str:
        return self.names.job_role_arn(self.tenants.role_of(tenant))

    def key_arn(self, tenant: str) -> str | None:
        """The key for what a training job leaves: the tenant's own, else the stage's."""
        return self.names.tenant_key_arn(tenant) if tenant in self.tenants.have_own_key else self.kms_key_arn


class Services:
    """The stores of one stage. Each is made when it is first needed: a client costs a function up to 0.3 s to load."""

    def __init__(self, session: boto3.Session, settings: StageSettings) -> None:
        self._session = session
        self.settings = settings
        # What is measured of the work, until the function that did it takes it out.
        self.counts: Counter[str] = Counter()
        self.recoveries: list[tuple[str, Recovery]] = []

    def count(self, metric: str) -> None:
        self.counts[metric] += 1

    def note_recoveries(self, before: Run, after: Run) -> None:
        """Those whose first new step was heard of in between."""
        self.recoveries += [(after.run_id, each) for each in newly_complete(before, after)]

    @property
    def names(self) -> StackNames:
        return self.settings.names

    @cached_property
    def _dynamodb(self) -> DynamoDBClient:
        return self._session.client("dynamodb")

    @cached_property
    def objects(self) -> ObjectStore:
        return ObjectStore(self._session.client("s3"), self.names.bucket)

    @cached_property
    def runs(self) -> RunStore:
        return RunStore(self._dynamodb, self.names.table("runs"), self.objects)

    @cached_property
    def ledger(self) -> LedgerStore:
        return LedgerStore(self._dynamodb, self.names.table("ledger"))

    @cached_property
    def admissions(self) -> AdmissionStore:
        return AdmissionStore(self._dynamodb, self.names.table("tenants"))

    @cached_property
    def budget_marks(self) -> BudgetMarks:
        return BudgetMarks(self._dynamodb, self.names.table("tenants"))

    @cached_property
    def executions(self) -> Executions:
        return Executions(self._session.client("stepfunctions"), self.names)

    @cached_property
    def jobs(self) -> TrainingJobs:
        tagged = partial(sagemaker_for, self._session, self.names.launcher_role_arn)
        return TrainingJobs(self._session.client("sagemaker"), tagged if self.settings.tenants.by_tags else None)

    @cached_property
    def logs(self) -> JobLogs:
        return JobLogs(self._session.client("logs"))
