"""What DescribeTrainingJob says of one training job, as far as any rule needs it: the truth that events only hint at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

JobStatus = Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
TERMINAL_STATUSES = frozenset({"Completed", "Failed", "Stopped"})


@dataclass(frozen=True)
class StatusChange:
    status: str
    started_at: datetime
    ended_at: datetime | None = None


@dataclass(frozen=True)
class JobFacts:
    """Times are aware UTC; a job that never got a machine has no `started_at` and no seconds."""

    job_name: str
    status: str
    secondary: str
    created_at: datetime
    failure_reason: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    billed_s: int | None = None
    training_s: int | None = None
    instance_type: str = ""
    instance_count: int = 1
    spot: bool = False
    changes: tuple[StatusChange, ...] = ()
    artifact_uri: str | None = None
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_STATUSES


def job_facts(answer: Mapping[str, Any]) -> JobFacts:
    """The facts in an answer of DescribeTrainingJob; whatever the service left out stays None."""
    resources = answer.get("ResourceConfig", {})
    return JobFacts(
        job_name=answer["TrainingJobName"],
        status=answer["TrainingJobStatus"],
        secondary=answer.get("SecondaryStatus", ""),
        created_at=answer["CreationTime"],
        failure_reason=answer.get("FailureReason"),
        started_at=answer.get("TrainingStartTime"),
        ended_at=answer.get("TrainingEndTime"),
        billed_s=answer.get("BillableTimeInSeconds"),
        training_s=answer.get("TrainingTimeInSeconds"),
        instance_type=resources.get("InstanceType", ""),
        instance_count=resources.get("InstanceCount", 1),
        spot=answer.get("EnableManagedSpotTraining", False),
        changes=tuple(_change(each) for each in answer.get("SecondaryStatusTransitions", [])),
        artifact_uri=answer.get("ModelArtifacts", {}).get("S3ModelArtifacts"),
    )


def _change(transition: Mapping[str, Any]) -> StatusChange:
    return StatusChange(transition["Status"], transition["StartTime"], transition.get("EndTime"))
