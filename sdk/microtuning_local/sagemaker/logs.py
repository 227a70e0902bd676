"""A job's standard output as CloudWatch Logs: group /aws/sagemaker/TrainingJobs, one stream a host."""

from __future__ import annotations

import logging
import threading
import time
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "/aws/sagemaker/TrainingJobs"
FLUSH_S = 0.25
# PutLogEvents takes 10,000 events and 1 MiB, 26 bytes of it for each event; an event takes 256 KiB.
MAX_EVENTS = 1_000
MAX_BATCH_BYTES = 900_000
EVENT_OVERHEAD_BYTES = 26
MAX_LINE_BYTES = 256 * 1024 - EVENT_OVERHEAD_BYTES

log = logging.getLogger(__name__)


def stream_name(job_name: str, host: str, started_at: float) -> str:
    return f"{job_name}/{host}-{int(started_at)}"


class LogShipper:
    """Reads a process's output to its end and ships it in order, at least every `FLUSH_S`."""

    def __init__(self, client: Any, stream: str, pipe: IO[bytes]) -> None:
        self.client, self.stream, self.pipe = client, stream, pipe
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
        try:
            self.client.create_log_stream(logGroupName=GROUP, logStreamName=self.stream)
            while not self.ended.wait(FLUSH_S):
                self._flush()
            self._flush()
        except Exception as error:  # a role without log rights has no logs, here as there; the job goes on
            log.warning("no log for %s: %s", self.stream, error)

    def _flush(self) -> None:
        with self.lock:
            events, self.waiting = self.waiting, []
        for batch in batches(events):
            self.client.put_log_events(logGroupName=GROUP, logStreamName=self.stream, logEvents=batch)


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
