"""The stage's KMS key: it encrypts the bucket and, where a type asks for it, the volumes of training machines."""

from __future__ import annotations

from typing import cast

import aws_cdk as cdk
from aws_cdk import aws_kms as kms
from constructs import Construct

from infrastructure.names import KEY_ID, PREFIX, sub


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
