"""FUNCTIONS: every Lambda function, one row each; the row says what wakes it and what it may do.

To add one: functions/<name>.py, a row here, and a queue (queues.py) or a placeholder ${<name>_arn} in the state machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from constructs import Construct

from infrastructure.bundles import stage_function
from infrastructure.grants import policy, receive_from, write_own_logs
from infrastructure.names import (
    KEY_ARN,
    PREFIX,
    construct_id,
    function_name,
    resolved_environment,
    state_machine_arn,
    sub,
)
from infrastructure.queues import DEAD_LETTER_QUEUES
from infrastructure.tenant_grants import all_grants

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from infrastructure.grants import Grant
    from infrastructure.parameters import Parameters
    from infrastructure.queues import Queues
    from microtuning_core.domain.tenants import StageTenants

# AWS's public layer: Powertools 3 with pydantic. Version 37 is the one that its install page names
# (docs/getting-started/install.md of aws-powertools/powertools-lambda-python at 05d7b181, read 2026-11-30).
POWERTOOLS_LAYER_VERSION = 37
POWERTOOLS_LAYER_ARN = (
    "arn:aws:lambda:${AWS::Region}:017000801446:layer:AWSLambdaPowertoolsPythonV3-python312-arm64:"
    f"{POWERTOOLS_LAYER_VERSION}"
)
LOGS_KEPT = logs.RetentionDays.ONE_MONTH
MAX_CONCURRENCY = 2  # per queue, and the least that Lambda takes: handlers decide in milliseconds


@dataclass(frozen=True)
class Function:
    """One row. `queues` fill its event sources, `grants` are names in GRANTS, `environment` adds to ENVIRONMENT."""

    name: str
    grants: tuple[str, ...]
    queues: tuple[str, ...] = ()
    batch: int = 10
    memory_mb: int = 512  # a Lambda's share of a processor grows with it; imports alone take a second at 256
    timeout_s: int = 30
    environment: Mapping[str, str] = field(default_factory=dict)


# Reading and writing the record of a run, wherever it is decided.
_RECORD = ("list-objects", "run-record", "runs")
# What the settle loop may find it has to do, whoever runs it.
_SETTLE = (
    *_RECORD,
    "read-checkpoints",
    "read-training-logs",
    "tenants",
    "see-jobs",
    "stop-jobs",
    "end-pools",
    "send-task",
)
_RESTART = ("start-execution", "see-execution")

FUNCTIONS = (
    Function(
        "on_spec_uploaded",
        (*_RECORD, *_RESTART, "tenants", "read-what-specs-name", "write-receipts", "idempotency"),
        queues=("specs",),
        timeout_s=60,
    ),
    Function(
        "on_command",
        (*_SETTLE, *_RESTART, "read-commands", "read-what-specs-name", "write-receipts", "keep-checkpoints"),
        queues=("commands",),
        timeout_s=60,
    ),
    Function("on_training_event", _SETTLE, queues=("training-events",)),
    Function("on_cost_event", (*_RECORD, "read-checkpoints", "ledger", "see-jobs"), queues=("cost-events",)),
    Function("on_checkpoint", (*_RECORD, "read-checkpoints", "prune-checkpoints"), queues=("checkpoints",)),
    Function("on_execution_ended", (*_SETTLE, *_RESTART, "ledger", "see-history"), queues=("execution-events",)),
    Function("admit_run", (*_RECORD, "read-what-specs-name", "tenants", "send-task"), queues=("admissions",), batch=1),
    Function("plan_attempt", (*_RECORD, "read-limits", "read-what-specs-name", "write-config")),
    Function(
        "launch_training",
        (*_SETTLE, "create-jobs", "pass-job-roles", "encrypt-volumes"),
        queues=("launches",),
        batch=1,
    ),
    Function("register_model", (*_RECORD, "read-checkpoints", "read-output", "see-jobs", "write-models")),
    Function("close_run", (*_SETTLE, *_RESTART)),
    Function("reconcile", (*_SETTLE, *_RESTART, "ledger", "see-history", "list-jobs"), queues=("ticks",), timeout_s=60),
    Function("on_dead_letter", (*_RECORD, "send-task", "write-receipts"), queues=DEAD_LETTER_QUEUES),
)
COMMON_GRANTS = ("use-key", "trace")

# The environment of every function. Account and region are read from the machine's ARN, and from them and the stage every
# other name follows (core.domain.names). The ARN is literal: the machine names functions itself.
ENVIRONMENT = {
    "MICROTUNING_STAGE": "${Stage}",
    "STATE_MACHINE_ARN": state_machine_arn(),
    "KMS_KEY_ARN": KEY_ARN,
    "MAX_RUNNING_RUNS": "${MaxRunningRuns}",
    "POWERTOOLS_METRICS_NAMESPACE": PREFIX,  # stages of one account keep their metrics apart
    "POWERTOOLS_LOG_LEVEL": "INFO",
}


class Functions(Construct):
    """`by_name`: the function of each row, with its role, log group and event sources."""

    def __init__(
        self,
        scope: Construct,
        *,
        parameters: Parameters,
        queues: Queues,
        tenants: StageTenants,
        image_uri: str,
        root: Path,
        build: Path,
    ) -> None:
        super().__init__(scope, "Functions")
        self._parameters, self._queues, self._image_uri = parameters, queues, image_uri
        self._grants = all_grants(tenants)
        self.by_name = {
            row.name: self._function(row, stage_function(row.name, root=root, into=build, tenants=tenants))
            for row in FUNCTIONS
        }

    def _function(self, row: Function, bundle: Path) -> lambda_.Function:
        scope = Construct(self, construct_id(row.name))
        function = lambda_.Function(
            scope,
            "Function",
            function_name=sub(function_name(row.name)),
            runtime=lambda_.Runtime.PYTHON_3_12,
            architecture=lambda_.Architecture.ARM_64,
            handler=f"functions.{row.name}.handler",
            code=lambda_.Code.from_asset(str(bundle)),
            role=self._role(scope, row),
            log_group=_log_group(scope, row.name),
            memory_size=row.memory_mb,
            timeout=cdk.Duration.seconds(row.timeout_s),
            environment=self._environment(row),
        )
        _only_on_aws(function, self._parameters.on_aws)
        for queue in row.queues:
            self._read_from(queue, function, row.batch)
        return function

    def _role(self, scope: Construct, row: Function) -> iam.Role:
        """`tenants` decide what some grants of a row name: whose roles are passed, whose keys are used."""
        grants: dict[str, Grant] = {"own-logs": write_own_logs(row.name)}
        if row.queues:
            grants["own-queues"] = receive_from(row.queues)
        grants |= {name: self._grants[name] for name in (*row.grants, *COMMON_GRANTS)}
        return iam.Role(
            scope,
            "Role",
            assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
            description=sub(f"What {function_name(row.name)} may do"),
            inline_policies={"grants": policy(grants)},
        )

    def _environment(self, row: Function) -> dict[str, str]:
        own = {"POWERTOOLS_SERVICE_NAME": row.name, "TRAINING_IMAGE_URI": self._image_uri}
        return own | resolved_environment({**ENVIRONMENT, **row.environment})

    def _read_from(self, queue: str, function: lambda_.Function, batch: int) -> None:
        function.add_event_source_mapping(
            construct_id(queue),
            event_source_arn=self._queues.by_name[queue].queue_arn,
            batch_size=batch,
            max_concurrency=MAX_CONCURRENCY,
            report_batch_item_failures=True,
        )


def _log_group(scope: Construct, name: str) -> logs.LogGroup:
    return logs.LogGroup(
        scope,
        "Logs",
        log_group_name=sub(f"/microtuning/${{Stage}}/{name}"),
        retention=LOGS_KEPT,
        removal_policy=cdk.RemovalPolicy.DESTROY,
    )


def _only_on_aws(function: lambda_.Function, on_aws: cdk.CfnCondition) -> None:
    """Layer and tracing where they exist; the emulator's own environment has Powertools and pydantic."""
    resource = cast("lambda_.CfnFunction", function.node.default_child)
    layers = cdk.Fn.condition_if(on_aws.logical_id, [sub(POWERTOOLS_LAYER_ARN)], cdk.Aws.NO_VALUE)
    resource.add_property_override("Layers", layers)
    resource.add_property_override(
        "TracingConfig.Mode", cdk.Fn.condition_if(on_aws.logical_id, "Active", "PassThrough")
    )
