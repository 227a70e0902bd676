"""ALARMS: what a person should hear of. Each name is a heading of docs/operations.md.

All of them go to one SNS topic, microtuning-<stage>-alarms; who wants to hear subscribes to it (docs/operations.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sns as sns
from constructs import Construct

from infrastructure.names import PREFIX, function_name, state_machine_arn, sub
from microtuning_core.domain.budget import STOPS, WARNINGS
from microtuning_core.domain.mirror import LATE_MIRRORS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aws_cdk import aws_kms as kms

    from infrastructure.parameters import Parameters

WINDOW_S = 300
OWN_METRICS = PREFIX  # POWERTOOLS_METRICS_NAMESPACE of every function

# The functions that settle runs, and so may find a budget used up. An alarm takes at most ten metrics.
SETTLING = ("reconcile", "on_cost_event", "on_checkpoint", "on_training_event", "on_command", "on_execution_ended",
            "launch_training", "close_run")  # fmt: skip


@dataclass(frozen=True)
class Alarm:
    """One row: the metric (namespace, name, dimensions as text with placeholders), and when it is too much.

    Counted in five minutes; without data it is quiet. `services`: of which functions a metric of our own is summed.
    """

    name: str
    why: str
    namespace: str
    metric: str
    dimensions: Mapping[str, str]
    statistic: str = "Sum"
    threshold: int = 1
    services: tuple[str, ...] = ()


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
        STOPS,
        {},
        services=SETTLING,
    ),
    Alarm("budget-warned", "80 % of a budget are spent.", OWN_METRICS, WARNINGS, {}, services=SETTLING),
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

    def __init__(self, scope: Construct, *, parameters: Parameters, key: kms.IKey) -> None:
        super().__init__(scope, "Alarms")
        self.topic = sns.Topic(self, "Topic", topic_name=sub(f"{PREFIX}-alarms"), master_key=key)
        self.topic.add_to_resource_policy(_our_alarms(self.topic))
        for alarm in ALARMS:
            made = self._alarm(alarm)
            if alarm.services:  # the emulator refuses sums
                made.cfn_options.condition = parameters.on_aws

    def _alarm(self, row: Alarm) -> cloudwatch.CfnAlarm:
        return cloudwatch.CfnAlarm(
            self,
            row.name,
            alarm_name=sub(f"{PREFIX}-{row.name}"),
            alarm_description=f"{row.why} What to do: docs/operations.md, {row.name}.",
            **(_sum_over_services(row) if row.services else _one_metric(row)),
            threshold=row.threshold,
            evaluation_periods=1,
            comparison_operator="GreaterThanOrEqualToThreshold",
            treat_missing_data="notBreaching",
            alarm_actions=[self.topic.topic_arn],
        )


def _one_metric(row: Alarm) -> dict[str, Any]:
    return {
        "namespace": sub(row.namespace),
        "metric_name": row.metric,
        "dimensions": [{"name": name, "value": sub(text)} for name, text in row.dimensions.items()],
        "statistic": row.statistic,
        "period": WINDOW_S,
    }


def _sum_over_services(row: Alarm) -> dict[str, Any]:
    """One metric a function, since Powertools names the function in each, and their sum."""
    parts = [
        {
            "id": service,
            "metricStat": {
                "metric": {
                    "namespace": sub(row.namespace),
                    "metricName": row.metric,
                    "dimensions": [{"name": "service", "value": service}],
                },
                "period": WINDOW_S,
                "stat": row.statistic,
            },
            "returnData": False,
        }
        for service in row.services
    ]
    return {"metrics": [{"id": "sum", "expression": "SUM(METRICS())", "label": row.name}, *parts]}


def _our_alarms(topic: sns.Topic) -> iam.PolicyStatement:
    """CloudWatch may speak to the topic for the alarms of this account only."""
    return iam.PolicyStatement(
        sid="OurAlarms",
        principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
        actions=["sns:Publish"],
        resources=[topic.topic_arn],
        conditions={"StringEquals": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID}},
    )
