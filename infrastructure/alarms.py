"""ALARMS: what a person should hear of, inside CloudWatch's ten free alarms. Each name is a heading of docs/operations.md.

All of them go to one SNS topic, microtuning-<stage>-alarms; who wants to hear subscribes to it (docs/operations.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sns as sns
from constructs import Construct

from infrastructure.names import PREFIX, function_name, state_machine_arn, sub
from microtuning_core.domain.mirror import LATE_MIRRORS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aws_cdk import aws_kms as kms

WINDOW_S = 300
OWN_METRICS = PREFIX  # POWERTOOLS_METRICS_NAMESPACE of every function


@dataclass(frozen=True)
class Alarm:
    """One row: the metric (namespace, name, dimensions as text with placeholders), and when it is too much.

    Counted in five minutes; without data it is quiet.
    """

    name: str
    why: str
    namespace: str
    metric: str
    dimensions: Mapping[str, str]
    statistic: str = "Sum"
    threshold: int = 1


def _of_function(name: str) -> dict[str, str]:
    return {"FunctionName": function_name(name)}


ALARMS = (
    # on_dead_letter runs only when a dead-letter queue has a message, so its own metrics stand for all of them.
    Alarm("dead-letters", "A message failed four times.", "AWS/Lambda", "Invocations", _of_function("on_dead_letter")),
    Alarm("dead-letters-lost", "A dead letter failed as well.", "AWS/Lambda", "Errors", _of_function("on_dead_letter")),
    Alarm(
        "checkpoints-late",
        "Checkpoints of a run that trains do not reach S3 (microtuning runs show).",
        OWN_METRICS,
        LATE_MIRRORS,
        {"service": "reconcile"},
        statistic="Maximum",
    ),
    Alarm(
        "runs-failed",
        "Runs failed: three in five minutes are rarely three users' mistakes.",
        "AWS/States",
        "ExecutionsFailed",
        {"StateMachineArn": state_machine_arn()},
        threshold=3,
    ),
    Alarm(
        "budget-stopped",
        "A run was stopped because a budget is used up.",
        OWN_METRICS,
        "BudgetStops",
        {"service": "reconcile"},
    ),
    Alarm(
        "throttled",
        "launch_training is throttled: jobs are asked for later than they could be.",
        "AWS/Lambda",
        "Throttles",
        _of_function("launch_training"),
        threshold=10,
    ),
    Alarm(
        "reconcile-fails",
        "Nobody looks after what no event told of.",
        "AWS/Lambda",
        "Errors",
        _of_function("reconcile"),
        threshold=2,
    ),
)


class Alarms(Construct):
    """The alarms of the table, and `topic`, which they notify."""

    def __init__(self, scope: Construct, *, key: kms.IKey) -> None:
        super().__init__(scope, "Alarms")
        self.topic = sns.Topic(self, "Topic", topic_name=sub(f"{PREFIX}-alarms"), master_key=key)
        self.topic.add_to_resource_policy(_our_alarms(self.topic))
        for alarm in ALARMS:
            self._alarm(alarm)

    def _alarm(self, row: Alarm) -> None:
        cloudwatch.CfnAlarm(
            self,
            row.name,
            alarm_name=sub(f"{PREFIX}-{row.name}"),
            alarm_description=f"{row.why} What to do: docs/operations.md, {row.name}.",
            namespace=sub(row.namespace),
            metric_name=row.metric,
            dimensions=[{"name": name, "value": sub(text)} for name, text in row.dimensions.items()],
            statistic=row.statistic,
            period=WINDOW_S,
            threshold=row.threshold,
            evaluation_periods=1,
            comparison_operator="GreaterThanOrEqualToThreshold",
            treat_missing_data="notBreaching",
            alarm_actions=[self.topic.topic_arn],
        )


def _our_alarms(topic: sns.Topic) -> iam.PolicyStatement:
    """CloudWatch may speak to the topic for the alarms of this account only."""
    return iam.PolicyStatement(
        sid="OurAlarms",
        principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
        actions=["sns:Publish"],
        resources=[topic.topic_arn],
        conditions={"StringEquals": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID}},
    )
