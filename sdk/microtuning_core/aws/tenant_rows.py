"""What the tenants table holds of a single tenant: limits that were changed, and where it stood at last.

pk         sk         holds
LIMITS     <t>        the limits that were changed since the stage was deployed, and only those
TENANT#t   STANDING   what runs and waits of it, in which place, and what it may have; its own people may read this
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import lost_condition
from microtuning_core.domain.tenants import Standing, TenantLimits, merged

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_LIMITS = {"S": "LIMITS"}


class TenantRows:
    def __init__(self, dynamodb: DynamoDBClient, table: str) -> None:
        self._dynamodb = dynamodb
        self._table = table

    def limit_changes(self) -> dict[str, TenantLimits]:
        """By tenant, the limits that were changed since the stage was deployed."""
        pages = self._dynamodb.get_paginator("query").paginate(
            TableName=self._table,
            KeyConditionExpression="pk = :pk",
            ExpressionAttributeValues={":pk": _LIMITS},
            ConsistentRead=True,
        )
        items = [item for page in pages for item in page["Items"]]
        return {item["sk"]["S"]: TenantLimits.model_validate_json(item["record"]["S"]) for item in items}

    def change_limits(self, tenant: str, change: TenantLimits | None) -> None:
        """What `change` sets holds from now on, beside what was changed before; None = as declared again."""
        key = {"pk": _LIMITS, "sk": {"S": tenant}}
        if change is None:
            self._dynamodb.delete_item(TableName=self._table, Key=key)
            return
        record = merged(self.limit_changes().get(tenant), change).model_dump_json(exclude_unset=True)
        self._dynamodb.put_item(TableName=self._table, Item=key | {"record": {"S": record}})

    def put_standing(self, standing: Standing) -> None:
        """Unless a later one is there."""
        seen = {"S": standing.at.isoformat(timespec="microseconds")}
        with unless_later():
            self._dynamodb.put_item(
                TableName=self._table,
                Item={**_standing_key(standing.tenant), "seen": seen, "record": {"S": standing.model_dump_json()}},
                ConditionExpression="attribute_not_exists(seen) OR seen <= :seen",
                ExpressionAttributeValues={":seen": seen},
            )

    def standing(self, tenant: str) -> Standing | None:
        """Where the tenant stood at last; None while it has had no run here. Its own people may read it."""
        item = self._dynamodb.get_item(TableName=self._table, Key=_standing_key(tenant)).get("Item")
        return None if item is None else Standing.model_validate_json(item["record"]["S"])


@contextmanager
def unless_later() -> Iterator[None]:
    """A write whose condition does not hold has nothing to do."""
    try:
        yield
    except ClientError as error:
        if not lost_condition(error):
            raise


def _standing_key(tenant: str) -> dict[str, Any]:
    return {"pk": {"S": f"TENANT#{tenant}"}, "sk": {"S": "STANDING"}}
