"""Text with ${Stage}, ${AWS::Region} and the like in it, and how it becomes CloudFormation.

The tables of this package are plain data: names, ARNs and event patterns are written as text with CloudFormation's own
placeholders, and `resolved` turns each such text into an Fn::Sub when the stack is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aws_cdk as cdk

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "microtuning-${Stage}"
BUCKET = PREFIX + "-${AWS::AccountId}-${AWS::Region}"
TRAINING_LOGS_ARN = "arn:${AWS::Partition}:logs:${AWS::Region}:${AWS::AccountId}:log-group:/aws/sagemaker/TrainingJobs"
BUCKET_ARN = "arn:${AWS::Partition}:s3:::" + BUCKET
JOB_ROLE = PREFIX + "-job"
JOB_ROLE_ARN = "arn:${AWS::Partition}:iam::${AWS::AccountId}:role/" + JOB_ROLE
STATE_MACHINE = PREFIX
TRAINING_JOBS_ARN = "arn:${AWS::Partition}:sagemaker:${AWS::Region}:${AWS::AccountId}:training-job/${Stage}-*"
KEY_ID = "StageKey"  # the logical id of the KMS key
KEY_ARN = f"${{{KEY_ID}.Arn}}"
ON_AWS = "IsOnAws"  # the logical id of the condition


def regional_arn(service: str, resource: str) -> str:
    """An ARN of this account and region, as text with placeholders."""
    return f"arn:${{AWS::Partition}}:{service}:${{AWS::Region}}:${{AWS::AccountId}}:{resource}"


def queue_arn(queue: str) -> str:
    return regional_arn("sqs", f"{PREFIX}-{queue}")


def rule_arn(rule: str) -> str:
    return regional_arn("events", f"rule/{PREFIX}-{rule}")


def table_arn(table: str) -> str:
    return regional_arn("dynamodb", f"table/{PREFIX}-{table}")


def state_machine_arn() -> str:
    return regional_arn("states", f"stateMachine:{STATE_MACHINE}")


def function_name(name: str) -> str:
    """`on_command` is deployed as microtuning-<stage>-on-command."""
    return f"{PREFIX}-{name.replace('_', '-')}"


def objects_arn(*patterns: str) -> tuple[str, ...]:
    """ARNs of the objects of all tenants below each pattern, such as `runs/*/run.json`."""
    return tuple(f"{BUCKET_ARN}/tenants/*/{pattern}" for pattern in patterns)


def construct_id(name: str) -> str:
    """`on_command` and `training-events` become OnCommand and TrainingEvents."""
    return "".join(word.capitalize() for word in name.replace("-", "_").split("_"))


def sub(text: str) -> str:
    """The text as CDK token: an Fn::Sub if it has a placeholder, else itself."""
    return cdk.Fn.sub(text) if "${" in text else text


def resolved(value: Any) -> Any:
    """A copy of nested dicts and sequences in which every text with a placeholder is an Fn::Sub."""
    if isinstance(value, str):
        return sub(value)
    if isinstance(value, dict):
        return {key: resolved(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(item) for item in value]
    return value


def resolved_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: sub(text) for name, text in environment.items()}
