"""What DescribeTrainingJob says of one training job, as far as any rule needs it: the truth that events only hint at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

JobStatus = Literal["InProgress", "Completed", "Failed", "Stopping", "Stopped"]
TERMINAL_STATUSES = frozenset({"Completed", "Failed", "Stopped"})
ENDED_POOLS = frozenset({"Reused", "Terminated"})


@dataclass(frozen=True)
class StatusChange:
    status: str
    started_at: datetime
    ended_at: datetime | None = None


@dataclass(frozen=True)
class JobFacts:
    """Times are aware UTC; a job that never got a machine has no `started_at` and no seconds.

    warm_pool_status: Available, InUse, Reused or Terminated; None where the job asked for no pool.
    warm_pool_s: seconds its machines were kept and are paid for, one machine each; they grow until the pool has ended.
    """

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
    volume_gb: int = 0  # the EBS volume of each instance
    spot: bool = False
    changes: tuple[StatusChange, ...] = ()
    artifact_uri: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    warm_pool_status: str | None = None
    warm_pool_s: int | None = None

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_STATUSES

    @property
    def keeps_pool(self) -> bool:
        """Whether its warm pool may still cost something: until then `warm_pool_s` is not the last word."""
        return self.warm_pool_status is not None and self.warm_pool_status not in ENDED_POOLS


def job_facts(answer: Mapping[str, Any]) -> JobFacts:
    """The facts in an answer of DescribeTrainingJob; whatever the service left out stays None."""
    resources, pool = answer.get("ResourceConfig", {}), answer.get("WarmPoolStatus", {})
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
        volume_gb=resources.get("VolumeSizeInGB", 0),
        spot=answer.get("EnableManagedSpotTraining", False),
        changes=tuple(_change(each) for each in answer.get("SecondaryStatusTransitions", [])),
        artifact_uri=answer.get("ModelArtifacts", {}).get("S3ModelArtifacts"),
        warm_pool_status=pool.get("Status"),
        warm_pool_s=pool.get("ResourceRetainedBillableTimeInSeconds"),
    )


def _change(transition: Mapping[str, Any]) -> StatusChange:
    return StatusChange(transition["Status"], transition["StartTime"], transition.get("EndTime"))
