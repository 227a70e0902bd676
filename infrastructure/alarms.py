"""Three alarms, inside CloudWatch's ten free ones: something reached a dead-letter queue; nobody could deal with it; what
a machine saves does not reach S3.

`on_dead_letter` runs only when a dead-letter queue has a message, so its own metrics stand for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from infrastructure.names import PREFIX, sub
from microtuning_core.domain.mirror import LATE_MIRRORS

if TYPE_CHECKING:
    from aws_cdk import aws_lambda as lambda_


class Alarms(Construct):
    """Both count over five minutes and are quiet without data. They notify nobody until actions are added."""

    def __init__(self, scope: Construct, *, on_dead_letter: lambda_.IFunction) -> None:
        super().__init__(scope, "Alarms")
        window = cdk.Duration.minutes(5)
        self._alarm("dead-letters", "A message failed four times.", on_dead_letter.metric_invocations(period=window))
        self._alarm("dead-letters-lost", "A dead letter failed as well.", on_dead_letter.metric_errors(period=window))
        late = cloudwatch.Metric(
            namespace=sub(PREFIX),
            metric_name=LATE_MIRRORS,
            dimensions_map={"service": "reconcile"},
            statistic=cloudwatch.Stats.MAXIMUM,
            period=window,
        )
        self._alarm(
            "checkpoints-late", "Checkpoints of a run that trains do not reach S3 (microtuning runs show).", late
        )

    def _alarm(self, name: str, description: str, metric: cloudwatch.Metric) -> None:
        cloudwatch.Alarm(
            self,
            name,
            alarm_name=sub(f"{PREFIX}-{name}"),
            alarm_description=description,
            metric=metric,
            threshold=1,
            evaluation_periods=1,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )
