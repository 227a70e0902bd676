"""Who runs and who waits: the stage's slots and its queue, in the tenants table.

    pk         sk               holds
    STAGE      SLOTS            revision, and `held`: run_id -> tenant, life, gpus
    STAGE      WAIT#<run_id>    tenant, since, not_before, life, gpus
    STAGE      TENANT#<t>       the tenant was seen here
    LIMITS     <t>              see tenant_rows
    TENANT#t   STANDING         see tenant_rows

A slot is given by one transaction (slots at the revision that was read, waiting entry gone), so twenty racing admissions
against five slots admit five.

A run that is over may be taken up again (`Run.reopenings`): its next life. Who gives back what a run has says in which life
it saw the run end, and what a later life has stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import lost_condition
from microtuning_core.aws.tenant_rows import TenantRows, unless_later
from microtuning_core.domain.errors import StaleRevision
from microtuning_core.domain.quota import Gpus, Holding, Limits, Waiting, grant, has_room

_STAGE = {"S": "STAGE"}
_TRIES = 20


@dataclass(frozen=True)
class Slots:
    revision: int
    held: dict[str, Holding]  # by run_id
    lives: dict[str, int] = field(default_factory=dict)  # run_id -> the life in which it waited for the slot


@dataclass(frozen=True)
class Granted:
    """The runs that were given a slot, and who holds and waits now that nobody else may have one."""

    run_ids: list[str]
    held: dict[str, Holding]
    waiting: list[Waiting]


class AdmissionStore(TenantRows):
    def wait(
        self,
        run_id: str,
        tenant: str,
        since: datetime,
        not_before: datetime | None = None,
        *,
        life: int = 0,
        gpus: Gpus | None = None,
    ) -> None:
        """Puts the run into the queue; again, it renews `not_before`, and as late news of an earlier life nothing."""
        item: dict[str, Any] = {
            "pk": _STAGE,
            "sk": {"S": f"WAIT#{run_id}"},
            "tenant": {"S": tenant},
            "since": {"S": since.isoformat()},
            "life": _number(life),
            "gpus": _gpus_item(gpus or {}),
        }
        if not_before:
            item["not_before"] = {"S": not_before.isoformat()}
        with unless_later():
            self._dynamodb.put_item(
                TableName=self._table,
                Item=item,
                ConditionExpression="attribute_not_exists(life) OR life <= :life",
                ExpressionAttributeValues={":life": _number(life)},
            )

    def remember(self, tenant: str) -> None:
        """The reconciler looks after the tenants it knows."""
        self._dynamodb.put_item(TableName=self._table, Item={"pk": _STAGE, "sk": {"S": f"TENANT#{tenant}"}})

    def forget(self, run_id: str, life: int) -> None:
        """Takes the run, as it was in that life, out of the queue and its slot. Doing it twice changes nothing."""
        with unless_later():
            self._dynamodb.delete_item(
                TableName=self._table,
                Key={"pk": _STAGE, "sk": {"S": f"WAIT#{run_id}"}},
                ConditionExpression="attribute_not_exists(life) OR life <= :life",
                ExpressionAttributeValues={":life": _number(life)},
            )
        self.release(run_id, life)

    def release(self, run_id: str, life: int | None = None) -> None:
        """Frees the slot, if it was had in that life or before; None = whenever."""
        condition, values = "attribute_exists(held.#run)", {":one": _number(1)}
        if life is not None:  # a slot of before lives were counted is text
            condition = "attribute_type(held.#run, :text) OR held.#run.life <= :life"
            values |= {":text": {"S": "S"}, ":life": _number(life)}
        with unless_later():
            self._dynamodb.update_item(
                TableName=self._table,
                Key={"pk": _STAGE, "sk": {"S": "SLOTS"}},
                UpdateExpression="REMOVE held.#run ADD revision :one",
                ConditionExpression=condition,
                ExpressionAttributeNames={"#run": run_id},
                ExpressionAttributeValues=values,
            )

    def holds(self, run_id: str) -> bool:
        return run_id in self.slots().held

    def slots(self) -> Slots:
        answer = self._dynamodb.get_item(
            TableName=self._table, Key={"pk": _STAGE, "sk": {"S": "SLOTS"}}, ConsistentRead=True
        )
        item = answer.get("Item")
        if item is None:
            return Slots(-1, {})
        held = item["held"]["M"]
        return Slots(
            int(item["revision"]["N"]),
            {run: _holding(value) for run, value in held.items()},
            {run: int(value["M"]["life"]["N"]) for run, value in held.items() if "M" in value},
        )

    def waiting(self, now: datetime) -> list[Waiting]:
        """Who may be admitted now; those that wait out a lack of capacity are not among them yet."""
        items = self._query("WAIT#")
        ready = [item for item in items if "not_before" not in item or _time(item["not_before"]) <= now]
        return [
            Waiting(
                item["sk"]["S"].removeprefix("WAIT#"),
                item["tenant"]["S"],
                _time(item["since"]),
                _gpus(item.get("gpus")),
            )
            for item in ready
        ]

    def tenants(self) -> list[str]:
        return [item["sk"]["S"].removeprefix("TENANT#") for item in self._query("TENANT#")]

    def grant(self, limits: Limits, now: datetime) -> Granted:
        """Gives free slots to those that `quota.grant` names."""
        granted: list[str] = []
        for _ in range(_TRIES):
            slots, waiting = self.slots(), self.waiting(now)
            chosen = grant(limits, slots.held, waiting)
            if not chosen:
                break
            first = next(each for each in waiting if each.run_id == chosen[0])
            if self._take(slots, first):
                granted.append(first.run_id)
        return Granted(granted, slots.held, waiting)

    def claim(self, run_id: str, gpus: Gpus, limits: Limits) -> bool:
        """Sets these GPUs aside for a run that has a slot, instead of what was; False where its tenant has no room.

        A run whose slot was given back meanwhile claims nothing: whoever freed it decides what becomes of the run.
        """
        for _ in range(_TRIES):
            slots = self.slots()
            holding = slots.held.get(run_id)
            if holding is None or holding.gpus == gpus:
                return True
            wanted = Holding(holding.tenant, gpus)
            if not has_room(limits, slots.held, run_id, wanted):
                return False
            if self._put_slots(slots, Slots(slots.revision + 1, {**slots.held, run_id: wanted}, slots.lives)):
                return True
        raise StaleRevision(run_id, slots.revision)

    def _life_of(self, run_id: str) -> int | None:
        """The life in which the run waits; None where it does not, any more."""
        key = {"pk": _STAGE, "sk": {"S": f"WAIT#{run_id}"}}
        item = self._dynamodb.get_item(TableName=self._table, Key=key, ConsistentRead=True).get("Item")
        return None if item is None else int(item.get("life", _number(0))["N"])

    def _take(self, slots: Slots, first: Waiting) -> bool:
        """One slot for one waiting run, if the slots are still as they were read."""
        life = self._life_of(first.run_id)
        if life is None:
            return False
        held = {**slots.held, first.run_id: Holding(first.tenant, first.gpus)}
        taken = Slots(slots.revision + 1, held, {**slots.lives, first.run_id: life})
        return self._put_slots(slots, taken, self._wait_delete(first.run_id))

    def _put_slots(self, before: Slots, after: Slots, *others: dict[str, Any]) -> bool:
        """All of it, if the slots are still as they were read."""
        items: Any = [self._slots_put(before.revision, after), *others]
        try:
            self._dynamodb.transact_write_items(TransactItems=items)
        except ClientError as error:
            if lost_condition(error):
                return False
            raise
        return True

    def _slots_put(self, revision: int, slots: Slots) -> dict[str, Any]:
        held = {
            run_id: {"M": _holding_item(holding, slots.lives.get(run_id, 0))} for run_id, holding in slots.held.items()
        }
        put: dict[str, Any] = {
            "TableName": self._table,
            "Item": {"pk": _STAGE, "sk": {"S": "SLOTS"}, "revision": _number(slots.revision), "held": {"M": held}},
            "ConditionExpression": "attribute_not_exists(pk)",
        }
        if revision >= 0:
            put["ConditionExpression"] = "revision = :revision"
            put["ExpressionAttributeValues"] = {":revision": _number(revision)}
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


def _number(number: int) -> dict[str, Any]:
    return {"N": str(number)}


def _holding(value: Any) -> Holding:
    """Of a slot; of before lives were counted it is the tenant's name."""
    if "S" in value:
        return Holding(value["S"])
    return Holding(value["M"]["tenant"]["S"], _gpus(value["M"].get("gpus")))


def _holding_item(holding: Holding, life: int) -> dict[str, Any]:
    return {"tenant": {"S": holding.tenant}, "life": _number(life), "gpus": _gpus_item(holding.gpus)}


def _gpus(value: Any) -> dict[str, int]:
    """Of before GPUs were counted there are none."""
    return {family: int(count["N"]) for family, count in value["M"].items()} if value else {}


def _gpus_item(gpus: Gpus) -> dict[str, Any]:
    return {"M": {family: _number(count) for family, count in gpus.items()}}


def _time(attribute: Any) -> datetime:
    return datetime.fromisoformat(attribute["S"])
