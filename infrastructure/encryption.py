"""The stage's KMS key: it encrypts the bucket, logs, alarms and, where a type asks for it, volumes of training machines."""

from __future__ import annotations

from typing import cast

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from constructs import Construct

from infrastructure.names import KEY_ID, PREFIX, regional_arn, sub


class Encryption(Construct):
    """`key`: rotated every year, kept when the stack goes, because what it encrypted is kept too."""

    def __init__(self, scope: Construct) -> None:
        super().__init__(scope, "Encryption")
        self.key = kms.Key(
            self,
            "Key",
            description=sub(f"Objects and training volumes of {PREFIX}"),
            enable_key_rotation=True,
            removal_policy=cdk.RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
        )
        # Policies name the key as ${StageKey.Arn}.
        cast("kms.CfnKey", self.key.node.default_child).override_logical_id(KEY_ID)
        kms.CfnAlias(self, "Alias", alias_name=sub(f"alias/{PREFIX}"), target_key_id=self.key.key_arn)
        self.key.add_to_resource_policy(_logs_may_use_it())
        self.key.add_to_resource_policy(_alarms_may_use_it())

    def cover_logs(self, scope: Construct) -> None:
        """Every log group below `scope` is encrypted with the key: what a handler logs names runs and buckets."""
        for each in scope.node.find_all():
            if isinstance(each, logs.CfnLogGroup):
                each.kms_key_id = self.key.key_arn


def _logs_may_use_it() -> iam.PolicyStatement:
    """CloudWatch Logs, for log groups of this account."""
    return iam.PolicyStatement(
        sid="LogsOfThisAccount",
        principals=[iam.ServicePrincipal(sub("logs.${AWS::Region}.amazonaws.com"))],
        actions=["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"],
        resources=["*"],  # of a key's own policy: this key
        conditions={"ArnLike": {"kms:EncryptionContext:aws:logs:arn": sub(regional_arn("logs", "log-group:*"))}},
    )


def _alarms_may_use_it() -> iam.PolicyStatement:
    """CloudWatch alarms, which publish to a topic encrypted with the key."""
    return iam.PolicyStatement(
        sid="AlarmsOfThisAccount",
        principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
        actions=["kms:Decrypt", "kms:GenerateDataKey*"],
        resources=["*"],  # no condition: what the key refuses stays silent, and the topic checks whom it is for
    )
