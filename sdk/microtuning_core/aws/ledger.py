"""The ledger: what each attempt cost, an entry per attempt, line and day. pk TENANT#<t>#<yyyy-mm>, sk the entry's id."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import lost_condition
from microtuning_core.domain.cost import LedgerEntry

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class LedgerStore:
    def __init__(self, dynamodb: DynamoDBClient, table: str) -> None:
        self._dynamodb = dynamodb
        self._table = table

    def put(self, entry: LedgerEntry) -> bool:
        """Writes the entry once: an estimate may be replaced, a final amount never. False when a final one stands."""
        try:
            self._dynamodb.put_item(
                TableName=self._table,
                Item={
                    "pk": {"S": _pk(entry.tenant, entry.day)},
                    "sk": {"S": entry.id},
                    "state": {"S": entry.state},
                    "record": {"S": entry.model_dump_json()},
                },
                ConditionExpression="attribute_not_exists(pk) OR #state = :estimate",
                ExpressionAttributeNames={"#state": "state"},
                ExpressionAttributeValues={":estimate": {"S": "estimate"}},
            )
        except ClientError as error:
            if lost_condition(error):
                return False
            raise
        return True

    def drop(self, estimate: LedgerEntry) -> None:
        """Takes an estimate away; a final amount that stands there now stays."""
        try:
            self._dynamodb.delete_item(
                TableName=self._table,
                Key={"pk": {"S": _pk(estimate.tenant, estimate.day)}, "sk": {"S": estimate.id}},
                ConditionExpression="attribute_not_exists(pk) OR #state = :estimate",
                ExpressionAttributeNames={"#state": "state"},
                ExpressionAttributeValues={":estimate": {"S": "estimate"}},
            )
        except ClientError as error:
            if not lost_condition(error):
                raise

    def month(self, tenant: str, month: str, run_id: str | None = None) -> list[LedgerEntry]:
        """The entries of one UTC month ("2026-11"), of one run or of all."""
        condition, values = "pk = :pk", {":pk": {"S": f"TENANT#{tenant}#{month}"}}
        if run_id:
            condition, values = "pk = :pk AND begins_with(sk, :sk)", values | {":sk": {"S": f"{run_id}#"}}
        pages = self._dynamodb.get_paginator("query").paginate(
            TableName=self._table,
            KeyConditionExpression=condition,
            ExpressionAttributeValues=values,
            ConsistentRead=True,
        )
        return [LedgerEntry.model_validate_json(item["record"]["S"]) for page in pages for item in page["Items"]]

    def entries(self, tenant: str, run_id: str, first_day: date, last_day: date) -> list[LedgerEntry]:
        """All entries of a run that lived from `first_day` to `last_day` (UTC)."""
        return [entry for month in _months(first_day, last_day) for entry in self.month(tenant, month, run_id)]


def _pk(tenant: str, day: date) -> str:
    return f"TENANT#{tenant}#{day:%Y-%m}"


def _months(first: date, last: date) -> list[str]:
    numbers = range(first.year * 12 + first.month - 1, last.year * 12 + last.month)
    return [f"{number // 12:04d}-{number % 12 + 1:02d}" for number in numbers]
