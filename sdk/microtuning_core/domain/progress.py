"""progress.json: the one sign of life of a running job, and the source of its metering.

The container rewrites it by rename at most every ten seconds, less often as it grows old; the mirror of the checkpoint
folder carries it to S3:

    {"schema_version": 1, "run_id": "acme-sort-0a1b2c3d4e5f", "attempt": 1, "lineage": 1, "step": 40,
     "total_steps": 100, "at": "2026-01-02T03:04:05.678900Z", "longest_step_ms": 310,
     "phase_ms": {"load": 900, "rollout": 8000, "reward": 90, "update": 7000, "checkpoint": 60, "idle": 0},
     "tokens": {"prefill": 5120, "sampled": 71680, "trained": 71680}, "steps_done": 40,
     "saved": {"checkpoints": 3, "files": 21, "bytes": 1843200}, "restarts": [],
     "starts": [{"at": "2026-01-02T03:03:40.000000Z", "restore_ms": 900, "first_step_ms": 300}],
     "checkpoint": {"step": 36, "at": "2026-01-02T03:04:04.100000Z"},
     "metrics": {"first": {"reward": 0.2}, "last": {"reward": 0.7, "tokens_per_s": 5100.0},
     "eval_before": {"eval_accuracy": 0.3}, "eval_after": {}}}
"""

from __future__ import annotations

from math import ceil, log

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from .record import Record, UtcTime, Value

PROGRESS_NAME = "progress.json"
# A sixtieth of a job's age lies between two signs, at least and at most so long: each costs the control plane its share.
_SIGN_AFTER_S, _SELDOMEST_S, _OF_ITS_AGE = 10.0, 60.0, 60.0


def sign_after_s(age_s: float, least_s: float = _SIGN_AFTER_S) -> float:
    """How long after one sign of life the next may be written by a job that is so old."""
    return max(least_s, min(_SELDOMEST_S, age_s / _OF_ITS_AGE))


def signs_within(seconds: int) -> int:
    """How many signs a job gives in that time by the clock alone."""
    often_s, seldom_s = _SIGN_AFTER_S * _OF_ITS_AGE, _SELDOMEST_S * _OF_ITS_AGE
    found = min(seconds, often_s) / _SIGN_AFTER_S
    if seconds > often_s:
        found += _OF_ITS_AGE * log(min(seconds, seldom_s) / often_s)
    return ceil(found + max(0.0, seconds - seldom_s) / _SELDOMEST_S)


class PhaseMs(Value):
    """Wall-clock milliseconds of this attempt by what they went into; `load` is everything before the first step."""

    load: NonNegativeInt = 0
    rollout: NonNegativeInt = 0
    reward: NonNegativeInt = 0
    update: NonNegativeInt = 0
    checkpoint: NonNegativeInt = 0
    idle: NonNegativeInt = 0


class TokenCounts(Value):
    """Tokens of this attempt: `prefill` read as prompts, `sampled` drawn, `trained` that carried a loss."""

    prefill: NonNegativeInt = 0
    sampled: NonNegativeInt = 0
    trained: NonNegativeInt = 0


class Saved(Value):
    """What this attempt wrote of checkpoints, all of which the mirror carried to S3."""

    checkpoints: NonNegativeInt = 0
    files: NonNegativeInt = 0  # with the manifests
    bytes: NonNegativeInt = 0


class Restart(Value):
    """A worker that died and was started again in place, with the five stages of its recovery in milliseconds."""

    cause: str
    at: UtcTime
    detect_ms: NonNegativeInt = 0
    decide_ms: NonNegativeInt = 0
    provision_ms: NonNegativeInt = 0
    restore_ms: NonNegativeInt = 0
    first_step_ms: NonNegativeInt = 0


class Start(Value):
    """A machine's beginning, or beginning again: ms until it could train, and of its first step once that is done."""

    at: UtcTime
    restore_ms: NonNegativeInt = 0
    first_step_ms: NonNegativeInt | None = None


class Written(Value):
    """The newest whole checkpoint on the machine's own disk, and since when it is there."""

    step: NonNegativeInt
    at: UtcTime


class ProgressMetrics(Value):
    """Metrics of the first and the newest step, and of the evaluations; a value that is not finite is left out."""

    first: dict[str, FiniteFloat] = Field(default_factory=dict)
    last: dict[str, FiniteFloat] = Field(default_factory=dict)
    eval_before: dict[str, FiniteFloat] = Field(default_factory=dict)
    eval_after: dict[str, FiniteFloat] = Field(default_factory=dict)


class Progress(Record):
    """How far a job is. `longest_step_ms` tells a silent job from a slow one.

    steps_done: of this attempt; one done again after a restart counts twice.
    restarts: of workers, in place. starts: of machines: one, and one more for each that spot took away and gave again.
    """

    run_id: str
    attempt: PositiveInt
    lineage: PositiveInt
    step: NonNegativeInt
    total_steps: NonNegativeInt
    at: UtcTime
    phase_ms: PhaseMs = Field(default_factory=PhaseMs)
    tokens: TokenCounts = Field(default_factory=TokenCounts)
    steps_done: NonNegativeInt = 0
    saved: Saved = Field(default_factory=Saved)
    restarts: tuple[Restart, ...] = ()
    starts: tuple[Start, ...] = ()
    checkpoint: Written | None = None
    longest_step_ms: NonNegativeInt = 0
    metrics: ProgressMetrics = Field(default_factory=ProgressMetrics)
