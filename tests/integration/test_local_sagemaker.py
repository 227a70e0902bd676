"""The local SageMaker as boto3 sees it: real jobs in real processes, on the local cloud."""

from __future__ import annotations

import io
import json
import tarfile
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from microtuning_local import cloud as local
from microtuning_local.processes import started_at, wait_until
from microtuning_local.sagemaker.logs import GROUP
from microtuning_sdk import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from microtuning_local.cloud import LocalCloud

pytestmark = pytest.mark.cloud

BUCKET = "local-sagemaker-tests"
TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
MAY_LOG = {"Effect": "Allow", "Action": ["logs:CreateLogStream", "logs:PutLogEvents"], "Resource": "*"}
MAY_READ = {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetObject"], "Resource": "*"}
MAY_WRITE = {"Effect": "Allow", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}


@dataclass
class Desk:
    """A test's hands on the cloud: clients, two roles, and a queue that hears every event."""

    cloud: LocalCloud
    queue_url: str
    role: str
    poor_role: str
    clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = self.cloud.client(service)
        return self.clients[service]

    def create(self, script: str, *, hyperparameters: dict[str, str] | None = None, **changes: Any) -> str:
        """Create a job that runs `script` of tiny_container.py; returns its name."""
        name = changes.pop("TrainingJobName", f"t-{uuid.uuid4().hex[:12]}")
        request = {
            "TrainingJobName": name,
            "AlgorithmSpecification": {"TrainingImage": "local/tiny:1", "TrainingInputMode": "File"},
            "RoleArn": self.role,
            "HyperParameters": {"script": script} | (hyperparameters or {}),
            "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/output"},
            "CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/checkpoints/{name}/l01/"},
            "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 5},
            "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        }
        self.client("sagemaker").create_training_job(**(request | changes))
        return name

    def describe(self, name: str) -> dict[str, Any]:
        return self.client("sagemaker").describe_training_job(TrainingJobName=name)

    def wait(self, name: str, *, secondary: str | None = None, timeout_s: float = 20) -> dict[str, Any]:
        """Wait for a secondary status, or for the end."""

        def is_there() -> bool:
            told = self.describe(name)
            return secondary == told["SecondaryStatus"] or told["TrainingJobStatus"] in (
                "Completed",
                "Failed",
                "Stopped",
            )

        assert wait_until(is_there, timeout_s=timeout_s), self.describe(name)["SecondaryStatus"]
        return self.describe(name)

    def statuses(self, name: str) -> list[str]:
        return [entry["Status"] for entry in self.describe(name)["SecondaryStatusTransitions"]]

    def log(self, name: str) -> list[str]:
        """All lines of the job's streams, read page by page as a follower would."""
        logs, lines = self.client("logs"), []
        streams = logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=f"{name}/")["logStreams"]
        for stream in streams:
            at: dict[str, str] = {}
            while True:
                page = logs.get_log_events(
                    logGroupName=GROUP, logStreamName=stream["logStreamName"], startFromHead=True, limit=100, **at
                )
                lines += [event["message"] for event in page["events"]]
                if at.get("nextToken") == page["nextForwardToken"]:
                    break
                at = {"nextToken": page["nextForwardToken"]}
        return lines

    def wait_for_line(self, name: str, line: str) -> None:
        assert wait_until(lambda: line in self.log(name), timeout_s=10), self.log(name)

    def events(self, name: str, *, until: str) -> list[dict[str, Any]]:
        """This job's events, in the order they came, up to the one with secondary status `until`."""
        sqs, heard = self.client("sqs"), []
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and until not in [e["detail"]["SecondaryStatus"] for e in heard]:
            reply = sqs.receive_message(QueueUrl=self.queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
            for message in reply.get("Messages", []):
                sqs.delete_message(QueueUrl=self.queue_url, ReceiptHandle=message["ReceiptHandle"])
                event = json.loads(message["Body"])
                heard += [event] if event["detail"]["TrainingJobName"] == name else []
        return heard

    def keys(self, prefix: str) -> list[str]:
        found = self.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [entry["Key"].removeprefix(prefix) for entry in found]

    def archive(self, key: str) -> dict[str, bytes]:
        body = self.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
        with tarfile.open(fileobj=io.BytesIO(body)) as packed:
            return {member.name: packed.extractfile(member).read() for member in packed.getmembers()}  # type: ignore[union-attr]


def make_role(cloud: LocalCloud, name: str, statements: list[dict[str, Any]]) -> str:
    iam = cloud.client("iam")
    arn: str = iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))["Role"]["Arn"]
    policy = {"Version": "2012-10-17", "Statement": statements}
    iam.put_role_policy(RoleName=name, PolicyName="grants", PolicyDocument=json.dumps(policy))
    return arn


def make_ear(cloud: LocalCloud) -> str:
    """A queue that hears every training job event; returns its URL."""
    sqs, events = cloud.client("sqs"), cloud.client("events")
    url: str = sqs.create_queue(QueueName="local-sagemaker-tests")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    allow = {
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "events.amazonaws.com"},
                "Action": "sqs:SendMessage",
                "Resource": arn,
            }
        ]
    }
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps(allow)})
    events.put_rule(Name="local-sagemaker-tests", EventPattern=json.dumps({"source": ["local.sagemaker"]}))
    events.put_targets(Rule="local-sagemaker-tests", Targets=[{"Id": "ear", "Arn": arn}])
    return url


def without_retries(cloud: LocalCloud) -> Any:
    """A SageMaker client that shows the first answer it gets."""
    config = Config(retries={"total_max_attempts": 1})
    session = boto3.Session("000000000000", "test", region_name="us-east-1")
    return session.client("sagemaker", endpoint_url=cloud.endpoint.sagemaker_url, config=config)


@pytest.fixture(scope="module")
def desk(cloud: LocalCloud) -> Desk:
    cloud.client("s3").create_bucket(Bucket=BUCKET)
    return Desk(
        cloud=cloud,
        queue_url=make_ear(cloud),
        role=make_role(cloud, "tests-job", [MAY_LOG, MAY_READ, MAY_WRITE]),
        poor_role=make_role(cloud, "tests-poor-job", [MAY_LOG, MAY_READ]),
    )


@pytest.fixture
def faults(desk: Desk) -> Iterator[Any]:
    """Sets faults; they end with the test."""
    yield local.faults
    local.faults({})


SPOT = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60},
}


def on(instance_type: str, count: int = 1) -> dict[str, Any]:
    return {"ResourceConfig": {"InstanceType": instance_type, "InstanceCount": count, "VolumeSizeInGB": 5}}


# -- a job that does well ----------------------------------------------------------------------------------------------


def test_a_job_goes_through_its_statuses_in_order_and_tells_each(desk: Desk) -> None:
    name = desk.create("succeed", Tags=[{"Key": "stage", "Value": "local"}])
    told = desk.wait(name)
    order = ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert (told["TrainingJobStatus"], desk.statuses(name)) == ("Completed", order)
    heard = desk.events(name, until="Completed")
    assert [event["detail"]["SecondaryStatus"] for event in heard] == order
    assert told["BillableTimeInSeconds"] == told["TrainingTimeInSeconds"] >= 1


def test_an_event_has_the_shape_of_the_services_own(desk: Desk) -> None:
    name = desk.create("succeed", Tags=[{"Key": "stage", "Value": "local"}])
    event = desk.events(name, until="Completed")[-1]
    detail = event["detail"]
    assert event["source"] == "local.sagemaker"
    assert event["detail-type"] == "SageMaker Training Job State Change"
    assert event["resources"] == [detail["TrainingJobArn"]]
    assert detail["Tags"] == {"stage": "local"}
    assert isinstance(detail["LastModifiedTime"], int)
    assert abs(detail["LastModifiedTime"] / 1000 - time.time()) < 60
    assert detail["ModelArtifacts"]["S3ModelArtifacts"].endswith(f"/{name}/output/model.tar.gz")


def test_model_and_output_are_packed_and_the_log_is_complete_and_in_order(desk: Desk) -> None:
    name = desk.create("succeed")
    told = desk.wait(name)
    assert told["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{BUCKET}/output/{name}/output/model.tar.gz"
    model = desk.archive(f"output/{name}/output/model.tar.gz")
    assert model == {"config.json": b"{}", "sub/weights.bin": b"weights"}
    assert desk.archive(f"output/{name}/output/output.tar.gz") == {"metrics.jsonl": b'{"step": 1}\n'}
    assert desk.log(name) == [f"line {number}" for number in range(500)]


def test_a_job_that_runs_on_while_its_log_group_is_lost_goes_on_logging(desk: Desk) -> None:
    """So do the jobs after it: an emulator that was killed has no group any more."""
    name = desk.create("save_on_sigterm")
    desk.wait_for_line(name, "running")
    desk.client("logs").delete_log_group(logGroupName=GROUP)
    other = desk.create("succeed")
    desk.wait(other)
    assert len(desk.log(other)) == 500
    desk.client("sagemaker").stop_training_job(TrainingJobName=name)
    desk.wait(name)
    assert desk.log(name) == ["saved"]


def test_without_compression_the_model_is_uploaded_as_it_is(desk: Desk) -> None:
    name = desk.create("succeed", OutputDataConfig={"S3OutputPath": f"s3://{BUCKET}/plain", "CompressionType": "NONE"})
    assert desk.wait(name)["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{BUCKET}/plain/{name}/output/model/"
    assert desk.keys(f"plain/{name}/output/") == ["model/config.json", "model/sub/weights.bin", "output/metrics.jsonl"]


def test_the_container_sees_its_channels_its_configuration_and_no_root_credentials(desk: Desk) -> None:
    s3 = desk.client("s3")
    for key in ("in/a/x.jsonl", "in/b.jsonl", "in2/b.jsonl"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"{}")
    channels = [
        {
            "ChannelName": name,
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/{uri}"}},
        }
        for name, uri in (("train", "in/"), ("eval", "in2/b.jsonl"))
    ]
    name = desk.create("report", InputDataConfig=channels, Environment={"MICROTUNING_RUN_ID": "r1"})
    desk.wait(name)
    seen = json.loads(desk.log(name)[0])
    files = [path for path in seen["files"] if path.startswith("input/data/")]
    assert files == ["input/data/eval/b.jsonl", "input/data/train/a/x.jsonl", "input/data/train/b.jsonl"]
    assert seen["config"]["hyperparameters"] == {"script": "report"}
    assert seen["config"]["resourceconfig"]["hosts"] == ["algo-1"]
    assert seen["config"]["inputdataconfig"]["train"]["TrainingInputMode"] == "File"
    environment = seen["environment"]
    assert environment["TRAINING_JOB_NAME"] == name
    assert environment["TRAINING_JOB_ARN"].endswith(f":training-job/{name}")
    assert environment["MICROTUNING_RUN_ID"] == "r1"
    assert not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"} & set(environment)


def test_the_disk_goes_with_the_machine_but_a_failed_jobs_stays(desk: Desk) -> None:
    done, failed = desk.create("succeed"), desk.create("fail_silently")
    for name in (done, failed):
        desk.wait(name)
    jobs = desk.cloud.home.jobs
    assert wait_until(lambda: not (jobs / done / "ml").exists(), timeout_s=5)
    assert (jobs / failed / "ml" / "input" / "config" / "hyperparameters.json").exists()


def test_two_hosts_run_two_processes_with_a_stream_each(desk: Desk) -> None:
    name = desk.create("report", **on("ml.m5.large", count=2))
    desk.wait(name)
    seen = [json.loads(line)["config"]["resourceconfig"] for line in desk.log(name)]
    assert sorted(config["current_host"] for config in seen) == ["algo-1", "algo-2"]
    assert all(config["hosts"] == ["algo-1", "algo-2"] for config in seen)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_the_failure_file_becomes_the_reason_with_the_exit_code(desk: Desk) -> None:
    name = desk.create("fail", hyperparameters={"failure": '{"class": "user", "message": "x"}', "exit_code": "1"})
    told = desk.wait(name)
    assert told["FailureReason"] == 'AlgorithmError: {"class": "user", "message": "x"}, exit code: 1'
    assert desk.statuses(name)[-2:] == ["Training", "Failed"]
    assert desk.keys(f"output/{name}/output/") == ["output.tar.gz"]


def test_a_silent_failure_still_names_the_exit_code(desk: Desk) -> None:
    assert desk.wait(desk.create("fail_silently"))["FailureReason"] == "AlgorithmError: , exit code: 3"


def test_a_role_that_may_not_write_fails_the_upload_by_name(desk: Desk) -> None:
    name = desk.create("succeed", RoleArn=desk.poor_role)
    reason = desk.wait(name)["FailureReason"]
    assert reason.startswith("ClientError: Artifact upload failed")
    assert "s3:PutObject" in reason


def test_a_job_whose_checkpoints_go_nowhere_does_not_run_on(desk: Desk) -> None:
    name = desk.create("count_up", RoleArn=desk.poor_role)
    reason = desk.wait(name)["FailureReason"]
    assert reason.startswith("ClientError: Checkpoint upload failed")
    assert "s3:PutObject" in reason


def test_a_channel_without_objects_fails_before_training(desk: Desk) -> None:
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/none/"}}
    name = desk.create("succeed", InputDataConfig=[{"ChannelName": "train", "DataSource": source}])
    assert f'No S3 objects found under S3 URL "s3://{BUCKET}/none/"' in desk.wait(name)["FailureReason"]
    assert desk.statuses(name) == ["Starting", "Downloading", "Failed"]


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_stopped_job_may_save_after_sigterm(desk: Desk) -> None:
    name = desk.create("save_on_sigterm")
    desk.wait_for_line(name, "running")
    desk.client("sagemaker").stop_training_job(TrainingJobName=name)
    told = desk.wait(name)
    assert (told["TrainingJobStatus"], desk.statuses(name)[-3:]) == ("Stopped", ["Training", "Stopping", "Stopped"])
    assert desk.keys(f"checkpoints/{name}/l01/") == ["step-7/manifest.json", "step-7/model.bin"]


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_time_with_its_children(desk: Desk) -> None:
    name = desk.create("ignore_sigterm")
    assert wait_until(lambda: any(line.startswith("child") for line in desk.log(name)), timeout_s=10)
    child = int(desk.log(name)[0].split()[1])
    assert started_at(child) is not None
    began = time.monotonic()
    desk.client("sagemaker").stop_training_job(TrainingJobName=name)
    assert desk.wait(name)["SecondaryStatus"] == "Stopped"
    assert 1.5 <= time.monotonic() - began < 10
    assert started_at(child) is None


def test_max_runtime_stops_the_job_and_says_so(desk: Desk) -> None:
    name = desk.create("save_on_sigterm", StoppingCondition={"MaxRuntimeInSeconds": 3})
    told = desk.wait(name)
    assert (told["TrainingJobStatus"], told["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert desk.statuses(name)[-2:] == ["Stopping", "MaxRuntimeExceeded"]
    assert desk.keys(f"checkpoints/{name}/l01/step-7/") == ["manifest.json", "model.bin"]


def test_a_job_that_has_ended_cannot_be_stopped(desk: Desk) -> None:
    name = desk.create("succeed")
    desk.wait(name)
    with pytest.raises(ClientError, match="is in status Completed"):
        desk.client("sagemaker").stop_training_job(TrainingJobName=name)


# -- spot and capacity -------------------------------------------------------------------------------------------------


def test_a_reclaimed_spot_job_goes_on_from_its_checkpoint_in_the_same_job(desk: Desk) -> None:
    name = desk.create("count_up", **SPOT)
    wait_until(lambda: any(key.startswith("step-3/m") for key in desk.keys(f"checkpoints/{name}/l01/")), timeout_s=10)
    local.reclaim(name)
    told = desk.wait(name)
    assert desk.statuses(name) == [
        *["Starting", "Downloading", "Training", "Interrupted"],
        *["Starting", "Downloading", "Training", "Uploading", "Completed"],
    ]
    lines = desk.log(name)
    starts = [int(line.split()[1]) for line in lines if line.startswith("start ")]
    assert starts[0] == 0
    assert 3 <= starts[1] < 12
    assert "caught SIGTERM" not in lines
    assert lines[-1] == "step 12"
    assert told["BillableTimeInSeconds"] < told["TrainingTimeInSeconds"]


def test_only_whole_files_are_mirrored(desk: Desk) -> None:
    name = desk.create("count_up")
    desk.wait(name)
    assert sorted(desk.keys(f"checkpoints/{name}/l01/")) == sorted(
        f"step-{step}/{file}" for step in range(1, 13) for file in ("manifest.json", "model.bin")
    )


def test_only_a_running_spot_job_can_be_reclaimed(desk: Desk) -> None:
    name = desk.create("save_on_sigterm")
    with pytest.raises(local.LocalRequestRefused, match="is not a running spot job"):
        local.reclaim(name)
    desk.client("sagemaker").stop_training_job(TrainingJobName=name)
    desk.wait(name)


def test_a_job_that_is_unknown_or_over_cannot_be_reclaimed_and_that_is_a_mistake_of_the_request(desk: Desk) -> None:
    over = desk.create("succeed")
    desk.wait(over)
    for name in (over, "local-default-x-0z3k8q5m1c7t-a007"):
        with pytest.raises(local.LocalRequestRefused, match=f"^The machine of {name} was not taken away: ") as refused:
            local.reclaim(name)
        assert str(refused.value).endswith(". See which attempts a run has with `microtuning runs show RUN`.")
        assert cli.status_of(refused.value) == cli.USAGE


def test_an_exhausted_type_fails_with_a_capacity_error_and_no_times(desk: Desk, faults: Any) -> None:
    faults({"capacity": {"ml.g5.xlarge": 0}})
    told = desk.wait(desk.create("succeed", **on("ml.g5.xlarge")))
    assert told["FailureReason"] == (
        "CapacityError: Unable to provision requested ML compute capacity. "
        "Please retry using a different ML instance type."
    )
    assert "TrainingStartTime" not in told
    assert desk.wait(desk.create("succeed"))["TrainingJobStatus"] == "Completed"


def test_preferences_take_the_first_type_there_is(desk: Desk, faults: Any) -> None:
    faults({"capacity": {"ml.g5.xlarge": 0}})
    preferences = [{"InstanceType": kind, "InstanceCount": 1} for kind in ("ml.g5.xlarge", "ml.g6.xlarge")]
    name = desk.create("succeed", ResourceConfig={"InstancePreferences": preferences, "VolumeSizeInGB": 5})
    assert desk.wait(name)["ResourceConfig"]["SelectedInstanceType"] == "ml.g6.xlarge"


def test_a_spot_job_waits_for_capacity_until_max_wait_and_pays_nothing(desk: Desk, faults: Any) -> None:
    faults({"capacity": {"ml.g5.xlarge": 0}})
    condition = {"StoppingCondition": {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}}
    told = desk.wait(desk.create("succeed", **(SPOT | condition | on("ml.g5.xlarge"))))
    assert (told["TrainingJobStatus"], told["SecondaryStatus"]) == ("Stopped", "MaxWaitTimeExceeded")
    assert told["BillableTimeInSeconds"] == 0


def test_a_job_waits_in_pending_until_a_machine_is_free_and_can_be_stopped_there(desk: Desk) -> None:
    busy = desk.create("save_on_sigterm", **on("ml.m5.large", count=3))
    desk.wait(busy, secondary="Training")
    second, third = desk.create("succeed"), desk.create("succeed")
    desk.wait(second, secondary="Pending")
    desk.wait(third, secondary="Pending")
    desk.client("sagemaker").stop_training_job(TrainingJobName=third)
    assert desk.wait(third)["SecondaryStatus"] == "Stopped"
    assert "TrainingStartTime" not in desk.describe(third)
    desk.client("sagemaker").stop_training_job(TrainingJobName=busy)
    assert desk.wait(second)["TrainingJobStatus"] == "Completed"
    assert desk.statuses(second)[:3] == ["Starting", "Pending", "Downloading"]


# -- faults and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["ThrottlingException", "ResourceLimitExceeded", "InternalServerError"])
def test_the_next_creates_are_refused_on_purpose(desk: Desk, faults: Any, code: str) -> None:
    faults({"refuse_creates": {"code": code, "count": 1}})
    impatient = replace(desk, clients={"sagemaker": without_retries(desk.cloud)})
    with pytest.raises(ClientError) as refused:
        impatient.create("succeed")
    assert refused.value.response["Error"]["Code"] == code
    assert desk.wait(impatient.create("succeed"))["TrainingJobStatus"] == "Completed"


@pytest.mark.parametrize(("fault", "copies"), [("twice", 2), ("late", 1)])
def test_events_come_twice_or_late_on_purpose(desk: Desk, faults: Any, fault: str, copies: int) -> None:
    faults({"events": {"t-*": fault}, "late_s": 0.5})
    name = desk.create("succeed")
    desk.wait(name)
    heard = [event["detail"]["SecondaryStatus"] for event in desk.events(name, until="Completed")]
    assert heard.count("Starting") == copies


def test_events_are_lost_on_purpose(desk: Desk, faults: Any) -> None:
    name, other = (f"t-{uuid.uuid4().hex[:12]}" for _ in range(2))
    faults({"events": {name: "drop"}})
    desk.wait(desk.create("succeed", TrainingJobName=name))
    desk.create("succeed", TrainingJobName=other)
    sqs, bodies = desk.client("sqs"), []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not any(f'"{other}"' in b and '"Completed"' in b for b in bodies):
        reply = sqs.receive_message(QueueUrl=desk.queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
        bodies += [message["Body"] for message in reply.get("Messages", [])]
    assert any(other in body for body in bodies)
    assert not any(f"training-job/{name}" in body for body in bodies)


def test_a_name_is_used_once(desk: Desk) -> None:
    name = desk.create("succeed")
    with pytest.raises(ClientError, match="must be unique") as refused:
        desk.create("succeed", TrainingJobName=name)
    assert refused.value.response["Error"]["Code"] == "ResourceInUse"
    desk.wait(name)


def test_an_unknown_job_is_a_validation_exception(desk: Desk) -> None:
    with pytest.raises(ClientError, match="Requested resource not found") as refused:
        desk.describe("nobody")
    assert refused.value.response["Error"]["Code"] == "ValidationException"


def test_a_role_that_does_not_exist_is_refused_at_once(desk: Desk) -> None:
    with pytest.raises(ClientError, match="Could not assume role"):
        desk.create("succeed", RoleArn="arn:aws:iam::000000000000:role/nobody-at-all")


def test_an_unknown_image_is_refused_with_those_there_are(desk: Desk) -> None:
    with pytest.raises(ClientError, match="local/microtuning-training:1"):
        desk.create("succeed", AlgorithmSpecification={"TrainingImage": "x/y:1", "TrainingInputMode": "File"})


def test_lists_come_in_pages_and_tags_can_be_added(desk: Desk) -> None:
    prefix = f"page-{uuid.uuid4().hex[:6]}"
    names = [desk.create("succeed", TrainingJobName=f"{prefix}-{number}") for number in range(3)]
    sagemaker = desk.client("sagemaker")
    pages = sagemaker.get_paginator("list_training_jobs").paginate(
        NameContains=prefix, SortBy="Name", PaginationConfig={"PageSize": 2}
    )
    assert [[row["TrainingJobName"] for row in page["TrainingJobSummaries"]] for page in pages] == [
        names[:2],
        names[2:],
    ]
    arn = desk.describe(names[0])["TrainingJobArn"]
    sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "stage", "Value": "local"}])
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "stage", "Value": "local"}]
    for name in names:
        desk.wait(name)


# -- warm pools --------------------------------------------------------------------------------------------------------

KEPT = {
    "ResourceConfig": {
        "InstanceType": "ml.m5.xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 5,
        "KeepAlivePeriodInSeconds": 600,
    }
}


def test_a_matching_job_gets_the_kept_machine_where_there_is_no_other_and_an_update_to_0_ends_it(
    desk: Desk, faults: Any
) -> None:
    first = desk.create("succeed", **KEPT)
    assert desk.describe(first)["WarmPoolStatus"] == {"Status": "InUse"}
    assert desk.wait(first)["WarmPoolStatus"] == {"Status": "Available"}
    faults({"capacity": {"ml.m5.xlarge": 0}})
    second = desk.create("succeed", **KEPT)
    assert desk.wait(second)["TrainingJobStatus"] == "Completed"
    assert "Pending" not in desk.statuses(second)
    pool = desk.describe(first)["WarmPoolStatus"]
    assert (pool["Status"], pool["ReusedByJob"]) == ("Reused", second)
    sagemaker, to_0 = desk.client("sagemaker"), {"KeepAlivePeriodInSeconds": 0}
    sagemaker.update_training_job(TrainingJobName=second, ResourceConfig=to_0)
    pool = desk.describe(second)["WarmPoolStatus"]
    assert (pool["Status"], pool["ResourceRetainedBillableTimeInSeconds"] < 600) == ("Terminated", True)
    with pytest.raises(ClientError, match="its status is Terminated"):
        sagemaker.update_training_job(TrainingJobName=second, ResourceConfig=to_0)
    assert "CapacityError" in desk.wait(desk.create("succeed", **KEPT))["FailureReason"]


def test_an_account_that_may_keep_no_machines_is_told_which_quota_and_may_train_without(
    desk: Desk, faults: Any
) -> None:
    faults({"warm_pool_quota": {"ml.m5.xlarge": 0}})
    with pytest.raises(ClientError, match="for training warm pool usage' is 0 Instances") as refused:
        desk.create("succeed", **KEPT)
    assert refused.value.response["Error"]["Code"] == "ResourceLimitExceeded"
    without = {key: value for key, value in KEPT["ResourceConfig"].items() if key != "KeepAlivePeriodInSeconds"}
    assert "WarmPoolStatus" not in desk.wait(desk.create("succeed", ResourceConfig=without))
