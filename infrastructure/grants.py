"""GRANTS: what a role may be allowed, under the name by which a row of FUNCTIONS asks for it.

A grant is one IAM statement: actions on literal resources. To let a handler do more, add a row here and its name in
FUNCTIONS; the local cloud enforces these very statements, so a missing one fails on the laptop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aws_cdk as cdk
from aws_cdk import aws_iam as iam

from infrastructure.names import (
    BUCKET_ARN,
    KEY_ARN,
    ON_AWS,
    PREFIX,
    TRAINING_LOGS_ARN,
    construct_id,
    jobs_arn,
    objects_arn,
    queue_arn,
    regional_arn,
    resolved,
    state_machine_arn,
    sub,
    table_arn,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_READ = ("s3:GetObject",)
_WRITE = ("s3:PutObject", "s3:AbortMultipartUpload")
_ROWS = (
    "dynamodb:GetItem",
    "dynamodb:BatchGetItem",
    "dynamodb:Query",
    "dynamodb:ConditionCheckItem",
    "dynamodb:PutItem",
    "dynamodb:UpdateItem",
    "dynamodb:DeleteItem",
)
_RECEIVE = (
    "sqs:ReceiveMessage",
    "sqs:DeleteMessage",
    "sqs:ChangeMessageVisibility",
    "sqs:GetQueueAttributes",
    "sqs:GetQueueUrl",
)
_EXECUTIONS_ARN = regional_arn("states", f"execution:{PREFIX}:*")


@dataclass(frozen=True)
class Grant:
    """`actions` on `resources` (text with placeholders, see names.py), under `conditions`.

    `on_emulator`: AWS compares the action with `resources`, the emulator with this.
    """

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    conditions: dict[str, Any] = field(default_factory=dict)
    on_emulator: str = ""


def encrypt_volumes(*keys: str) -> Grant:
    """CreateGrant lets the machine's volume use the key; for AWS's own resources only."""
    return Grant(("kms:CreateGrant", "kms:DescribeKey"), keys, {"Bool": {"kms:GrantIsForAWSResource": "true"}})


def use_keys(*keys: str) -> Grant:
    return Grant(("kms:Decrypt", "kms:GenerateDataKey"), keys)


def create_jobs(jobs: str) -> Grant:
    return Grant(("sagemaker:CreateTrainingJob", "sagemaker:AddTags"), (jobs,))


def pass_roles(*roles: str) -> Grant:
    """PassRole of these very roles, and to SageMaker alone."""
    return Grant(("iam:PassRole",), roles, {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}})


GRANTS = {
    # Objects. IfExists: HEAD and GET carry no prefix, and only with ListBucket is a missing object 404 rather than 403.
    "list-objects": Grant(("s3:ListBucket",), (BUCKET_ARN,), {"StringLikeIfExists": {"s3:prefix": "tenants/*"}}),
    # The spec itself and the data, code and model it names: a spec may name anything of its tenant. And what it would cost.
    "read-what-specs-name": Grant(_READ, (*objects_arn("*"), f"{BUCKET_ARN}/prices/${{AWS::Region}}.json")),
    "read-commands": Grant(_READ, objects_arn("commands/*")),
    "read-checkpoints": Grant(_READ, objects_arn("runs/*/checkpoints/*")),
    "read-output": Grant(_READ, objects_arn("runs/*/output/*")),
    "keep-checkpoints": Grant(_READ + _WRITE, objects_arn("runs/*/kept/*")),
    "prune-checkpoints": Grant(("s3:DeleteObject",), objects_arn("runs/*/checkpoints/*")),
    "write-receipts": Grant(_WRITE, objects_arn("receipts/*")),
    "write-config": Grant(_WRITE, objects_arn("runs/*/config/*")),
    "run-record": Grant(_READ + _WRITE, objects_arn("runs/*/run.json")),
    "write-models": Grant(_READ + _WRITE, objects_arn("models/*")),
    # Rows.
    "runs": Grant(_ROWS, (table_arn("runs"), table_arn("runs") + "/index/*")),
    "ledger": Grant(_ROWS, (table_arn("ledger"),)),
    "tenants": Grant(_ROWS, (table_arn("tenants"),)),
    "read-limits": Grant(("dynamodb:Query",), (table_arn("tenants"),)),
    "idempotency": Grant(_ROWS, (table_arn("idempotency"),)),
    # The state machine.
    "start-execution": Grant(("states:StartExecution",), (state_machine_arn(),)),
    "see-execution": Grant(("states:DescribeExecution",), (_EXECUTIONS_ARN,)),
    "see-history": Grant(("states:GetExecutionHistory",), (_EXECUTIONS_ARN,)),
    "send-task": Grant(
        ("states:SendTaskSuccess", "states:SendTaskFailure", "states:SendTaskHeartbeat"),
        (state_machine_arn(),),
        on_emulator="*",
    ),
    # Training jobs.
    "read-training-logs": Grant(("logs:DescribeLogStreams",), (TRAINING_LOGS_ARN, f"{TRAINING_LOGS_ARN}:*")),
    "see-jobs": Grant(("sagemaker:DescribeTrainingJob", "sagemaker:ListTags"), (jobs_arn(),)),
    "list-jobs": Grant(("sagemaker:ListTrainingJobs",), ("*",)),  # has no resource to name
    "stop-jobs": Grant(("sagemaker:StopTrainingJob",), (jobs_arn(),)),
    "end-pools": Grant(("sagemaker:UpdateTrainingJob",), (jobs_arn(),)),
    "create-jobs": create_jobs(jobs_arn()),
    "encrypt-volumes": encrypt_volumes(KEY_ARN),
    # Everyone.
    "use-key": use_keys(KEY_ARN),
    "trace": Grant(("xray:PutTraceSegments", "xray:PutTelemetryRecords"), ("*",)),  # have no resource to name
}


def write_own_logs(name: str) -> Grant:
    """Streams and lines of the function's own log group, which the stack makes."""
    group = regional_arn("logs", f"log-group:/microtuning/${{Stage}}/{name}:*")
    return Grant(("logs:CreateLogStream", "logs:PutLogEvents"), (group,))


def receive_from(queues: Iterable[str]) -> Grant:
    return Grant(_RECEIVE, tuple(queue_arn(queue) for queue in queues))


def statement(name: str, grant: Grant, effect: iam.Effect = iam.Effect.ALLOW) -> iam.PolicyStatement:
    """The grant as IAM statement whose Sid is its name; with DENY, what is refused whatever else allows it."""
    return iam.PolicyStatement(
        effect=effect,
        sid=construct_id(name),
        actions=list(grant.actions),
        resources=_resources(grant),
        conditions=resolved(grant.conditions) or None,
    )


def _resources(grant: Grant) -> list[str]:
    resources: list[str] = resolved(grant.resources)
    if not grant.on_emulator:
        return resources
    instead = sub(grant.on_emulator)
    return [cdk.Token.as_string(cdk.Fn.condition_if(ON_AWS, resource, instead)) for resource in resources]


def policy(grants: Mapping[str, Grant], denied: Mapping[str, Grant] | None = None) -> iam.PolicyDocument:
    refusals = [statement(name, grant, iam.Effect.DENY) for name, grant in (denied or {}).items()]
    return iam.PolicyDocument(statements=[*(statement(name, grant) for name, grant in grants.items()), *refusals])
