"""Our own rules for what cdk-nag has none for: a training job's request, over every type of the catalog."""

from __future__ import annotations

from typing import Any

import pytest

from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.run import Attempt, new_run
from microtuning_core.usecases.job_security import secure, takes_a_volume_key
from microtuning_core.usecases.launch import job_request
from microtuning_core.usecases.services import StageSettings
from microtuning_local.sagemaker.rules import check_create
from tests.unit.records import RUN_ID, a_plan, a_spec

KEY = "arn:aws:kms:us-east-1:123456789012:key/1"
NOW = "2026-01-02T03:04:05Z"


def request_for(instance_type: str, *, spot: bool = False, count: int = 1, key: str | None = KEY) -> dict[str, Any]:
    attempt = Attempt(
        attempt=1, job_name=f"dev-{RUN_ID}-a001", lineage=1, created_at=NOW,  # type: ignore[arg-type]
        plan=a_plan(instance_type=instance_type, spot=spot, count=count),
    )  # fmt: skip
    run = new_run(RUN_ID, a_spec(), attempt.created_at)
    return job_request(StageSettings(StackNames("dev", "123456789012", "us-east-1"), "image:1", 20, key), run, attempt)


@pytest.mark.parametrize("instance_type", CATALOG)
def test_every_job_is_encrypted_and_bounded_and_sagemaker_takes_it(instance_type: str) -> None:
    for spot in (False, True):
        made = request_for(instance_type, spot=spot)
        check_create(made)
        assert made["OutputDataConfig"]["KmsKeyId"] == KEY
        has_own_storage = bool(CATALOG[instance_type].local_storage_gb)
        assert ("VolumeKmsKeyId" in made["ResourceConfig"]) is not has_own_storage
        assert 0 < made["StoppingCondition"]["MaxRuntimeInSeconds"] <= 28 * 86_400
        assert made["RoleArn"].startswith("arn:aws:iam::123456789012:role/microtuning-dev-job")


def test_both_kinds_of_types_are_in_the_catalog() -> None:
    assert {takes_a_volume_key(each) for each in CATALOG} == {True, False}
    assert not takes_a_volume_key("ml.of-tomorrow.xlarge")  # a key that it refused would be no job at all


def test_machines_of_one_job_talk_in_secret() -> None:
    assert "EnableInterContainerTrafficEncryption" not in request_for("ml.g5.xlarge")
    assert request_for("ml.g5.xlarge", count=2)["EnableInterContainerTrafficEncryption"] is True


def test_a_stage_without_a_key_names_none() -> None:
    made = request_for("ml.m5.large", key=None)
    assert "KmsKeyId" not in str(made)


def test_isolation_and_networks_are_added_only_where_they_are_asked_for() -> None:
    made: dict[str, Any] = {"OutputDataConfig": {}, "ResourceConfig": {}}
    secure(made, a_plan(), key_arn=None, network=None, isolated=False)
    assert made == {"OutputDataConfig": {}, "ResourceConfig": {}}
    secure(made, a_plan(), key_arn=None, network=None, isolated=True)
    assert made["EnableNetworkIsolation"] is True


def test_a_jobs_environment_holds_no_more_than_the_user_gave_and_who_it_is() -> None:
    made = request_for("ml.m5.large")
    assert set(made["Environment"]) == {"MICROTUNING_RUN_ID", "MICROTUNING_ATTEMPT"}
    assert made["HyperParameters"] == {}
