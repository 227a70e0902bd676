"""The state machine from workflows/training.asl.json. Its placeholders are the two queues and the functions it asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk import aws_stepfunctions as stepfunctions
from constructs import Construct

from infrastructure.functions import LOGS_KEPT
from infrastructure.grants import GRANTS, Grant, policy
from infrastructure.names import PREFIX, STATE_MACHINE, function_name, queue_arn, regional_arn, sub

if TYPE_CHECKING:
    from infrastructure.functions import Functions
    from infrastructure.parameters import Parameters
    from infrastructure.queues import Queues

DEFINITION = Path(__file__).parent / "workflows" / "training.asl.json"
QUEUES_ASKED = {"admit_queue_url": "admissions", "launch_queue_url": "launches"}
FUNCTIONS_ASKED = ("plan_attempt", "register_model", "close_run")

_LOG_DELIVERY = Grant(  # log delivery has no resource to name
    (
        "logs:CreateLogDelivery",
        "logs:GetLogDelivery",
        "logs:UpdateLogDelivery",
        "logs:DeleteLogDelivery",
        "logs:ListLogDeliveries",
        "logs:PutResourcePolicy",
        "logs:DescribeResourcePolicies",
        "logs:DescribeLogGroups",
    ),
    ("*",),
)


class Workflow(Construct):
    """`state_machine`: logs what fails, traced on AWS."""

    def __init__(self, scope: Construct, *, parameters: Parameters, queues: Queues, functions: Functions) -> None:
        super().__init__(scope, "Workflow")
        self.state_machine = stepfunctions.CfnStateMachine(
            self,
            "StateMachine",
            state_machine_name=sub(STATE_MACHINE),
            role_arn=self._role().role_arn,
            definition=definition(),
            definition_substitutions={
                **{name: queues.by_name[queue].queue_url for name, queue in QUEUES_ASKED.items()},
                **{f"{name}_arn": functions.by_name[name].function_arn for name in FUNCTIONS_ASKED},
            },
            logging_configuration=self._logging(),
        )
        self.state_machine.add_property_override(
            "TracingConfiguration.Enabled", cdk.Fn.condition_if(parameters.on_aws.logical_id, True, False)
        )

    def _role(self) -> iam.Role:
        functions = tuple(regional_arn("lambda", f"function:{function_name(name)}") for name in FUNCTIONS_ASKED)
        grants = {
            "put-into-queues": Grant(("sqs:SendMessage",), tuple(map(queue_arn, QUEUES_ASKED.values()))),
            "ask-functions": Grant(("lambda:InvokeFunction",), functions),
            "deliver-logs": _LOG_DELIVERY,
            "trace": GRANTS["trace"],
        }
        return iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("states.amazonaws.com"),
            description=sub(f"What the state machine {STATE_MACHINE} may do"),
            inline_policies={"grants": policy(grants)},
        )

    def _logging(self) -> stepfunctions.CfnStateMachine.LoggingConfigurationProperty:
        group = logs.LogGroup(
            self,
            "Logs",
            # Under /aws/vendedlogs/ deliveries do not use up the account's one resource policy of 5,120 characters.
            log_group_name=sub(f"/aws/vendedlogs/states/{PREFIX}"),
            retention=LOGS_KEPT,
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        target = stepfunctions.CfnStateMachine.CloudWatchLogsLogGroupProperty(log_group_arn=group.log_group_arn)
        return stepfunctions.CfnStateMachine.LoggingConfigurationProperty(
            level="ERROR",
            include_execution_data=False,
            destinations=[stepfunctions.CfnStateMachine.LogDestinationProperty(cloud_watch_logs_log_group=target)],
        )


def definition() -> dict[str, Any]:
    """The definition with its placeholders, as written."""
    states: dict[str, Any] = json.loads(DEFINITION.read_text(encoding="utf-8"))
    return states
