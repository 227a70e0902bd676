"""Runs, their checkpoints, events and waiting tokens, in the table; each run's record also in S3.

    pk                        sk                          holds
    TENANT#t#RUN#<run_id>     META                        the Run record as JSON, its status, name, times and revision
    TENANT#t#RUN#<run_id>     CHECKPOINT#<ll>#<step>      a registered checkpoint
    TENANT#t#RUN#<run_id>     EVENT#<time>#<kind>         what happened, for people
    TENANT#t#RUN#<run_id>     TOKEN#<hash>                a state of the machine that waits, and its token
    TENANT#t#OPEN             <run_id>                    there while the run, its costs or a wish to go on are open

The table decides, S3 remembers: a write goes to the table under the condition that the revision is the one that was read,
then the same JSON goes to S3. Whoever loses the condition reads again and decides again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError
from pydantic import ValidationError

from microtuning_core.aws.errors import lost_condition
from microtuning_core.aws.objects import ObjectStore
from microtuning_core.domain.errors import RunNotFound, StaleRevision
from microtuning_core.domain.layout import run_record_key, step_prefix
from microtuning_core.domain.manifest import CheckpointManifest
from microtuning_core.domain.names import parse_run_id
from microtuning_core.domain.run import Run
from microtuning_core.domain.settle import WaitingState

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

Item = dict[str, Any]
_LOG = logging.getLogger(__name__)
_TRIES = 10


@dataclass(frozen=True)
class Checkpoint:
    """A registered checkpoint; `whole` once every file of its manifest was seen with its size.

    hashed_bytes: of its `bytes`, those whose hash was seen to be the manifest's, too; who restores it checks all of them.
    """

    lineage: int
    step: int
    uri: str
    whole: bool
    metrics: dict[str, float]
    created_at: str
    final: bool = False
    bytes: int = 0
    hashed_bytes: int = 0


class RunStore:
    def __init__(self, dynamodb: DynamoDBClient, table: str, objects: ObjectStore) -> None:
        self._dynamodb = dynamodb
        self.table = table
        self._objects = objects

    def get(self, run_id: str) -> Run:
        item = self._item(run_id, "META")
        if item is None:
            raise RunNotFound(run_id)
        return Run.model_validate_json(item["record"]["S"])

    def find(self, run_id: str) -> Run | None:
        item = self._item(run_id, "META")
        return None if item is None else Run.model_validate_json(item["record"]["S"])

    def create(self, run: Run) -> bool:
        """Stores a new run; False when it is there already (the same event, delivered again)."""
        try:
            self._write(run, "attribute_not_exists(pk)", {})
        except StaleRevision:
            return False
        return True

    def restore(self, run: Run) -> bool:
        """Stores a record as S3 remembers it; False when the table has this revision or a newer one."""
        newer = {":mine": {"N": str(run.revision)}}
        try:
            self._write(run, "attribute_not_exists(pk) OR revision < :mine", newer)
        except StaleRevision:
            return False
        return True

    def put(self, run: Run, now: datetime | None = None) -> Run:
        """Moves the record from the revision that `run` was read at to the next; StaleRevision when somebody was first."""
        next_run = run.with_(revision=run.revision + 1, updated_at=now or datetime.now(UTC))
        self._write(next_run, "revision = :expected", {":expected": {"N": str(run.revision)}})
        return next_run

    def update(self, run_id: str, change: Callable[[Run], Run], now: datetime | None = None) -> Run:
        """Reads, changes and puts, again and again while others are first. Unchanged runs are not written."""
        for _ in range(_TRIES):
            run = self.get(run_id)
            changed = change(run)
            if changed == run:
                return run
            try:
                return self.put(changed, now)
            except StaleRevision:
                continue
        raise StaleRevision(run_id, run.revision)

    def _write(self, run: Run, condition: str, values: Item) -> None:
        meta: Item = {"Put": {"TableName": self.table, "Item": _meta_item(run), "ConditionExpression": condition}}
        if values:
            meta["Put"]["ExpressionAttributeValues"] = values
        try:
            self._dynamodb.transact_write_items(TransactItems=[meta, self._open_mark(run)])  # type: ignore[list-item]
        except ClientError as error:
            if lost_condition(error):
                raise StaleRevision(run.run_id, run.revision - 1) from error
            raise
        self.mirror(run)

    def _open_mark(self, run: Run) -> Item:
        key = {"pk": {"S": f"TENANT#{run.tenant}#OPEN"}, "sk": {"S": run.run_id}}
        if run.is_final and run.costs_are_final and not run.goes_on:
            return {"Delete": {"TableName": self.table, "Key": key}}
        return {"Put": {"TableName": self.table, "Item": key}}

    def mirror(self, run: Run) -> None:
        """The record as S3 remembers it; a late writer of an older revision is put right by the reconciler."""
        self._objects.put(run_record_key(run.run_id), run.model_dump_json(indent=1).encode())

    def mirrored_revision(self, run_id: str) -> int:
        """The revision that S3 holds, or -1."""
        document = self._objects.read_json(run_record_key(run_id))
        return -1 if document is None else int(document["revision"])

    def list_runs(self, tenant: str, limit: int | None = None) -> Iterator[Run]:
        """The tenant's runs, newest first."""
        pages = self._dynamodb.get_paginator("query").paginate(
            TableName=self.table,
            IndexName="by_created",
            KeyConditionExpression="gsi1pk = :tenant",
            ExpressionAttributeValues={":tenant": {"S": f"TENANT#{tenant}"}},
            ScanIndexForward=False,
        )
        for page in pages:
            for item in page["Items"]:
                if limit is not None and limit <= 0:
                    return
                limit = limit - 1 if limit is not None else None
                yield from _readable(item)

    def open_run_ids(self, tenant: str) -> list[str]:
        return [item["sk"]["S"] for item in self._query(f"TENANT#{tenant}#OPEN", "")]

    def note(self, run_id: str, kind: str, message: str, at: datetime | None = None, **data: Any) -> None:
        """Appends to the run's events, which people read; nothing is decided from them."""
        moment = (at or datetime.now(UTC)).isoformat()
        document = json.dumps({"kind": kind, "message": message, "at": moment, **data}, default=str)
        self._put(run_id, f"EVENT#{moment}#{kind}", {"record": {"S": document}})

    def events(self, run_id: str) -> list[dict[str, Any]]:
        return [json.loads(item["record"]["S"]) for item in self._query(_pk(run_id), "EVENT#")]

    def put_token(self, run_id: str, waiting: WaitingState) -> None:
        """Each token has an item of its own: a message that comes twice must not push out the state that waits now."""
        self._put(run_id, _token_sk(waiting.token), {"record": {"S": json.dumps(waiting.__dict__)}})

    def tokens(self, run_id: str) -> list[WaitingState]:
        return [WaitingState(**json.loads(item["record"]["S"])) for item in self._query(_pk(run_id), "TOKEN#")]

    def delete_token(self, run_id: str, token: str) -> None:
        """Forgets a token that was answered."""
        key = {"pk": {"S": _pk(run_id)}, "sk": {"S": _token_sk(token)}}
        self._dynamodb.delete_item(TableName=self.table, Key=key)

    def put_checkpoint(self, manifest: CheckpointManifest, hashed_bytes: int = 0) -> None:
        prefix = step_prefix(manifest.run_id, manifest.lineage, manifest.step)
        checkpoint = Checkpoint(
            manifest.lineage,
            manifest.step,
            f"s3://{self._objects.bucket}/{prefix}",
            True,
            manifest.metrics,
            manifest.created_at.isoformat(),
            manifest.final,
            manifest.total_bytes,
            hashed_bytes,
        )
        document = json.dumps(checkpoint.__dict__)
        self._put(manifest.run_id, _checkpoint_sk(manifest.lineage, manifest.step), {"record": {"S": document}})

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """The registered checkpoints, oldest first."""
        items = self._query(_pk(run_id), "CHECKPOINT#")
        return [Checkpoint(**json.loads(item["record"]["S"])) for item in items]

    def delete_checkpoint(self, run_id: str, lineage: int, step: int) -> None:
        key = {"pk": {"S": _pk(run_id)}, "sk": {"S": _checkpoint_sk(lineage, step)}}
        self._dynamodb.delete_item(TableName=self.table, Key=key)

    def next_version(self, tenant: str, group: str) -> int:
        """Counts up the versions of a model group, from 1."""
        answer = self._dynamodb.update_item(
            TableName=self.table,
            Key={"pk": {"S": f"TENANT#{tenant}#MODEL#{group}"}, "sk": {"S": "VERSION"}},
            UpdateExpression="ADD version :one",
            ExpressionAttributeValues={":one": {"N": "1"}},
            ReturnValues="UPDATED_NEW",
        )
        return int(answer["Attributes"]["version"]["N"])

    def count_versions_from(self, tenant: str, group: str, number: int) -> None:
        """The group's next version is higher than `number`, whatever the table had counted."""
        try:
            self._dynamodb.update_item(
                TableName=self.table,
                Key={"pk": {"S": f"TENANT#{tenant}#MODEL#{group}"}, "sk": {"S": "VERSION"}},
                UpdateExpression="SET version = :number",
                ConditionExpression="attribute_not_exists(version) OR version < :number",
                ExpressionAttributeValues={":number": {"N": str(number)}},
            )
        except ClientError as error:
            if not lost_condition(error):
                raise

    def _put(self, run_id: str, sk: str, attributes: Item) -> None:
        item: Item = {"pk": {"S": _pk(run_id)}, "sk": {"S": sk}, **attributes}
        self._dynamodb.put_item(TableName=self.table, Item=item)

    def _item(self, run_id: str, sk: str) -> Item | None:
        key = {"pk": {"S": _pk(run_id)}, "sk": {"S": sk}}
        answer = self._dynamodb.get_item(TableName=self.table, Key=key, ConsistentRead=True)
        return answer.get("Item")

    def _query(self, pk: str, sk_prefix: str) -> Iterator[Item]:
        condition, values = "pk = :pk", {":pk": {"S": pk}}
        if sk_prefix:
            condition, values = f"{condition} AND begins_with(sk, :sk)", values | {":sk": {"S": sk_prefix}}
        pages = self._dynamodb.get_paginator("query").paginate(
            TableName=self.table,
            KeyConditionExpression=condition,
            ExpressionAttributeValues=values,
            ConsistentRead=True,
        )
        for page in pages:
            yield from page["Items"]


def _readable(item: Item) -> list[Run]:
    """The run of a listed item; one that cannot be read is logged and must not hide the others."""
    try:
        return [Run.model_validate_json(item["record"]["S"])]
    except ValidationError:
        _LOG.exception("the record %s cannot be read", item["pk"]["S"])
        return []


def _pk(run_id: str) -> str:
    return f"TENANT#{parse_run_id(run_id).tenant}#RUN#{run_id}"


def _token_sk(token: str) -> str:
    return f"TOKEN#{hashlib.sha256(token.encode()).hexdigest()[:32]}"


def _checkpoint_sk(lineage: int, step: int) -> str:
    return f"CHECKPOINT#{lineage:02d}#{step:012d}"


def _meta_item(run: Run) -> Item:
    return {
        "pk": {"S": _pk(run.run_id)},
        "sk": {"S": "META"},
        "gsi1pk": {"S": f"TENANT#{run.tenant}"},
        "gsi1sk": {"S": f"{run.created_at.isoformat()}#{run.run_id}"},
        "record": {"S": run.model_dump_json()},
        "status": {"S": run.status},
        "name": {"S": run.name},
        "revision": {"N": str(run.revision)},
        "created_at": {"S": run.created_at.isoformat()},
        "updated_at": {"S": run.updated_at.isoformat()},
    }
