"""Warm pools: the machines of a job that stay after its end, for the next job that matches.

InUse while the job runs -> Available for KeepAlivePeriodInSeconds -> Reused by a matching job, or Terminated. All of it is
in the job's record: how a pool stands follows from the record and the time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from microtuning_local.sagemaker import rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from microtuning_local.sagemaker.jobs import Job

# How a job may have failed without harm to its machines; after anything else they are not kept.
_HARMLESS = ("AlgorithmError", "ClientError")
_MATCHING = ("RoleArn", "VpcConfig", "EnableInterContainerTrafficEncryption", "EnableNetworkIsolation")
_MATCHING_RESOURCES = ("InstanceType", "InstanceCount", "VolumeKmsKeyId", "VolumeSizeInGB")


def keep_alive_s(job: Job) -> int:
    return int(job.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0)


def kept_type(job: Job) -> str:
    return str(job.request["ResourceConfig"].get("SelectedInstanceType") or job.instance_type)


def begin(job: Job, now: float) -> None:
    """The job has ended: its machines are kept if it asked for that, had any, and nothing was wrong with them."""
    is_sound = job.status != "Failed" or (job.failure_reason or "").startswith(_HARMLESS)
    if keep_alive_s(job) and job.segments and is_sound:
        job.kept_since, job.kept_until = now, now + keep_alive_s(job)


def status(job: Job, now: float) -> str | None:
    """None for a job that asked for no pool."""
    if not keep_alive_s(job) and job.kept_since is None:
        return None
    if not job.is_terminal:
        return "InUse"
    if job.reused_by:
        return "Reused"
    return "Available" if job.kept_until is not None and now < job.kept_until else "Terminated"


def description(job: Job, now: float) -> dict[str, Any] | None:
    """WarmPoolStatus of a described job. Its seconds are told once it has ended, as the service's own model says."""
    stands = status(job, now)
    if stands is None:
        return None
    kept_s = (job.kept_until or 0) - (job.kept_since or 0)
    seconds = {"ResourceRetainedBillableTimeInSeconds": math.ceil(kept_s)} if stands in ("Reused", "Terminated") else {}
    return {"Status": stands, **seconds, **({"ReusedByJob": job.reused_by} if job.reused_by else {})}


def matches(request: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Whether a job of `request` takes the machines of one of `kept`."""
    resources, kept_resources = request["ResourceConfig"], kept["ResourceConfig"]
    if request.get("EnableManagedSpotTraining") or not resources.get("InstanceType"):
        return False
    same = all(_of(request, each) == _of(kept, each) for each in _MATCHING)
    return same and all(resources.get(each) == kept_resources.get(each) for each in _MATCHING_RESOURCES)


def _of(request: Mapping[str, Any], key: str) -> Any:
    """A switch that is not given is off."""
    return request.get(key) or None


def reuse(job: Job, by: str, now: float) -> None:
    job.kept_until, job.reused_by = now, by


def update(job: Job, keep_alive: int, now: float) -> None:
    """UpdateTrainingJob: another time to be kept, counted from the job's end; 0 ends the pool."""
    stands = status(job, now)
    if stands not in ("InUse", "Available"):
        raise rules.validation(
            f"The warm pool of training job {job.name} cannot be updated: its status is {stands or 'None'}, and only "
            "one that is InUse or Available can be."
        )
    job.request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = keep_alive
    if job.kept_since is not None:
        job.kept_until = max(now, job.kept_since + keep_alive)


def end(job: Job, now: float) -> None:
    """The machines are gone at the latest now."""
    if job.kept_until is not None:
        job.kept_until = min(job.kept_until, now)
