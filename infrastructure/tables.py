"""The four tables. Rows and keys are described where they are written, in microtuning_core.aws."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_dynamodb as dynamodb
from constructs import Construct

from infrastructure.names import PREFIX, construct_id, sub

RECORD_TABLES = ("runs", "ledger", "tenants")
BY_CREATED = "by_created"  # of runs: newest first within one tenant


class Tables(Construct):
    """runs, ledger and tenants are records: recoverable to any second of 35 days, and kept when the stack goes."""

    def __init__(self, scope: Construct) -> None:
        super().__init__(scope, "Tables")
        records = {name: self._records(name) for name in RECORD_TABLES}
        records["runs"].add_global_secondary_index(
            index_name=BY_CREATED,
            partition_key=dynamodb.Attribute(name="gsi1pk", type=dynamodb.AttributeType.STRING),
            sort_key=dynamodb.Attribute(name="gsi1sk", type=dynamodb.AttributeType.STRING),
        )
        self._idempotency()

    def _records(self, name: str) -> dynamodb.Table:
        return dynamodb.Table(
            self,
            construct_id(name),
            table_name=sub(f"{PREFIX}-{name}"),
            partition_key=dynamodb.Attribute(name="pk", type=dynamodb.AttributeType.STRING),
            sort_key=dynamodb.Attribute(name="sk", type=dynamodb.AttributeType.STRING),
            billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
            point_in_time_recovery_specification=_every_second(),
            removal_policy=cdk.RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
        )

    def _idempotency(self) -> dynamodb.Table:
        """Powertools' table under its default attribute names; what it holds is worthless after an hour."""
        return dynamodb.Table(
            self,
            "Idempotency",
            table_name=sub(f"{PREFIX}-idempotency"),
            partition_key=dynamodb.Attribute(name="id", type=dynamodb.AttributeType.STRING),
            time_to_live_attribute="expiration",
            billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
            point_in_time_recovery_specification=_every_second(),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )


def _every_second() -> dynamodb.PointInTimeRecoverySpecification:
    return dynamodb.PointInTimeRecoverySpecification(point_in_time_recovery_enabled=True)
