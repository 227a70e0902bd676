"""Faults on purpose: what a test, or a curious user, can make the local SageMaker do wrong.

{"refuse_creates": {"code": "ThrottlingException", "count": 2},   the next creates are refused
 "capacity": {"ml.g5.xlarge": 0},                                 machines there are of a type
 "warm_pool_quota": {"ml.g5.xlarge": 0},                          machines of a type that may be kept; else any number
 "end_jobs": {"*-a001": "internal_error"},                        or max_wait, of a spot job that trains or waits
 "events": {"*-a001": "drop"}, "late_s": 1.0}                     drop | twice | late | mixed (every second one late)
Patterns are of job names.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from microtuning_local.sagemaker.rules import Refusal, limit_exceeded, validation

EventFault = Literal["drop", "twice", "late", "mixed"]
JobFault = Literal["internal_error", "max_wait"]
Fault = TypeVar("Fault", bound=str)


class RefuseCreates(BaseModel):
    model_config = ConfigDict(extra="forbid")

    code: Literal["ThrottlingException", "ResourceLimitExceeded", "InternalServerError", "ValidationException"]
    count: int = Field(default=1, ge=0)
    message: str | None = None


class FaultSpec(BaseModel):
    """What goes wrong. `capacity` counts machines of a type; types not named have as many as the pool."""

    model_config = ConfigDict(extra="forbid")

    refuse_creates: RefuseCreates | None = None
    capacity: dict[str, int] = {}
    warm_pool_quota: dict[str, int] = {}
    end_jobs: dict[str, JobFault] = {}
    events: dict[str, EventFault] = {}
    late_s: float = Field(default=1.0, ge=0)


@dataclass
class Faults:
    """The spec in force, and how many creates it still refuses."""

    spec: FaultSpec = field(default_factory=FaultSpec)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replace(self, spec: FaultSpec) -> None:
        with self.lock:
            self.spec = spec

    def refusal(self, instance_type: str, count: int) -> Refusal | None:
        """The refusal due for one create, if any; each one given is one fewer to give."""
        with self.lock:
            due = self.spec.refuse_creates
            if not due or due.count < 1:
                return None
            due.count -= 1
        return refusal_of(due, instance_type, count)

    def of_event(self, job_name: str) -> EventFault | None:
        return _matching(self.spec.events, job_name)

    def of_job(self, job_name: str) -> JobFault | None:
        """How a job that trains or waits for a machine ends now, if one of them is to."""
        return _matching(self.spec.end_jobs, job_name)


def _matching(by_pattern: Mapping[str, Fault], job_name: str) -> Fault | None:
    return next((fault for pattern, fault in by_pattern.items() if fnmatchcase(job_name, pattern)), None)


def refusal_of(due: RefuseCreates, instance_type: str, count: int) -> Refusal:
    match due.code:
        case "ThrottlingException":
            return Refusal(due.code, due.message or "Rate exceeded")
        case "InternalServerError":
            return Refusal(due.code, due.message or "We encountered an internal error. Please try again.", status=500)
        case "ResourceLimitExceeded":
            return Refusal(due.code, due.message) if due.message else limit_exceeded(instance_type, count)
        case "ValidationException":
            return validation(due.message or "Refused on purpose.")
