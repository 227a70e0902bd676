"""What is remembered of the tenants' budgets between two ticks, in the tenants table.

pk       sk     record
BUDGETS  <t>    a BudgetMark: which warnings were given, and until when no run of the tenant gets a slot
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from microtuning_core.domain.budget import BudgetMark

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_PK = {"S": "BUDGETS"}


class BudgetMarks:
    def __init__(self, dynamodb: DynamoDBClient, table: str) -> None:
        self._dynamodb = dynamodb
        self._table = table

    def all(self) -> dict[str, BudgetMark]:
        """By tenant; of one whose budgets never came near their limits there is none."""
        pages = self._dynamodb.get_paginator("query").paginate(
            TableName=self._table,
            KeyConditionExpression="pk = :pk",
            ExpressionAttributeValues={":pk": _PK},
            ConsistentRead=True,
        )
        items = [item for page in pages for item in page["Items"]]
        return {item["sk"]["S"]: BudgetMark.model_validate_json(item["record"]["S"]) for item in items}

    def put(self, tenant: str, mark: BudgetMark) -> None:
        record = {"S": mark.model_dump_json()}
        self._dynamodb.put_item(TableName=self._table, Item={"pk": _PK, "sk": {"S": tenant}, "record": record})

    def closed(self, now: datetime) -> list[str]:
        """The tenants whose budget is used up."""
        return [tenant for tenant, mark in self.all().items() if mark.closed_until and mark.closed_until > now]
