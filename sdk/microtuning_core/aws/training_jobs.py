"""SageMaker training jobs of this stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import code_of, is_missing, message_of
from microtuning_core.domain.errors import LaunchRefused
from microtuning_core.domain.failures import Failure, classify_refusal
from microtuning_core.domain.job import JobFacts, job_facts
from microtuning_core.domain.names import JobName, own_job_name, parse_job_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_sagemaker import SageMakerClient


class Refused(LaunchRefused):
    """CreateTrainingJob said no; `failure` is what the rules decide on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.failure_class, failure.message)
        self.failure = failure


class TrainingJobs:
    """`client_for` a tenant makes jobs where the tenant's own session must; else the one client makes all of them."""

    def __init__(self, sagemaker: SageMakerClient, client_for: Callable[[str], SageMakerClient] | None = None) -> None:
        self._sagemaker = sagemaker
        self._client_for = client_for

    def create(self, request: dict[str, Any]) -> None:
        """Creates the job; one of that name that exists already is success (the message came twice)."""
        tenant = parse_job_name(request["TrainingJobName"]).tenant
        client = self._client_for(tenant) if self._client_for else self._sagemaker
        try:
            client.create_training_job(**request)
        except ClientError as error:
            if code_of(error) != "ResourceInUse":
                raise Refused(classify_refusal(code_of(error), message_of(error))) from error

    def describe(self, job_name: str) -> JobFacts | None:
        try:
            return job_facts(self._sagemaker.describe_training_job(TrainingJobName=job_name))
        except ClientError as error:
            if is_missing(error):
                return None
            raise

    def in_progress(self, stage: str) -> list[JobName]:
        """The stage's jobs that run; those of others in the account are passed over by their names."""
        pages = self._sagemaker.get_paginator("list_training_jobs").paginate(
            NameContains=f"{stage}-", StatusEquals="InProgress"
        )
        named = [own_job_name(row["TrainingJobName"], stage) for page in pages for row in page["TrainingJobSummaries"]]
        return [name for name in named if name is not None]

    def end_pool(self, job_name: str) -> None:
        """Gives back the machines that are kept after the job; a pool that is gone, or never was, is success."""
        try:
            self._sagemaker.update_training_job(
                TrainingJobName=job_name, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
            )
        except ClientError as error:
            if not is_missing(error) and code_of(error) != "ValidationException":
                raise

    def stop(self, job_name: str) -> None:
        """Asks the job to stop; one that has ended meanwhile is success."""
        try:
            self._sagemaker.stop_training_job(TrainingJobName=job_name)
        except ClientError as error:
            if not is_missing(error) and code_of(error) != "ValidationException":
                raise
