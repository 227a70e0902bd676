"""What a function finds in its environment, read once and checked at the first line of an invocation."""

from __future__ import annotations

import os
from functools import lru_cache

import boto3
from pydantic import BaseModel, Field

from functions._stage import TENANTS
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.tenants import StageTenants
from microtuning_core.usecases.job_security import JobNetwork
from microtuning_core.usecases.services import Services, StageSettings


class Environment(BaseModel):
    """The variables that infrastructure/functions.py sets; a test compares the two."""

    stage: str = Field(alias="MICROTUNING_STAGE")
    state_machine_arn: str = Field(
        alias="STATE_MACHINE_ARN", pattern=r"^arn:aws[\w-]*:states:[^:]+:\d{12}:stateMachine:.+$"
    )
    training_image_uri: str = Field(alias="TRAINING_IMAGE_URI")
    max_running_runs: int = Field(alias="MAX_RUNNING_RUNS", ge=1)
    kms_key_arn: str | None = Field(None, alias="KMS_KEY_ARN")
    job_subnets: str = Field("", alias="JOB_SUBNETS")
    job_security_groups: str = Field("", alias="JOB_SECURITY_GROUPS")

    @property
    def names(self) -> StackNames:
        """Account and region are the machine's own: every other name follows from them and the stage."""
        _, _, _, region, account, *_ = self.state_machine_arn.split(":")
        return StackNames(self.stage, account, region)

    @property
    def settings(self) -> StageSettings:
        return StageSettings(
            self.names,
            self.training_image_uri,
            self.max_running_runs,
            self.kms_key_arn or None,
            StageTenants.model_validate_json(TENANTS),
            self.job_network,
        )

    @property
    def job_network(self) -> JobNetwork | None:
        """Ids divided by commas; empty where the stage has no network of its own."""
        if not self.job_subnets:
            return None
        return JobNetwork(self.job_subnets.split(","), self.job_security_groups.split(","))


@lru_cache(maxsize=1)
def environment() -> Environment:
    return Environment.model_validate(dict(os.environ))


@lru_cache(maxsize=1)
def services() -> Services:
    """Clients are made once a process: the next invocation finds them warm."""
    return Services(boto3.Session(), environment().settings)
