"""The local cloud's life: up, again, down, after a crash, and what it lets nobody do. Clouds of their own, no template."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError

from microtuning_core.domain.errors import LocalCloudError
from microtuning_local import cloud as local
from microtuning_local import deploy, home
from microtuning_local.clients import local_client
from microtuning_local.processes import group_members, is_same_process, started_at, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from microtuning_local.cloud import LocalCloud

pytestmark = pytest.mark.cloud

TINY_CONTAINER = Path(__file__).with_name("tiny_container.py")
ROLE = "local-cloud-tests-job"
BUCKET = "local-cloud-tests"
STAGE_BUCKET = "microtuning-local-000000000000-us-east-1"

HANDLER = """
import json, os
import boto3

def handler(event, context):
    records = event.get("Records")
    if not records:
        return {"greeting": GREETING, "who": boto3.client("sts").get_caller_identity()["Arn"]}
    for record in records:
        body = json.loads(record["body"])
        boto3.client("stepfunctions").send_task_success(taskToken=body["token"], output='{"outcome": "completed"}')
"""


def allow(*actions: str) -> list[dict[str, Any]]:
    statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
    return [{"PolicyName": "p", "PolicyDocument": {"Version": "2012-10-17", "Statement": [statement]}}]


def role(service: str, *actions: str, **properties: Any) -> dict[str, Any]:
    trust = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    document = {"Version": "2012-10-17", "Statement": [trust]}
    body = {"AssumeRolePolicyDocument": document, "Policies": allow(*actions)} | properties
    return {"Type": "AWS::IAM::Role", "Properties": body}


def arn(name: str) -> dict[str, Any]:
    return {"Fn::GetAtt": [name, "Arn"]}


def small_template() -> dict[str, Any]:
    """A function, a queue, and a state machine that waits for a token: the shape of the real one."""
    asl = {
        "StartAt": "Wait",
        "States": {
            "Wait": {
                "Type": "Task",
                "Resource": "arn:aws:states:::sqs:sendMessage.waitForTaskToken",
                "TimeoutSeconds": 60,
                "Parameters": {"QueueUrl": "${Queue}", "MessageBody": {"token.$": "$$.Task.Token"}},
                "End": True,
            }
        },
    }
    queue_rights = ("sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueAttributes")
    code = {
        "S3Bucket": {"Fn::Sub": "cdk-hnb659fds-assets-${AWS::AccountId}-${AWS::Region}"},
        "S3Key": "functions/greet.zip",
    }
    function = {
        "FunctionName": {"Fn::Sub": "microtuning-${Stage}-greet"},
        "Handler": "functions.greet.handler",
        "Runtime": "python3.12",
        "Timeout": 30,
        "Role": arn("FunctionRole"),
        "Code": code,
    }
    mapping = {"EventSourceArn": arn("Queue"), "FunctionName": {"Ref": "Greet"}, "BatchSize": 1}
    machine = {
        "StateMachineName": {"Fn::Sub": "microtuning-${Stage}"},
        "RoleArn": arn("MachineRole"),
        "DefinitionString": {"Fn::Sub": [json.dumps(asl), {"Queue": {"Ref": "Queue"}}]},
    }
    return {
        "Parameters": {"Stage": {"Type": "String", "Default": "dev"}},
        "Resources": {
            "FunctionRole": role("lambda.amazonaws.com", "states:SendTaskSuccess", *queue_rights),
            "MachineRole": role("states.amazonaws.com", "sqs:SendMessage"),
            "Queue": {"Type": "AWS::SQS::Queue", "Properties": {"VisibilityTimeout": 10}},
            "Greet": {"Type": "AWS::Lambda::Function", "Properties": function},
            "Mapping": {"Type": "AWS::Lambda::EventSourceMapping", "Properties": mapping},
            "Machine": {"Type": "AWS::StepFunctions::StateMachine", "Properties": machine},
        },
    }


def with_bucket_and_rule() -> dict[str, Any]:
    """The small template with the stage's bucket, whose new objects are told to a queue."""
    template = small_template()
    pattern = {"source": ["aws.s3"], "detail-type": ["Object Created"]}
    allowed = {"Effect": "Allow", "Principal": "*", "Action": "sqs:SendMessage", "Resource": arn("Heard")}
    rule = {
        "Name": "microtuning-local-specs",
        "EventPattern": pattern,
        "Targets": [{"Id": "queue", "Arn": arn("Heard")}],
    }
    bucket = {
        "BucketName": STAGE_BUCKET,
        "NotificationConfiguration": {"EventBridgeConfiguration": {"EventBridgeEnabled": True}},
    }
    policy = {"Queues": [{"Ref": "Heard"}], "PolicyDocument": {"Version": "2012-10-17", "Statement": [allowed]}}
    template["Resources"] |= {
        "Bucket": {"Type": "AWS::S3::Bucket", "Properties": bucket},
        "Heard": {"Type": "AWS::SQS::Queue", "Properties": {"QueueName": "heard"}},
        "HeardPolicy": {"Type": "AWS::SQS::QueuePolicy", "Properties": policy},
        "Rule": {"Type": "AWS::Events::Rule", "Properties": rule},
    }
    return template


def write_function(folder: Path, greeting: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text("")
    (folder / "greet.py").write_text(f"GREETING = {greeting!r}\n{HANDLER}")
    return folder


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[home.Home]:
    """A state folder for one test, with nothing running in it afterwards."""
    monkeypatch.setenv("MICROTUNING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MICROTUNING_LOCAL_IMAGES", json.dumps({"local/tiny:1": [sys.executable, str(TINY_CONTAINER)]}))
    monkeypatch.setattr(deploy, "kept_template", lambda: None)
    yield home.local_home()
    local.reset()


def start_job(cloud: LocalCloud, name: str, script: str) -> None:
    cloud.client("s3").create_bucket(Bucket=BUCKET)
    trust = role("sagemaker.amazonaws.com")["Properties"]["AssumeRolePolicyDocument"]
    iam = cloud.client("iam")
    iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(trust))
    rights = allow("s3:*", "logs:CreateLogStream", "logs:PutLogEvents")[0]["PolicyDocument"]
    iam.put_role_policy(RoleName=ROLE, PolicyName="p", PolicyDocument=json.dumps(rights))
    cloud.client("sagemaker").create_training_job(
        TrainingJobName=name,
        AlgorithmSpecification={"TrainingImage": "local/tiny:1", "TrainingInputMode": "File"},
        RoleArn=f"arn:aws:iam::000000000000:role/{ROLE}",
        HyperParameters={"script": script},
        OutputDataConfig={"S3OutputPath": f"s3://{BUCKET}/output"},
        CheckpointConfig={"S3Uri": f"s3://{BUCKET}/checkpoints/"},
        ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 5},
        StoppingCondition={"MaxRuntimeInSeconds": 60},
    )


def describe(cloud: LocalCloud, name: str) -> dict[str, Any]:
    return cloud.client("sagemaker").describe_training_job(TrainingJobName=name)


def job_process(cloud: LocalCloud, name: str) -> tuple[int, str]:
    """Pid and start time of a job's process, once it runs."""
    file = cloud.home.jobs / name / "processes.json"
    assert wait_until(file.exists, timeout_s=10)
    pid, started = json.loads(file.read_text())[0]
    return pid, started


def has_printed(cloud: LocalCloud, name: str) -> bool:
    logs, group = cloud.client("logs"), "/aws/sagemaker/TrainingJobs"
    try:
        return bool(logs.filter_log_events(logGroupName=group, logStreamNamePrefix=f"{name}/")["events"])
    except logs.exceptions.ResourceNotFoundException:
        return False


def test_a_deployed_cloud_keeps_everything_over_down_and_up(own_home: home.Home, tmp_path: Path) -> None:
    functions = write_function(tmp_path / "functions", "hello")
    first = local.up(template=small_template(), functions=functions)
    assert local.invoke(first.endpoint, "greet", {})["greeting"] == "hello"
    first.client("s3").create_bucket(Bucket=BUCKET)
    first.client("s3").put_object(Bucket=BUCKET, Key="k", Body=b"kept")
    groups = [first.endpoint.emulator_pid, first.endpoint.sagemaker_pid]
    local.down()
    assert [group_members(group) for group in groups if group] == [[], []]
    assert not own_home.tmp.exists()
    assert not local.status().running

    again = local.up(template=small_template(), functions=functions)
    assert (again.endpoint.endpoint_url, again.endpoint.token) == (first.endpoint.endpoint_url, first.endpoint.token)
    assert again.client("s3").get_object(Bucket=BUCKET, Key="k")["Body"].read() == b"kept"
    assert local.status().stack == "CREATE_COMPLETE"
    assert local.invoke(again.endpoint, "greet", {})["greeting"] == "hello"


def test_changed_code_is_deployed_and_unchanged_code_is_not(own_home: home.Home, tmp_path: Path) -> None:
    functions = write_function(tmp_path / "functions", "hello")
    cloud = local.up(template=small_template(), functions=functions)
    assert not deploy.deploy(cloud.endpoint, small_template(), functions)
    write_function(functions, "good day")
    local.up(template=small_template(), functions=functions)
    assert local.invoke(cloud.endpoint, "greet", {})["greeting"] == "good day"
    assert local.status().stack == "UPDATE_COMPLETE"


def test_a_function_has_its_own_role_and_answers_a_task_token(own_home: home.Home, tmp_path: Path) -> None:
    cloud = local.up(template=small_template(), functions=write_function(tmp_path / "functions", "hello"))
    assert ":assumed-role/microtuning-local-FunctionRole" in local.invoke(cloud.endpoint, "greet", {})["who"]
    states = cloud.client("stepfunctions")
    machine = states.list_state_machines()["stateMachines"][0]["stateMachineArn"]
    execution = states.start_execution(stateMachineArn=machine, input="{}")["executionArn"]
    assert wait_until(lambda: states.describe_execution(executionArn=execution)["status"] == "SUCCEEDED", timeout_s=10)


def test_a_template_that_fails_names_the_resource_and_the_reason(own_home: home.Home, tmp_path: Path) -> None:
    broken = small_template()
    broken["Resources"]["Filter"] = {
        "Type": "AWS::Logs::MetricFilter",
        "Properties": {"LogGroupName": "/no/such/group", "FilterPattern": "", "MetricTransformations": []},
    }
    functions = write_function(tmp_path / "functions", "hello")
    with pytest.raises(LocalCloudError, match=r"Filter \(AWS::Logs::MetricFilter\): .+"):
        local.up(template=broken, functions=functions)
    local.up(template=small_template(), functions=functions)
    assert local.status().stack == "CREATE_COMPLETE"


def test_two_ups_at_once_make_one_cloud(own_home: home.Home) -> None:
    clouds: list[LocalCloud] = []
    threads = [threading.Thread(target=lambda: clouds.append(local.up())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clouds[0].endpoint == clouds[1].endpoint


def test_a_running_cloud_is_found_quickly_and_by_another_process(own_home: home.Home) -> None:
    cloud = local.up()
    began = time.monotonic()
    assert local.ensure_up() == cloud
    assert time.monotonic() - began < 3  # 0.01 s on a quiet machine; a start takes longer than this
    code = "from microtuning_local import cloud; print(cloud.ensure_up().endpoint.emulator_pid)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert int(told.stdout) == cloud.endpoint.emulator_pid


def test_changed_sources_are_deployed_before_the_next_run(own_home: home.Home, monkeypatch: pytest.MonkeyPatch) -> None:
    local.up()
    monkeypatch.setattr(deploy, "kept_template", lambda: {"Resources": {"Q": {"Type": "AWS::SQS::Queue"}}})
    local.ensure_up()
    assert local.status().stack is None
    monkeypatch.setattr(deploy, "sources_stamp", lambda: "another")
    local.ensure_up()
    assert local.status().stack == "CREATE_COMPLETE"


def test_a_killed_emulator_is_started_again_on_its_port(own_home: home.Home) -> None:
    cloud = local.up()
    assert cloud.endpoint.emulator_pid
    os.kill(cloud.endpoint.emulator_pid, signal.SIGKILL)
    assert wait_until(lambda: started_at(cloud.endpoint.emulator_pid or 0) is None, timeout_s=5)
    again = local.ensure_up()
    assert again.endpoint.endpoint_url == cloud.endpoint.endpoint_url
    assert again.endpoint.emulator_pid != cloud.endpoint.emulator_pid
    assert again.endpoint.sagemaker_pid == cloud.endpoint.sagemaker_pid


@pytest.mark.parametrize("which", ["emulator_pid", "sagemaker_pid"])
def test_what_was_killed_a_moment_ago_and_still_seems_to_run_is_started_again(
    own_home: home.Home, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    before = local.up().endpoint
    looks, lost = local.first_silent, []

    def dies_meanwhile(endpoint: home.Endpoint) -> str | None:
        if endpoint == before:
            os.kill(getattr(before, which), signal.SIGKILL)
        return looks(endpoint)

    monkeypatch.setattr(local, "first_silent", dies_meanwhile)
    monkeypatch.setattr(local, "wake", lambda cloud, *, take_up_runs, has_lost: lost.append(has_lost))
    after = local.up().endpoint
    assert local.is_running(after)
    assert getattr(after, which) != getattr(before, which)
    assert lost == [which == "emulator_pid"]  # only the emulator has tables to lose


def test_tables_are_lost_unless_the_emulator_has_saved_them(own_home: home.Home) -> None:
    emulator = local.up().endpoint.emulator_pid
    assert emulator and not own_home.saved_mark.exists()
    local.down()
    assert own_home.saved_mark.exists()
    emulator = local.up().endpoint.emulator_pid
    assert emulator and not own_home.saved_mark.exists()
    os.kill(emulator, signal.SIGKILL)
    local.down()
    assert not own_home.saved_mark.exists()


def test_after_a_crash_the_objects_are_in_the_new_stacks_bucket_and_start_nothing_again(
    own_home: home.Home, tmp_path: Path
) -> None:
    functions, template, bucket = write_function(tmp_path / "functions", "hello"), with_bucket_and_rule(), STAGE_BUCKET
    cloud = local.up(template=template, functions=functions)
    s3, sqs = cloud.client("s3"), cloud.client("sqs")
    s3.put_object(Bucket=bucket, Key="tenants/a/specs/x.yaml", Body=b"spec")
    url = sqs.get_queue_url(QueueName="heard")["QueueUrl"]
    assert sqs.receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"]
    assert cloud.endpoint.emulator_pid
    os.kill(cloud.endpoint.emulator_pid, signal.SIGKILL)
    assert wait_until(lambda: started_at(cloud.endpoint.emulator_pid or 0) is None, timeout_s=5)

    again = local.up(template=template, functions=functions)
    assert again.client("s3").get_object(Bucket=bucket, Key="tenants/a/specs/x.yaml")["Body"].read() == b"spec"
    assert "Messages" not in again.client("sqs").receive_message(QueueUrl=url, WaitTimeSeconds=2)
    again.client("s3").put_object(Bucket=bucket, Key="tenants/a/specs/y.yaml", Body=b"spec")
    assert again.client("sqs").receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"]


def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(own_home: home.Home) -> None:
    own_home.prepare()
    own = home.Endpoint("http://127.0.0.1:1", "http://127.0.0.1:2", "t", emulator_pid=os.getpid(), emulator_started="0")
    home.write_endpoint(own_home, own)
    local.down()
    assert not local.status().running


def test_a_job_in_flight_at_a_restart_has_failed_and_its_checkpoint_was_kept(own_home: home.Home) -> None:
    cloud = local.up()
    start_job(cloud, "in-flight", "count_up")
    pid, started = job_process(cloud, "in-flight")
    assert wait_until((cloud.home.jobs / "in-flight/ml/checkpoints/step-1/manifest.json").exists, timeout_s=10)
    local.down()
    assert not is_same_process(pid, started)
    told = describe(local.up(), "in-flight")
    assert (told["TrainingJobStatus"], told["FailureReason"]) == (
        "Failed",
        "InternalServerError: We encountered an internal error. Please try again.",
    )
    kept = cloud.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="checkpoints/")["Contents"]
    assert "checkpoints/step-1/manifest.json" in [entry["Key"] for entry in kept]


def test_the_job_of_a_killed_server_does_not_outlive_the_next_start(own_home: home.Home) -> None:
    cloud = local.up()
    start_job(cloud, "orphan", "save_on_sigterm")
    pid, started = job_process(cloud, "orphan")
    assert wait_until(lambda: has_printed(cloud, "orphan"), timeout_s=10)  # else its first line breaks on a closed pipe
    assert cloud.endpoint.sagemaker_pid
    os.kill(cloud.endpoint.sagemaker_pid, signal.SIGKILL)
    assert wait_until(lambda: started_at(cloud.endpoint.sagemaker_pid or 0) is None, timeout_s=5)
    assert is_same_process(pid, started)
    again = local.ensure_up()
    assert not is_same_process(pid, started)
    assert wait_until(lambda: describe(again, "orphan")["TrainingJobStatus"] == "Failed", timeout_s=5)


def ask(cloud: LocalCloud, path: str, headers: dict[str, str], verb: str = "POST") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", cloud.endpoint.sagemaker_port, timeout=5)
    connection.request(verb, path, b"{}", headers)
    reply = connection.getresponse()
    answer = reply.status, json.loads(reply.read())
    connection.close()
    return answer


def test_strangers_are_refused(own_home: home.Home) -> None:
    cloud = local.up()
    operation = {"X-Amz-Target": "SageMaker.ListTrainingJobs"}
    signed = operation | {"Authorization": "AWS4-HMAC-SHA256 Credential=x"}
    admin = {"Authorization": f"Bearer {cloud.endpoint.token}"}
    assert ask(cloud, "/", operation)[1]["__type"] == "MissingAuthenticationTokenException"
    assert ask(cloud, "/", signed | {"Origin": "https://example.com"})[0] == 403
    assert ask(cloud, "/", signed | {"Host": "evil.example.com"})[0] == 403
    assert ask(cloud, "/_local/faults", {"Authorization": "Bearer guess"})[0] == 403
    assert ask(cloud, "/_local/health", admin, verb="GET")[0] == 200
    assert ask(cloud, "/_local/credentials", {"Authorization": "guess"}, verb="GET")[0] == 403
    assert (own_home.endpoint_file.stat().st_mode & 0o777, own_home.root.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_role_has_only_its_own_rights(own_home: home.Home) -> None:
    cloud = local.up()
    document = role("sagemaker.amazonaws.com")["Properties"]["AssumeRolePolicyDocument"]
    iam = cloud.client("iam")
    role_arn = iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(document))["Role"]["Arn"]
    statement = {"Effect": "Allow", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{BUCKET}/tenants/a/*"}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    iam.put_role_policy(RoleName=ROLE, PolicyName="p", PolicyDocument=json.dumps(policy))
    cloud.client("s3").create_bucket(Bucket=BUCKET)
    given = cloud.client("sts").assume_role(RoleArn=role_arn, RoleSessionName="test")["Credentials"]
    session = boto3.Session(
        given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"], region_name=cloud.endpoint.region
    )
    s3 = local_client(session, cloud.endpoint, "s3")
    s3.put_object(Bucket=BUCKET, Key="tenants/a/x", Body=b"")
    with pytest.raises(ClientError, match="s3:PutObject"):
        s3.put_object(Bucket=BUCKET, Key="tenants/b/x", Body=b"")


def test_the_emulator_gets_nothing_of_the_users_environment(
    own_home: home.Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-a-real-token")
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    from microtuning_local import emulator

    endpoint = home.Endpoint("http://127.0.0.1:1", "http://127.0.0.1:2", "t")
    assert not {"HF_TOKEN", "AWS_PROFILE", "HTTPS_PROXY"} & set(emulator.environment(own_home, endpoint))


def test_packages_have_the_same_bytes_every_time(tmp_path: Path) -> None:
    functions = write_function(tmp_path / "functions", "hello")
    first, second = (deploy.prepare(small_template(), functions, {"Stage": "local"}) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert list(first.assets.values()) == list(second.assets.values())
    changed = deploy.prepare(small_template(), functions, {"Stage": "other"})
    assert changed.fingerprint != first.fingerprint
