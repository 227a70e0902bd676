"""SageMaker's "Training Job State Change" events, put on the emulator's default bus in the order they happened.

They go as source `local.sagemaker`: a bus takes no `aws.` source from outside the service (docs/local-cloud.md).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from microtuning_local.sagemaker.jobs import Job, description

if TYPE_CHECKING:
    from microtuning_local.sagemaker.faults import Faults

SOURCE = "local.sagemaker"
DETAIL_TYPE = "SageMaker Training Job State Change"
TIMES = ("CreationTime", "LastModifiedTime", "TrainingStartTime", "TrainingEndTime")
# Members of Describe that the event does not carry (docs/local-cloud.md): cost has to ask Describe.
NOT_IN_EVENTS = (
    "BillableTimeInSeconds",
    "TrainingTimeInSeconds",
    "CheckpointConfig",
    "EnableManagedSpotTraining",
    "Environment",
    "EnableNetworkIsolation",
)
RETRY_S = (0.1, 0.5, 2.0, 5.0)

log = logging.getLogger(__name__)


def event_entry(job: Job, now: float) -> dict[str, Any]:
    """One PutEvents entry: the description with times in epoch milliseconds and tags as a map."""
    detail = {key: value for key, value in description(job, now).items() if key not in NOT_IN_EVENTS}
    detail |= {key: milliseconds(detail[key]) for key in TIMES if key in detail}
    detail["SecondaryStatusTransitions"] = [in_milliseconds(entry) for entry in job.transitions]
    detail["Tags"] = dict(job.tags)
    return {"Source": SOURCE, "DetailType": DETAIL_TYPE, "Resources": [job.arn], "Detail": json.dumps(detail)}


def in_milliseconds(transition: dict[str, Any]) -> dict[str, Any]:
    times = {key: milliseconds(transition[key]) for key in ("StartTime", "EndTime") if key in transition}
    return transition | times


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


class EventSender:
    """Sends events one after another from a thread of its own, so that no job waits for the bus."""

    def __init__(self, client: Any, faults: Faults) -> None:
        self.client, self.faults = client, faults
        self.waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._send_all, name="events", daemon=True)
        self.thread.start()

    def emit(self, job: Job, now: float) -> None:
        entry = event_entry(job, now)
        match self.faults.of_event(job.name):
            case "drop":
                return
            case "twice":
                self.waiting.put(entry)
            case "late":
                return self._put_later(entry)
            case "mixed" if len(job.transitions) % 2:
                return self._put_later(entry)
        self.waiting.put(entry)

    def _put_later(self, entry: dict[str, Any]) -> None:
        timer = threading.Timer(self.faults.spec.late_s, self.waiting.put, args=(entry,))
        timer.daemon = True
        timer.start()

    def close(self, *, timeout_s: float) -> None:
        """Send what waits, for at most `timeout_s`."""
        self.waiting.put(None)
        self.thread.join(timeout_s)

    def _send_all(self) -> None:
        while (entry := self.waiting.get()) is not None:
            self._send(entry)

    def _send(self, entry: dict[str, Any]) -> None:
        """Send one event. One that cannot be sent is lost, as on AWS: events are hints and Describe is the truth."""
        for pause_s in (*RETRY_S, None):
            try:
                reply = self.client.put_events(Entries=[entry])
                if not reply["FailedEntryCount"]:
                    return
                problem = str(reply["Entries"])
            except Exception as error:  # whatever the bus does wrong must not end the thread that serves every job
                problem = repr(error)
            log.warning("event of %s was not taken: %s", entry["Resources"], problem)
            if pause_s is not None:
                time.sleep(pause_s)
