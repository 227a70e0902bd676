"""A job's standard output as CloudWatch Logs: group /aws/sagemaker/TrainingJobs, one stream a host."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "/aws/sagemaker/TrainingJobs"
FLUSH_S = 0.25
LAST_TRY_S = 8.0
SERVERS_FAULT = 500
# PutLogEvents takes 10,000 events and 1 MiB, 26 bytes of it for each event; an event takes 256 KiB.
MAX_EVENTS = 1_000
MAX_BATCH_BYTES = 900_000
EVENT_OVERHEAD_BYTES = 26
MAX_LINE_BYTES = 256 * 1024 - EVENT_OVERHEAD_BYTES

log = logging.getLogger(__name__)


def stream_name(job_name: str, host: str, started_at: float) -> str:
    return f"{job_name}/{host}-{int(started_at)}"


class LogShipper:
    """Reads a process's output to its end and ships it in order, at least every `FLUSH_S`.

    What nobody took waits: the emulator may be away for a moment, and after a crash it knows neither group nor stream.

    Args:
        client: with the job's role, which needs rights to streams and events.
        service: a client of the service's own, which makes the group with the account's first job.
    """

    def __init__(self, client: Any, service: Any, stream: str, pipe: IO[bytes]) -> None:
        self.client, self.service, self.stream, self.pipe = client, service, stream, pipe
        self.lock = threading.Lock()
        self.waiting: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self.threads = [
            threading.Thread(target=target, name=f"logs {stream}", daemon=True) for target in (self._read, self._ship)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def finish(self, *, timeout_s: float = 10) -> None:
        """Wait until everything the process wrote is stored."""
        reader, shipper = self.threads
        reader.join(timeout_s)
        # A process that left the job's group may hold the pipe open; closing it under the reader would block.
        if not reader.is_alive():
            self.pipe.close()
        self.ended.set()
        shipper.join(timeout_s)

    def _read(self) -> None:
        for line in self.pipe:
            event = {"timestamp": int(time.time() * 1000), "message": text_of(line)}
            with self.lock:
                self.waiting.append(event)
        self.ended.set()

    def _ship(self) -> None:
        from botocore.exceptions import ClientError

        try:
            while not self.ended.wait(FLUSH_S):
                self._flush()
            gives_up_at_s = time.monotonic() + LAST_TRY_S
            while not self._flush() and time.monotonic() < gives_up_at_s:
                time.sleep(FLUSH_S)
        except ClientError as error:  # a role without log rights has no logs, here as there; the job goes on
            log.warning("no log for %s: %s", self.stream, error)

    def _flush(self) -> bool:
        """Whether everything that waited is stored; what is not waits on, before what comes after it."""
        with self.lock:
            events, self.waiting = self.waiting, []
        sent = 0
        try:
            for batch in batches(events):
                self._put(batch)
                sent += len(batch)
        except Unanswered as error:
            log.info("the log of %s waits: %s", self.stream, error)
        with self.lock:
            self.waiting = events[sent:] + self.waiting
        return sent == len(events)

    def _put(self, batch: list[dict[str, Any]]) -> None:
        """Store a batch, in a stream that is made when it is missing. Unanswered when that has to wait."""
        from botocore.exceptions import BotoCoreError, ClientError

        names = {"logGroupName": GROUP, "logStreamName": self.stream}
        try:
            try:
                self.client.put_log_events(**names, logEvents=batch)
            except self.client.exceptions.ResourceNotFoundException:
                make_group(self.service)
                self.client.create_log_stream(**names)
                self.client.put_log_events(**names, logEvents=batch)
        except BotoCoreError as error:
            raise Unanswered(str(error)) from error
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < SERVERS_FAULT:
                raise
            raise Unanswered(str(error)) from error


class Unanswered(Exception):
    """The log service is not there, or failed for a reason of its own."""


def make_group(service: Any) -> None:
    with suppress(service.exceptions.ResourceAlreadyExistsException):
        service.create_log_group(logGroupName=GROUP)


def text_of(line: bytes) -> str:
    """A line as CloudWatch takes it: UTF-8, not empty, not too long."""
    return line.rstrip(b"\r\n")[:MAX_LINE_BYTES].decode("utf-8", "replace") or " "


def batches(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Cut into calls that PutLogEvents takes."""
    batch: list[dict[str, Any]] = []
    size = 0
    for event in events:
        weight = len(event["message"].encode()) + EVENT_OVERHEAD_BYTES
        if batch and (len(batch) >= MAX_EVENTS or size + weight > MAX_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(event)
        size += weight
    if batch:
        yield batch
