"""The stage under test: the session's local cloud, with a training container that is done in a moment."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.aws.admissions import AdmissionStore
from microtuning_core.domain.job import job_facts
from microtuning_core.domain.layout import command_key, receipt_key, spec_key
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.run import Run
from microtuning_core.usecases.services import Services, StageSettings
from microtuning_local import cloud as local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from microtuning_core.domain.job import JobFacts
    from microtuning_core.domain.settle import WaitingState
    from microtuning_local.cloud import LocalCloud

FAST_IMAGE = "local/fast:1"
PATIENCE_S = 60.0
ROWS = "".join(json.dumps({"prompt": f"{n}>", "completion": str(n)}) + "\n" for n in range(16))


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true answer of `condition`; an AssertionError that names `what` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what() if callable(what) else what}")


@dataclass
class StageUnderTest:
    """The deployed stage as its user, and as a person with the console, sees it."""

    cloud: LocalCloud
    tenant: str = "default"
    clients: dict[str, Any] = field(default_factory=dict)

    names = StackNames("local", "000000000000", "us-east-1")
    until = staticmethod(until)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = self.cloud.client(service)
        return self.clients[service]

    @cached_property
    def services(self) -> Services:
        """The stage's own stores, with the rights of root."""
        return Services(self.cloud, StageSettings(self.names, FAST_IMAGE, 4))  # a cloud makes clients as a session does

    # -- objects and specs ---------------------------------------------------------------------------------------------

    def put(self, key: str, body: str | bytes) -> str:
        """The etag, without quotes."""
        data = body.encode() if isinstance(body, str) else body
        answer = self.client("s3").put_object(Bucket=self.names.bucket, Key=key, Body=data)
        return str(answer["ETag"]).strip('"')

    def keys(self, prefix: str) -> list[str]:
        pages = self.client("s3").get_paginator("list_objects_v2").paginate(Bucket=self.names.bucket, Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def data_uri(self) -> str:
        key = f"tenants/{self.tenant}/datasets/test/rows.jsonl"
        if not self.keys(key):
            self.put(key, ROWS)
        return f"s3://{self.names.bucket}/{key}"

    def spec(self, behaviour: str = "succeed", **changes: Any) -> dict[str, Any]:
        """A small supervised run, whose container does as `behaviour` says."""
        compute = {"instance": "ml.m5.large", "spot": False} | changes.pop("compute", {})
        base = {
            "name": changes.pop("name", behaviour.replace("_", " ")),
            "model": {"arch": "Transformer"},
            "algorithm": {"type": "sft", "epochs": 1},
            "data": {"train": self.data_uri(), "eval": self.data_uri()},
            "compute": compute,
            "environment_variables": {"BEHAVIOUR": behaviour},
        }
        return base | changes

    def upload(self, spec: dict[str, Any] | str, file: str = "") -> tuple[str, str]:
        """`(file, etag)` of the spec, put as a user would."""
        file = file or f"{uuid.uuid4().hex[:12]}.yaml"
        body = spec if isinstance(spec, str) else json.dumps(spec, indent=1)
        return file, self.put(spec_key(self.tenant, file), body)

    def receipt(self, file: str, etag: str) -> dict[str, Any]:
        """The answer to this very upload."""

        def answered() -> dict[str, Any] | None:
            receipt = self.services.objects.read_json(receipt_key(self.tenant, file))
            return receipt if receipt and receipt["etag"] == etag else None

        answer: dict[str, Any] = until(answered, f"no receipt for {file}")
        return answer

    def submit(self, behaviour: str = "succeed", **changes: Any) -> str:
        """The run_id in the receipt of an uploaded spec."""
        receipt = self.receipt(*self.upload(self.spec(behaviour, **changes)))
        assert "run_id" in receipt, receipt
        return str(receipt["run_id"])

    def cancel(self, run_id: str) -> None:
        command = {"schema_version": 1, "verb": "cancel", "issued_at": datetime.now(UTC).isoformat(), "client_id": "t"}
        self.put(command_key(run_id, uuid.uuid4().hex), json.dumps(command))

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> Run:
        return self.services.runs.get(run_id)

    def when(self, run_id: str, condition: Callable[[Run], Any], timeout_s: float = PATIENCE_S) -> Run:
        """The run, once `condition` holds of it."""

        def holds() -> Run | None:
            run = self.run(run_id)
            return run if condition(run) else None

        run: Run = until(holds, lambda: self.story(run_id), timeout_s)
        return run

    def ended(self, run_id: str, timeout_s: float = PATIENCE_S) -> Run:
        return self.when(run_id, lambda run: run.is_final, timeout_s)

    def ended_and_paid(self, run_id: str) -> Run:
        """Also for its executions, of whose end no event tells where it was a good one: a tick counts them."""
        self.execution_ended(self.ended(run_id).execution)
        local.tick()
        return self.when(run_id, lambda run: run.is_final and run.costs_are_final)

    def training(self, run_id: str) -> Run:
        """The run, once its container has shown a sign of life."""
        return self.when(run_id, lambda run: run.liveness is not None)

    def job(self, job_name: str) -> JobFacts:
        return job_facts(self.client("sagemaker").describe_training_job(TrainingJobName=job_name))

    def has_ended(self, job_name: str) -> bool:
        """Also before there is a job: that it is asked for is written before it is made."""
        job = self.services.jobs.describe(job_name)
        return job is not None and job.is_terminal

    @contextmanager
    def a_table(self) -> Iterator[str]:
        """The name of a table that nobody else uses."""
        dynamodb, table = self.client("dynamodb"), f"tests-{uuid.uuid4().hex[:8]}"
        keys = [("pk", "HASH"), ("sk", "RANGE")]
        dynamodb.create_table(
            TableName=table,
            KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in keys],
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name, _ in keys],
            BillingMode="PAY_PER_REQUEST",
        )
        yield table
        dynamodb.delete_table(TableName=table)

    def copy_of_job(self, job_name: str, name: str) -> None:
        """Another job like it, made by somebody; it keeps its checkpoints to itself."""
        told = self.client("sagemaker").describe_training_job(TrainingJobName=job_name)
        kept = ("AlgorithmSpecification", "RoleArn", "InputDataConfig", "OutputDataConfig", "ResourceConfig",
                "StoppingCondition", "Environment")  # fmt: skip
        self.client("sagemaker").create_training_job(TrainingJobName=name, **{key: told[key] for key in kept})

    def story(self, run_id: str) -> str:
        """What a person would read to understand a run."""
        run = self.run(run_id)
        events = [f"{each['kind']}: {each['message']}" for each in self.services.runs.events(run_id)]
        return f"{run.status} verdict={run.verdict} reason={run.reason} {run.execution} {events}"

    def events(self, run_id: str, kind: str) -> list[str]:
        return [each["message"] for each in self.services.runs.events(run_id) if each["kind"] == kind]

    def job_log(self, job_name: str) -> list[str]:
        logs = self.client("logs")
        streams = logs.describe_log_streams(
            logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix=f"{job_name}/"
        )["logStreams"]
        return [
            event["message"]
            for stream in streams
            for event in logs.get_log_events(
                logGroupName="/aws/sagemaker/TrainingJobs", logStreamName=stream["logStreamName"], startFromHead=True
            )["events"]
        ]

    # -- the machine ---------------------------------------------------------------------------------------------------

    def execution(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.client("stepfunctions").describe_execution(
            executionArn=self.names.execution_arn(name)
        )
        return answer

    def executions(self) -> list[str]:
        pages = self.client("stepfunctions").get_paginator("list_executions")
        found = pages.paginate(stateMachineArn=self.names.state_machine_arn)
        return [each["name"] for page in found for each in page["executions"]]

    def execution_ended(self, name: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            told = self.execution(name)
            return told if told["status"] != "RUNNING" else None

        told: dict[str, Any] = until(over, f"execution {name} still runs", timeout_s)
        return told

    def start_by_hand(self, state: Any, name: str = "") -> str:
        """ "Start execution" in the console; the execution's name."""
        name = name or f"by-hand-{uuid.uuid4().hex[:8]}"
        self.client("stepfunctions").start_execution(
            stateMachineArn=self.names.state_machine_arn, name=name, input=json.dumps(state)
        )
        return name

    # -- queues and functions ------------------------------------------------------------------------------------------

    def queue_url(self, queue: str) -> str:
        url: str = self.client("sqs").get_queue_url(QueueName=f"{self.names.stack}-{queue}")["QueueUrl"]
        return url

    def send(self, queue: str, body: Any) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.client("sqs").send_message(QueueUrl=self.queue_url(queue), MessageBody=text)

    def invoke(self, function: str, event: dict[str, Any]) -> dict[str, Any]:
        return local.invoke(self.cloud.endpoint, function, event)

    def deliver(self, function: str, *bodies: Any) -> list[str]:
        """Hands the function one batch of messages m-1, m-2 …; the ids of those that it gives back."""
        records = [
            {
                "messageId": f"m-{number}",
                "receiptHandle": "rh",
                "body": body if isinstance(body, str) else json.dumps(body),
                "attributes": {"ApproximateReceiveCount": "1", "SentTimestamp": str(int(time.time() * 1000))},
                "messageAttributes": {},
                "eventSource": "aws:sqs",
                "eventSourceARN": f"arn:aws:sqs:us-east-1:000000000000:{self.names.stack}-tests",
                "awsRegion": "us-east-1",
            }
            for number, body in enumerate(bodies, 1)
        ]
        answer = self.invoke(function, {"Records": records})
        return [each["itemIdentifier"] for each in answer["batchItemFailures"]]

    @contextmanager
    def quick_retries(self, queue: str, visibility_s: int = 1) -> Iterator[None]:
        """Messages that failed come back after a second."""
        sqs, url = self.client("sqs"), self.queue_url(queue)
        before = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["VisibilityTimeout"])["Attributes"]
        sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": str(visibility_s)})
        try:
            yield
        finally:
            sqs.set_queue_attributes(QueueUrl=url, Attributes=before)

    @contextmanager
    def held_back(self, queue: str) -> Iterator[None]:
        """Nobody reads the queue meanwhile."""
        functions, arn = self.client("lambda"), f"arn:aws:sqs:us-east-1:000000000000:{self.names.stack}-{queue}"
        (mapping,) = functions.list_event_source_mappings(EventSourceArn=arn)["EventSourceMappings"]
        functions.update_event_source_mapping(UUID=mapping["UUID"], Enabled=False)
        try:
            yield
        finally:
            functions.update_event_source_mapping(UUID=mapping["UUID"], Enabled=True)

    def peek(self, queue: str) -> str:
        """The body of the next message of a queue that is held back; it stays there."""

        def message() -> str | None:
            url = self.queue_url(queue)
            answer = self.client("sqs").receive_message(QueueUrl=url, VisibilityTimeout=0, WaitTimeSeconds=1)
            return next((each["Body"] for each in answer.get("Messages", [])), None)

        body: str = until(message, f"nothing came into {queue}")
        return body

    def drained(self, queue: str) -> None:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]

        def empty() -> bool:
            answer = self.client("sqs").get_queue_attributes(QueueUrl=self.queue_url(queue), AttributeNames=names)
            return all(answer["Attributes"][name] == "0" for name in names)

        until(empty, f"{queue} is not empty")

    def waiting(self, run_id: str, execution: str = "") -> list[WaitingState]:
        """The states of the machine that wait for the run, of one execution or of all."""
        return [each for each in self.services.runs.tokens(run_id) if execution in ("", each.execution)]

    def object_event(self, key: str, etag: str, sequencer: str = "0065A1B2", size: int = 100) -> dict[str, Any]:
        """ "Object Created" as EventBridge carries it."""
        stored = {"key": key, "etag": etag, "size": size, "sequencer": sequencer}
        detail = {"bucket": {"name": self.names.bucket}, "object": stored}
        return {"source": "aws.s3", "detail-type": "Object Created", "time": "2026-01-02T03:04:05Z", "detail": detail}

    def job_event(self, job_name: str, status: str = "Completed", secondary: str = "Completed") -> dict[str, Any]:
        detail = {"TrainingJobName": job_name, "TrainingJobStatus": status, "SecondaryStatus": secondary}
        kind = "SageMaker Training Job State Change"
        return {"source": "local.sagemaker", "detail-type": kind, "time": "2026-01-02T03:04:05Z", "detail": detail}

    @contextmanager
    def without_grant(self, role_arn: str, sid: str) -> Iterator[None]:
        """The role's policy without the statement of that Sid."""
        iam, role = self.client("iam"), role_arn.rsplit("/", 1)[1]
        policy_name = iam.list_role_policies(RoleName=role)["PolicyNames"][0]
        whole = iam.get_role_policy(RoleName=role, PolicyName=policy_name)["PolicyDocument"]
        kept = [each for each in whole["Statement"] if each["Sid"] != sid]
        assert len(kept) == len(whole["Statement"]) - 1, [each["Sid"] for each in whole["Statement"]]
        put = {"RoleName": role, "PolicyName": policy_name}
        iam.put_role_policy(**put, PolicyDocument=json.dumps(whole | {"Statement": kept}))
        try:
            yield
        finally:
            iam.put_role_policy(**put, PolicyDocument=json.dumps(whole))

    def role_of(self, function: str) -> str:
        arn: str = self.client("lambda").get_function_configuration(FunctionName=self.names.function(function))["Role"]
        return arn


@pytest.fixture(scope="module")
def stage(cloud: LocalCloud) -> Iterator[StageUnderTest]:
    """The session's cloud, whose jobs run the fast container while the tests of one file last."""
    functions, name = cloud.client("lambda"), StageUnderTest.names.function("launch_training")
    variables = functions.get_function_configuration(FunctionName=name)["Environment"]["Variables"]
    # Two tries of a call: what a queue tries again must not be hidden behind boto3's own patience.
    fast = {"Variables": variables | {"TRAINING_IMAGE_URI": FAST_IMAGE, "AWS_MAX_ATTEMPTS": "2"}}
    functions.update_function_configuration(FunctionName=name, Environment=fast)
    yield StageUnderTest(cloud)
    functions.update_function_configuration(FunctionName=name, Environment={"Variables": variables})


@pytest.fixture
def faults(cloud: LocalCloud) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Faults of the local SageMaker, gone after the test."""
    yield local.faults
    local.faults({})


@pytest.fixture
def own_admissions(cloud: LocalCloud) -> Iterator[AdmissionStore]:
    """Slots and queue in a table that only this test uses."""
    with StageUnderTest(cloud).a_table() as table:
        yield AdmissionStore(cloud.client("dynamodb"), table)
