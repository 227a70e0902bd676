"""CreateTrainingJob for one attempt: what it says, and what it leaves out."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import boto3
import pytest
from botocore.stub import Stubber

from microtuning_core.aws.launcher import sagemaker_for
from microtuning_core.aws.training_jobs import TrainingJobs
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.run import Attempt, CheckpointRef, Run, RunStatus, new_run
from microtuning_core.domain.tenants import StageTenants, TenantLimits
from microtuning_core.usecases.job_security import JobNetwork
from microtuning_core.usecases.launch import channels, job_request, plain_hyperparameters
from microtuning_core.usecases.services import StageSettings
from tests.unit.records import RUN_ID, a_plan, a_spec

NOW = datetime(2026, 1, 2, tzinfo=UTC)
NAMES = StackNames("prod", "123456789012", "us-east-1")
SETTINGS = StageSettings(NAMES, "image:1", 20)
OWN = f"s3://{NAMES.bucket}/tenants/acme"
RUN_FOLDER = f"{OWN}/runs/{RUN_ID}"


def spec(**changes):
    return a_spec(**({"data": {"train": f"{OWN}/datasets/x/"}, "compute": {"deadline_s": 7200}} | changes))


def attempt(**plan) -> Attempt:
    return Attempt(attempt=2, job_name=f"prod-{RUN_ID}-a002", lineage=3, plan=a_plan(**plan), created_at=NOW)


def run(**changes) -> Run:
    return new_run(RUN_ID, changes.pop("spec", spec()), NOW).with_(status=RunStatus.TRAINING, lineage=3, **changes)


def request(run_: Run | None = None, **plan):
    return job_request(SETTINGS, run_ or run(), attempt(**plan))


def test_the_request_names_job_machine_role_and_image():
    made = request()
    assert made["TrainingJobName"] == f"prod-{RUN_ID}-a002"
    assert made["RoleArn"] == NAMES.job_role_arn(None)
    assert made["AlgorithmSpecification"] == {"TrainingImage": "image:1", "TrainingInputMode": "File"}
    assert (made["ResourceConfig"]["InstanceType"], made["ResourceConfig"]["InstanceCount"]) == ("ml.g5.xlarge", 1)
    assert {tag["Key"]: tag["Value"] for tag in made["Tags"]} == {
        "microtuning:stage": "prod",
        "microtuning:tenant": "acme",
        "microtuning:run": RUN_ID,
    }


def test_checkpoints_go_to_the_lineage_of_the_attempt_alone_and_the_prefix_ends_in_a_slash():
    made = request()
    assert made["CheckpointConfig"] == {"S3Uri": f"{RUN_FOLDER}/checkpoints/l03/", "LocalPath": "/opt/ml/checkpoints"}
    assert made["OutputDataConfig"] == {"S3OutputPath": f"{RUN_FOLDER}/output/"}


def test_a_spot_job_waits_no_longer_than_run_time_and_deadline_together_and_others_say_nothing():
    assert request(spot=True)["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 3600,
        "MaxWaitTimeInSeconds": 3600 + 7200,
    }
    assert request()["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600}


def test_the_stages_key_and_network_are_in_every_request():
    network = JobNetwork(("subnet-1", "subnet-2"), ("sg-1",))
    settings = StageSettings(NAMES, "image:1", 20, "arn:aws:kms:us-east-1:123456789012:key/1", job_network=network)
    made = job_request(settings, run(), attempt())
    assert made["OutputDataConfig"]["KmsKeyId"].endswith("key/1")
    assert made["VpcConfig"] == {"Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}
    assert "VpcConfig" not in request()


def test_the_channels_are_what_the_spec_names_and_the_config_of_this_attempt():
    assert [(name, str(uri)) for name, uri in channels(run(), attempt(), NAMES.bucket)] == [
        ("config", f"{RUN_FOLDER}/config/a002/"),
        ("train", f"{OWN}/datasets/x/"),
    ]


def test_a_reward_model_and_the_base_of_its_adapter_have_a_channel_a_part():
    parts = {"taste": {"entry": f"model:{OWN}/m/", "base": f"{OWN}/b/"}}
    rewarded = run(spec=spec(algorithm={"type": "grpo"}, reward={"parts": parts}))
    found = {name: str(uri) for name, uri in channels(rewarded, attempt(), NAMES.bucket)}
    assert (found["reward_model_taste"], found["reward_base_taste"]) == (f"{OWN}/m/", f"{OWN}/b/")


def test_a_later_lineage_reads_the_checkpoint_it_started_from():
    started = run(resume_from=CheckpointRef(lineage=2, step=40))
    found = {name: str(uri) for name, uri in channels(started, attempt(), NAMES.bucket)}
    assert found["resume"] == f"{RUN_FOLDER}/checkpoints/l02/step-40/"


def test_the_users_variables_cannot_hide_our_own():
    named = run(spec=spec(environment_variables={"COLOUR": "red"}))
    assert request(named)["Environment"] == {
        "COLOUR": "red",
        "MICROTUNING_RUN_ID": RUN_ID,
        "MICROTUNING_ATTEMPT": "2",
    }


def test_network_isolation_is_asked_for_only_where_the_spec_asks():
    isolated = run(spec=spec(compute={"network_isolation": True}))
    assert request(isolated)["EnableNetworkIsolation"] is True
    assert "EnableNetworkIsolation" not in request()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"lr": 0.1, "name": "x", "layers": [1, 2]}, {"lr": "0.1", "name": "x", "layers": "[1, 2]"}),
        ({"long": "x" * 2501, "k" * 257: 1, "empty": "", "fits": "x" * 2500}, {"fits": "x" * 2500}),
        ({f"k{n}": n for n in range(150)}, {f"k{n}": str(n) for n in range(100)}),
    ],
)
def test_hyperparameters_that_sagemaker_cannot_take_are_left_to_the_file(given, shown):
    code = {"uri": f"{OWN}/code/x/code.zip", "sha256": "0" * 64}
    script = spec(algorithm={"type": "script", "entry": "s.py", "hyperparameters": given}, code=code)
    assert plain_hyperparameters(script) == shown


def test_a_run_of_a_recipe_has_no_hyperparameters():
    assert plain_hyperparameters(spec()) == {}


@pytest.mark.parametrize("value", ["a\nb", "a\r\nb", "", "x" * 2501])
def test_a_value_that_the_service_will_not_take_travels_by_file_only(value):
    settings = {"type": "script", "entry": "a.py", "hyperparameters": {"odd": value, "plain": 1}}
    code = {"uri": f"{OWN}/code/x/code.zip", "sha256": "0" * 64}
    assert plain_hyperparameters(spec(algorithm=settings, code=code)) == {"plain": "1"}


def test_with_session_tags_a_job_hands_its_tenants_tag_on_and_is_made_in_that_tenants_session():
    tagged = StageSettings(NAMES, "image:1", 20, tenants=StageTenants(isolation="session-tags", others=TenantLimits()))
    made = job_request(tagged, run(), attempt())
    assert made["SessionChainingConfig"] == {"EnableSessionTagChaining": True}
    assert made["RoleArn"] == NAMES.job_role_arn(None)
    assert "SessionChainingConfig" not in request()
    asked, of_all = [], SimpleNamespace(create_training_job=lambda **_: asked.append("all"))
    own = SimpleNamespace(create_training_job=lambda **_: asked.append("own"))
    TrainingJobs(of_all, lambda tenant: asked.append(tenant) or own).create(made)  # type: ignore[arg-type, func-returns-value]
    TrainingJobs(of_all).create(made)  # type: ignore[arg-type]
    assert asked == ["acme", "own", "all"]


def test_the_launchers_session_carries_the_tenant_as_its_only_tag():
    session = boto3.Session("key", "secret", region_name="us-east-1")
    sts = session.client("sts")
    given = {"AccessKeyId": "A" * 16, "SecretAccessKey": "s", "SessionToken": "t", "Expiration": NOW}
    asked = {
        "RoleArn": NAMES.launcher_role_arn, "RoleSessionName": "launch-acme", "DurationSeconds": 900,
        "Tags": [{"Key": "tenant", "Value": "acme"}],
    }  # fmt: skip
    with Stubber(sts) as stub:
        stub.add_response("assume_role", {"Credentials": given}, asked)
        client = sagemaker_for(SimpleNamespace(client=lambda _: sts, region_name="us-east-1"), asked["RoleArn"], "acme")  # type: ignore[arg-type]
    assert client._request_signer._credentials.token == "t"
    model = client.meta.service_model.operation_model("CreateTrainingJob").input_shape.members
    assert "EnableSessionTagChaining" in model["SessionChainingConfig"].members
