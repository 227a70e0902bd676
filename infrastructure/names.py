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
JOB_ROLE = PREFIX + "-job"  # of tenants without a role of their own
LAUNCHER_ROLE = PREFIX + "-launcher"
USER_ROLE = PREFIX + "-user"
# What IAM puts in when it decides: the tenant that a role session is tagged with. (Fn::Sub makes ${ of ${!.)
TAGGED_TENANT = "${!aws:PrincipalTag/tenant}"
STATE_MACHINE = PREFIX
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


def role_arn(role: str) -> str:
    return f"arn:${{AWS::Partition}}:iam::${{AWS::AccountId}}:role/{role}"


def job_role(tenant: str) -> str:
    return f"{JOB_ROLE}-{tenant}"


def user_role(tenant: str) -> str:
    return f"{USER_ROLE}-{tenant}"


def tenant_key_id(tenant: str) -> str:
    """The logical id of a tenant's own KMS key."""
    return f"TenantKey{tenant.capitalize()}"


def tenant_key_arn(tenant: str) -> str:
    return f"${{{tenant_key_id(tenant)}.Arn}}"


def tenant_key_alias(tenant: str) -> str:
    return f"alias/{PREFIX}-{tenant}"


def objects_arn(*patterns: str, tenant: str = "*") -> tuple[str, ...]:
    """ARNs of a tenant's objects, or those of all, below each pattern, such as `runs/*/run.json`."""
    return tuple(f"{BUCKET_ARN}/tenants/{tenant}/{pattern}" for pattern in patterns)


def jobs_arn(tenant: str = "") -> str:
    """Training jobs of a tenant, or of the whole stage. No tenant's name goes on with a hyphen (core.domain.names)."""
    return regional_arn("sagemaker", f"training-job/${{Stage}}-{tenant}-*" if tenant else "training-job/${Stage}-*")


def log_streams_arn(tenant: str) -> str:
    """The log streams of a tenant's training jobs."""
    return f"{TRAINING_LOGS_ARN}:log-stream:${{Stage}}-{tenant}-*"


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
