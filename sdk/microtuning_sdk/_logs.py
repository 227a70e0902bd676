"""The log lines of a run's training jobs, read from CloudWatch Logs: every line once, in order, attempt by attempt.

A cursor says how far each stream was read, as the time of the last line and how many lines of that very millisecond were
seen: {"local-acme-…-a001/algo-1-1767": [1767322800000, 2]}. It is plain JSON, so another process can go on from it
(the service's own tokens last a day). One `get_log_events` a stream, never `filter_log_events`: that one gives no order
between the pages of several streams.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import is_missing
from microtuning_core.domain.names import TRAINING_LOG_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mypy_boto3_logs import CloudWatchLogsClient

    from microtuning_sdk._connection import Stage

Cursor = dict[str, list[int]]
Event = dict[str, Any]


@dataclass(frozen=True)
class LogLine:
    at_ms: int
    stream: str
    text: str

    @property
    def event(self) -> Event | None:
        """The line as one of the container's own events ({"event": "metrics", …}); None for anything else."""
        if not self.text.startswith("{"):
            return None
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


class LogTail:
    """Reads what is new, each time it is asked."""

    def __init__(self, logs: CloudWatchLogsClient, cursor: Cursor | None = None) -> None:
        self._logs = logs
        self.cursor: Cursor = dict(cursor or {})
        self._tokens: dict[str, str] = {}
        self._resumed_from = dict(self.cursor)

    def read(self, job_names: Iterable[str]) -> Iterator[LogLine]:
        """The lines of these jobs that were not read before."""
        for job_name in job_names:
            for stream in self._streams(job_name):
                yield from self._new_lines(stream)

    def _streams(self, job_name: str) -> list[str]:
        """Oldest first: a job that spot took away and brought back has a stream for each of its lives."""
        pages = self._logs.get_paginator("describe_log_streams").paginate(
            logGroupName=TRAINING_LOG_GROUP, logStreamNamePrefix=f"{job_name}/"
        )
        try:
            found = [stream for page in pages for stream in page["logStreams"]]
        except ClientError as error:
            if is_missing(error):  # the group comes with the account's first job
                return []
            raise
        ordered = sorted(found, key=lambda stream: (stream.get("creationTime", 0), stream["logStreamName"]))
        return [stream["logStreamName"] for stream in ordered]

    def _new_lines(self, stream: str) -> Iterator[LogLine]:
        for event in self._events(stream):
            line = LogLine(event["timestamp"], stream, event["message"].rstrip("\n"))
            last_ms, seen = self.cursor.get(stream, [-1, 0])
            self.cursor[stream] = [line.at_ms, seen + 1 if line.at_ms == last_ms else 1]
            yield line

    def _events(self, stream: str) -> Iterator[Any]:
        """What the service has beyond the last token; after a resume, without the lines of the cursor's millisecond."""
        last_ms, to_skip = self._resumed_from.get(stream, [0, 0]) if stream not in self._tokens else [0, 0]
        while True:
            page = self._page(stream)
            for event in page["events"]:
                if to_skip and event["timestamp"] == last_ms:
                    to_skip -= 1
                    continue
                yield event
            if self._tokens.get(stream) == page["nextForwardToken"]:
                return
            self._tokens[stream] = page["nextForwardToken"]

    def _page(self, stream: str) -> Any:
        request: dict[str, Any] = {"logGroupName": TRAINING_LOG_GROUP, "logStreamName": stream, "startFromHead": True}
        if stream in self._resumed_from:
            request["startTime"] = self._resumed_from[stream][0]
        if stream in self._tokens:
            request["nextToken"] = self._tokens[stream]
        return self._logs.get_log_events(**request)


def metrics_in(events: Iterable[Event]) -> list[Event]:
    """The metrics of each step, in order. A step that was done again after a recovery counts as it was done last."""
    by_step = {(event["step"], event.get("warm_step")): event for event in events if event["event"] == "metrics"}
    return [by_step[key] for key in sorted(by_step, key=lambda key: (key[0], key[1] or 0))]


# --- how far this machine's user has read ----------------------------------------------------------------------------


def load_cursor(stage: Stage, run_id: str) -> Cursor:
    """Where the last `wait` of this run, on this machine, stopped showing lines."""
    try:
        return dict(json.loads(_cursor_file(stage, run_id).read_text("utf-8")))
    except (FileNotFoundError, ValueError):
        return {}


def save_cursor(stage: Stage, run_id: str, cursor: Cursor) -> None:
    file = _cursor_file(stage, run_id)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(cursor), "utf-8")
    beside.replace(file)


def _cursor_file(stage: Stage, run_id: str) -> Path:
    home = os.environ.get("MICROTUNING_HOME")
    folder = Path(home).expanduser() if home else Path.home() / ".microtuning"
    return folder / "seen" / f"{stage.names.stage}-{stage.names.account}" / f"{run_id}.json"
