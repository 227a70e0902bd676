"""Who runs and who waits: the stage's slots and its queue, in the tenants table.

    pk     sk               holds
    STAGE  SLOTS            revision, and `held`: run_id -> tenant
    STAGE  WAIT#<run_id>    tenant, since, not_before
    STAGE  TENANT#<t>       the tenant was seen here

A slot is given by one transaction (slots at the revision that was read, waiting entry gone), so twenty racing admissions
against five slots admit five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import lost_condition
from microtuning_core.domain.quota import Limits, Waiting, grant

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_STAGE = {"S": "STAGE"}
_TRIES = 20


@dataclass(frozen=True)
class Slots:
    revision: int
    held: dict[str, str]  # run_id -> tenant


class AdmissionStore:
    def __init__(self, dynamodb: DynamoDBClient, table: str) -> None:
        self._dynamodb = dynamodb
        self._table = table

    def wait(self, run_id: str, tenant: str, since: datetime, not_before: datetime | None = None) -> None:
        """Puts the run into the queue; doing it again only renews `not_before`."""
        item: dict[str, Any] = {
            "pk": _STAGE,
            "sk": {"S": f"WAIT#{run_id}"},
            "tenant": {"S": tenant},
            "since": {"S": since.isoformat()},
        }
        if not_before:
            item["not_before"] = {"S": not_before.isoformat()}
        self._dynamodb.put_item(TableName=self._table, Item=item)

    def remember(self, tenant: str) -> None:
        """The reconciler looks after the tenants it knows."""
        self._dynamodb.put_item(TableName=self._table, Item={"pk": _STAGE, "sk": {"S": f"TENANT#{tenant}"}})

    def forget(self, run_id: str) -> None:
        """Takes the run out of the queue and its slot, whichever it has. Doing it twice changes nothing."""
        self._dynamodb.delete_item(TableName=self._table, Key={"pk": _STAGE, "sk": {"S": f"WAIT#{run_id}"}})
        self.release(run_id)

    def release(self, run_id: str) -> None:
        try:
            self._dynamodb.update_item(
                TableName=self._table,
                Key={"pk": _STAGE, "sk": {"S": "SLOTS"}},
                UpdateExpression="REMOVE held.#run ADD revision :one",
                ConditionExpression="attribute_exists(held.#run)",
                ExpressionAttributeNames={"#run": run_id},
                ExpressionAttributeValues={":one": {"N": "1"}},
            )
        except ClientError as error:
            if not lost_condition(error):
                raise

    def holds(self, run_id: str) -> bool:
        return run_id in self.slots().held

    def slots(self) -> Slots:
        answer = self._dynamodb.get_item(
            TableName=self._table, Key={"pk": _STAGE, "sk": {"S": "SLOTS"}}, ConsistentRead=True
        )
        item = answer.get("Item")
        if item is None:
            return Slots(-1, {})
        return Slots(int(item["revision"]["N"]), {run: value["S"] for run, value in item["held"]["M"].items()})

    def waiting(self, now: datetime) -> list[Waiting]:
        """Who may be admitted now; those that wait out a lack of capacity are not among them yet."""
        items = self._query("WAIT#")
        ready = [item for item in items if "not_before" not in item or _time(item["not_before"]) <= now]
        return [
            Waiting(item["sk"]["S"].removeprefix("WAIT#"), item["tenant"]["S"], _time(item["since"])) for item in ready
        ]

    def tenants(self) -> list[str]:
        return [item["sk"]["S"].removeprefix("TENANT#") for item in self._query("TENANT#")]

    def grant(self, limits: Limits, now: datetime) -> list[str]:
        """Gives free slots to those that `quota.grant` names; the run_ids that got one."""
        granted: list[str] = []
        for _ in range(_TRIES):
            slots = self.slots()
            chosen = grant(limits, slots.held, self.waiting(now))
            if not chosen:
                return granted
            if self._take(slots, chosen[0], self._tenant_of(chosen[0])):
                granted.append(chosen[0])
        return granted

    def _tenant_of(self, run_id: str) -> str:
        return run_id.split("-", 1)[0]

    def _take(self, slots: Slots, run_id: str, tenant: str) -> bool:
        """One slot for one waiting run, if the slots are still as they were read."""
        try:
            self._dynamodb.transact_write_items(
                TransactItems=[self._slots_put(slots, {**slots.held, run_id: tenant}), self._wait_delete(run_id)]  # type: ignore[list-item]
            )
        except ClientError as error:
            if lost_condition(error):
                return False
            raise
        return True

    def _slots_put(self, slots: Slots, held: dict[str, str]) -> dict[str, Any]:
        item = {
            "pk": _STAGE,
            "sk": {"S": "SLOTS"},
            "revision": {"N": str(slots.revision + 1)},
            "held": {"M": {run_id: {"S": tenant} for run_id, tenant in held.items()}},
        }
        put: dict[str, Any] = {
            "TableName": self._table,
            "Item": item,
            "ConditionExpression": "attribute_not_exists(pk)",
        }
        if slots.revision >= 0:
            put["ConditionExpression"] = "revision = :revision"
            put["ExpressionAttributeValues"] = {":revision": {"N": str(slots.revision)}}
        return {"Put": put}

    def _wait_delete(self, run_id: str) -> dict[str, Any]:
        key = {"pk": _STAGE, "sk": {"S": f"WAIT#{run_id}"}}
        return {"Delete": {"TableName": self._table, "Key": key, "ConditionExpression": "attribute_exists(pk)"}}

    def _query(self, sk_prefix: str) -> Sequence[dict[str, Any]]:
        pages = self._dynamodb.get_paginator("query").paginate(
            TableName=self._table,
            KeyConditionExpression="pk = :pk AND begins_with(sk, :sk)",
            ExpressionAttributeValues={":pk": _STAGE, ":sk": {"S": sk_prefix}},
            ConsistentRead=True,
        )
        return [item for page in pages for item in page["Items"]]


def _time(attribute: Any) -> datetime:
    return datetime.fromisoformat(attribute["S"])
