"""Faults on purpose: what a test, or a curious user, can make the local SageMaker do wrong.

{"refuse_creates": {"code": "ThrottlingException", "count": 2},   the next creates are refused
 "capacity": {"ml.g5.xlarge": 0},                                 machines there are of a type
 "events": {"*-a001": "drop"}, "late_s": 1.0}                     drop | twice | late, by pattern of the job name
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from microtuning_local.sagemaker.rules import Refusal, limit_exceeded, validation

EventFault = Literal["drop", "twice", "late"]


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
        matching = (fault for pattern, fault in self.spec.events.items() if fnmatchcase(job_name, pattern))
        return next(matching, None)


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
