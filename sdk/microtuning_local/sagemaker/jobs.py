"""Training jobs as records: what Describe answers, kept as one JSON file a job so that a restart knows them.

A record is the request plus what became of it. Times are epoch seconds, as aws-json 1.1 carries them.
"""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from microtuning_local.home import write_whole
from microtuning_local.sagemaker import rules, warm_pools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

TERMINAL = ("Completed", "Failed", "Stopped")
INTERNAL_ERROR = "InternalServerError: We encountered an internal error. Please try again."
CAPACITY_ERROR = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)
MAX_REASON_CHARACTERS = 1024
# What AWS asks for spot differs by type and day; 30 % of the on-demand price is the discount it advertises (70 %).
SPOT_BILLED_FRACTION = 0.3

STATUS_MESSAGES = {
    "Starting": "Starting the training job",
    "Pending": "Waiting for available instances",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Interrupted": "Training job interrupted: the instances were taken back",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
}


@dataclass
class Job:
    """One training job. `segments` are the stretches of time it held machines, as [start, end or None].

    kept_since, kept_until, reused_by: of its warm pool (warm_pools.py), once it has one.
    """

    name: str
    arn: str
    request: dict[str, Any]
    tags: dict[str, str]
    created_at: float
    modified_at: float
    status: str = "InProgress"
    secondary: str = "Starting"
    transitions: list[dict[str, Any]] = field(default_factory=list)
    started_at: float | None = None
    ended_at: float | None = None
    segments: list[list[float | None]] = field(default_factory=list)
    failure_reason: str | None = None
    model_uri: str | None = None
    stop_asked: bool = False
    kept_since: float | None = None
    kept_until: float | None = None
    reused_by: str | None = None

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_spot(self) -> bool:
        return bool(self.request.get("EnableManagedSpotTraining"))

    @property
    def instance_type(self) -> str:
        return rules.instance_types(self.request)[0]

    @property
    def instance_count(self) -> int:
        config = self.request["ResourceConfig"]
        if config.get("InstanceGroups"):
            return sum(group["InstanceCount"] for group in config["InstanceGroups"])
        if config.get("InstancePreferences"):
            return int(config["InstancePreferences"][0].get("InstanceCount") or 1)
        return int(config["InstanceCount"])

    def held_s(self, now: float) -> float:
        """Seconds it has held machines: downloading, training and uploading, but not waiting or interrupted."""
        return sum((end or now) - float(start or 0) for start, end in self.segments)


def new_job(request: dict[str, Any], arn: str, now: float) -> Job:
    tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
    kept = {key: value for key, value in request.items() if key != "Tags"}
    return Job(request["TrainingJobName"], arn, kept, tags, created_at=now, modified_at=now)


def moved(job: Job, status: str, secondary: str, now: float, message: str | None = None) -> None:
    """Put the job into a secondary status: the last transition ends, a new one begins."""
    if job.transitions:
        job.transitions[-1].setdefault("EndTime", now)
    entry = {"Status": secondary, "StartTime": now, "StatusMessage": message or STATUS_MESSAGES[secondary]}
    job.status, job.secondary, job.modified_at = status, secondary, now
    if status in TERMINAL:
        entry["EndTime"] = now
        job.ended_at = now
        close_segment(job, now)
        warm_pools.begin(job, now)
    job.transitions.append(entry)


def close_segment(job: Job, now: float) -> None:
    """The machines are given back: nothing is billed from here on."""
    if job.segments and job.segments[-1][1] is None:
        job.segments[-1][1] = now


def description(job: Job, now: float) -> dict[str, Any]:
    """What DescribeTrainingJob answers. Times and seconds that do not apply are left out, as the service does."""
    known: dict[str, Any] = {
        "TrainingJobArn": job.arn,
        "TrainingJobStatus": job.status,
        "SecondaryStatus": job.secondary,
        "SecondaryStatusTransitions": job.transitions,
        "CreationTime": job.created_at,
        "LastModifiedTime": job.modified_at,
        "TrainingStartTime": job.started_at,
        "TrainingEndTime": job.ended_at if job.started_at else None,
        "FailureReason": job.failure_reason,
        "ModelArtifacts": {"S3ModelArtifacts": job.model_uri} if job.model_uri else None,
        "WarmPoolStatus": warm_pools.description(job, now),
        **seconds(job, now),
    }
    defaults = {"EnableNetworkIsolation": False, "EnableManagedSpotTraining": False}
    return defaults | job.request | {key: value for key, value in known.items() if value is not None}


def seconds(job: Job, now: float) -> dict[str, int | None]:
    """TrainingTimeInSeconds and BillableTimeInSeconds, whole seconds rounded up; none before machines were held.

    A spot job is billed a part of its time (that is how the service shows the discount), and a job that waited in
    vain is billed 0.
    """
    if not job.segments:
        never = 0 if job.secondary == "MaxWaitTimeExceeded" else None
        return {"TrainingTimeInSeconds": never, "BillableTimeInSeconds": never}
    held = math.ceil(job.held_s(now))
    billed = math.ceil(held * SPOT_BILLED_FRACTION) if job.is_spot else held
    return {"TrainingTimeInSeconds": held, "BillableTimeInSeconds": billed if job.is_terminal else None}


def summary(job: Job) -> dict[str, Any]:
    """One row of ListTrainingJobs."""
    row = {
        "TrainingJobName": job.name,
        "TrainingJobArn": job.arn,
        "CreationTime": job.created_at,
        "LastModifiedTime": job.modified_at,
        "TrainingEndTime": job.ended_at,
        "TrainingJobStatus": job.status,
        "SecondaryStatus": job.secondary,
    }
    return {key: value for key, value in row.items() if value is not None}


class Jobs:
    """All jobs, by name. Every change is written to jobs/<name>/record.json before anybody hears of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.by_name: dict[str, Job] = {}

    def load(self) -> list[Job]:
        """Read what an earlier server wrote; returns the jobs that were in flight then."""
        for path in sorted(self.folder.glob("*/record.json")):
            job = Job(**json.loads(path.read_text()))
            self.by_name[job.name] = job
        return [job for job in self.by_name.values() if not job.is_terminal]

    def add(self, job: Job) -> None:
        with self.lock:
            if job.name in self.by_name:
                raise rules.already_exists(job.name, self.by_name[job.name].arn)
            self.by_name[job.name] = job
            self.save(job)

    def get(self, name: str) -> Job:
        with self.lock:
            if name not in self.by_name:
                raise rules.not_found()
            return self.by_name[name]

    def by_arn(self, arn: str) -> Job:
        return self.get(arn.rsplit("/", 1)[-1])

    def change(self, job: Job, change: Callable[[Job], None]) -> None:
        with self.lock:
            change(job)
            self.save(job)

    def all(self) -> list[Job]:
        with self.lock:
            return list(self.by_name.values())

    def save(self, job: Job) -> None:
        folder = self.folder / job.name
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "record.json", json.dumps(asdict(job)))


DEFAULT_PAGE = 10


def listed(jobs: Iterable[Job], query: Mapping[str, Any]) -> dict[str, Any]:
    """A page of ListTrainingJobs. The token is the place to go on from in the order asked for."""
    ordered = sorted((job for job in jobs if matches(job, query)), key=lambda job: sort_key(job, query))
    if query.get("SortOrder") == "Descending":
        ordered.reverse()
    start = page_start(query)
    end = start + int(query.get("MaxResults") or DEFAULT_PAGE)
    page: dict[str, Any] = {"TrainingJobSummaries": [summary(job) for job in ordered[start:end]]}
    return page | ({"NextToken": str(end)} if end < len(ordered) else {})


def page_start(query: Mapping[str, Any]) -> int:
    token = query.get("NextToken") or "0"
    if not str(token).isdigit():
        raise rules.validation("Invalid NextToken.")
    return int(token)


def sort_key(job: Job, query: Mapping[str, Any]) -> tuple[Any, str]:
    match query.get("SortBy", "CreationTime"):
        case "Name":
            return job.name, job.name
        case "Status":
            return job.status, job.name
    return job.created_at, job.name


def matches(job: Job, query: Mapping[str, Any]) -> bool:
    return (
        str(query.get("NameContains", "")).lower() in job.name.lower()
        and query.get("StatusEquals") in (None, job.status)
        and float(query.get("CreationTimeAfter", 0)) <= job.created_at
        and job.created_at <= float(query.get("CreationTimeBefore", math.inf))
        and float(query.get("LastModifiedTimeAfter", 0)) <= job.modified_at
        and job.modified_at <= float(query.get("LastModifiedTimeBefore", math.inf))
    )


def now() -> float:
    """Epoch seconds, to the millisecond: the precision the service answers with."""
    return round(time.time(), 3)
