"""The events that reach the queues, as far as they are used. Events are hints: they name what to look at again.

EventBridge carries an object's key as it is. The classic S3 notification (`Records[].s3.object.key`) percent-encodes it,
with "+" for a blank; a bucket that is wired to a queue that way is understood as well, and decoded once.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import unquote_to_bytes

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from microtuning_core.domain.errors import InvalidName


class _Event(BaseModel):
    """Services add fields; what is not used is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class ObjectCreated(_Event):
    """One object that was written; `etag` without quotes."""

    bucket: str
    key: str
    etag: str
    size: int = 0
    sequencer: str = ""
    time: AwareDatetime


class JobChanged(_Event):
    """ "SageMaker Training Job State Change": only the name is believed, the rest is asked for."""

    job_name: str
    status: str = ""
    time: AwareDatetime


class ExecutionChanged(_Event):
    """ "Step Functions Execution Status Change"."""

    execution: str = Field(description="its name")
    status: str
    time: AwareDatetime


def objects_created(body: dict[str, Any]) -> list[ObjectCreated]:
    """The objects of one message: an EventBridge event, or a classic notification with any number of records."""
    if "Records" in body:
        return [_classic_record(record) for record in body["Records"]]
    detail = body["detail"]
    stored = detail["object"]
    return [
        ObjectCreated(
            bucket=detail["bucket"]["name"],
            key=stored["key"],
            etag=stored["etag"].strip('"'),
            size=stored.get("size", 0),
            sequencer=stored.get("sequencer", ""),
            time=_time(body),
        )
    ]


def _classic_record(record: dict[str, Any]) -> ObjectCreated:
    stored = record["s3"]["object"]
    return ObjectCreated(
        bucket=record["s3"]["bucket"]["name"],
        key=decode_classic_key(stored["key"]),
        etag=stored["eTag"].strip('"'),
        size=stored.get("size", 0),
        sequencer=stored.get("sequencer", ""),
        time=datetime.fromisoformat(record["eventTime"]),
    )


def decode_classic_key(key: str) -> str:
    """The key of a classic notification, decoded once; bytes that are not UTF-8 are refused."""
    try:
        return unquote_to_bytes(key.replace("+", " ")).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidName("object key", key, "percent-encoded UTF-8") from error


def job_changed(body: dict[str, Any]) -> JobChanged:
    detail = body["detail"]
    return JobChanged(job_name=detail["TrainingJobName"], status=detail.get("TrainingJobStatus", ""), time=_time(body))


def execution_changed(body: dict[str, Any]) -> ExecutionChanged:
    detail = body["detail"]
    return ExecutionChanged(execution=detail["name"], status=detail["status"], time=_time(body))


def _time(body: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(body["time"])
