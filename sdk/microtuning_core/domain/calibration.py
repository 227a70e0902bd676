"""What past attempts teach about how long the next one takes: measured over guessed, by model family and type.

    sample        one attempt that made steps: the seconds they took, and what estimates.py would have said of them
    calibration   the median of measured / guessed of the nearest samples there are, and how far they lie apart

Nearest are those of the same family on the same type of machine; else of the family on any. Without any the guess stands,
and may be a third or three times of what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil
from statistics import median
from typing import Any

from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.cost import saving_share
from microtuning_core.domain.estimates import START_S, Work, training_s
from microtuning_core.domain.planning import TINY_DECODER, ModelShape
from microtuning_core.domain.run import Attempt, Run
from microtuning_core.domain.shapes import shape_from_name
from microtuning_core.domain.spec import RunSpec
from microtuning_core.domain.spending import STEP_PHASES, model_of

_UNKNOWN = 3.0  # a guess is a third of the truth, or three times of it
_ELSEWHERE = 2.0  # the family is known, but not on this type
_KEPT = Decimal("0.0001")
_ALONE, _AMONG = 1.5, 1.2  # beyond the only sample, and beyond the outermost of several


@dataclass(frozen=True)
class Sample:
    """One attempt. other_s: what was billed beside its steps. saving: by spot, where it was spot."""

    family: str
    instance_type: str
    guessed_s: float
    measured_s: float
    other_s: float
    saving: Decimal | None = None

    @property
    def ratio(self) -> float:
        return self.measured_s / self.guessed_s


@dataclass(frozen=True)
class Calibration:
    """A guess times `factor` is the estimate; times `low` and `high` its range. other_s comes on top."""

    factor: float = 1.0
    low: float = 1 / _UNKNOWN
    high: float = _UNKNOWN
    other_s: float = START_S
    attempts: int = 0
    same_type: bool = False
    saving: Decimal | None = None  # of spot, by past attempts on such machines


def family_of(model: str) -> str:
    """Models that differ in size alone: "Qwen/Qwen3-0.6B" and "Qwen/Qwen3-8B" are "qwen3"."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return name.replace("_", "-").split("-")[0] or name


def samples_of(runs: Iterable[Run]) -> list[Sample]:
    """Every attempt of these runs that something can be learned from."""
    return [sample for run in runs for attempt in run.attempts if (sample := _sample(run, attempt))]


def _sample(run: Run, attempt: Attempt) -> Sample | None:
    shape, measured, row = shape_of(run.spec), attempt.metered, CATALOG.get(attempt.plan.instance_type)
    if shape is None or measured is None or row is None or not measured.steps_done or not attempt.training_s:
        return None
    seconds = sum(measured.phase_ms.get(name, 0) for name in STEP_PHASES) / 1000
    tokens = measured.tokens.get("prefill", 0) + measured.tokens.get("sampled", 0) or measured.tokens.get("trained", 0)
    if not seconds or not tokens:
        return None
    work = Work(steps=measured.steps_done, tokens_a_step=tokens / measured.steps_done, **drawing_of(run.spec))
    guessed_s = training_s(shape, run.spec.model.effective_adapter, row, work, count=attempt.plan.count)
    return Sample(
        family=family_of(model_of(run)),
        instance_type=row.instance_type,
        guessed_s=guessed_s,
        measured_s=seconds,
        other_s=max(0.0, attempt.training_s - seconds),
        saving=saving_share(attempt.billed_s, attempt.training_s) if attempt.plan.spot else None,
    )


def shape_of(spec: RunSpec) -> ModelShape | None:
    """As far as the spec alone tells it."""
    return shape_from_name(spec.model.base) if spec.model.base else TINY_DECODER


def drawing_of(spec: RunSpec) -> dict[str, int]:
    """What of its work is drawing: positions of one rollout, and how many steps are made of it."""
    algorithm: Any = spec.algorithm
    drawn = getattr(algorithm, "max_completion_tokens", 0)
    turns = spec.environment.max_steps if algorithm.type == "multi_turn" else 1
    return {
        "drawn_positions": drawn * turns,
        "minibatches": getattr(algorithm, "minibatches", 1),
        "passes": getattr(algorithm, "passes", 1),
    }


def calibration(samples: Sequence[Sample], family: str, instance_type: str) -> Calibration:
    """What these samples say of a model of that family on that type."""
    of_family = [each for each in samples if each.family == family]
    of_type = [each for each in of_family if each.instance_type == instance_type]
    savings = [each.saving for each in samples if each.instance_type == instance_type and each.saving is not None]
    saving = median(savings) if savings else None
    nearest = of_type or of_family
    if not nearest:
        return Calibration(saving=saving)
    ratios = [each.ratio for each in nearest]
    beyond = (_ALONE if len(ratios) == 1 else _AMONG) if of_type else _ELSEWHERE
    return Calibration(
        factor=median(ratios),
        low=min(ratios) / beyond,
        high=max(ratios) * beyond,
        other_s=median(each.other_s for each in nearest),
        attempts=len(nearest),
        same_type=bool(of_type),
        saving=saving,
    )


@dataclass(frozen=True)
class Estimate:
    """What a run would take on one kind of machine. usd: on demand, which for spot is the upper bound."""

    instance_type: str
    count: int
    spot: bool
    seconds: float
    low_s: float
    high_s: float
    usd: Decimal
    low_usd: Decimal
    high_usd: Decimal
    attempts: int
    same_type: bool
    spot_usd: Decimal | None = None  # with what spot saved in past attempts on this type

    @property
    def basis(self) -> str:
        """What it rests on, in words."""
        if not self.attempts:
            return "a first guess; it may be a third of it, or three times as much"
        where = "on this type" if self.same_type else "on other types"
        return f"by {self.attempts} past attempt{'s' if self.attempts > 1 else ''} of this model family {where}"


def estimate(
    guessed_s: float, machine: str, count: int, usd_per_hour: Decimal, found: Calibration, *, spot: bool
) -> Estimate:
    """The guess for one machine as the calibration corrects it; money for all machines and for what is not training."""
    seconds, low_s, high_s = (guessed_s * factor + found.other_s for factor in (found.factor, found.low, found.high))
    usd, low_usd, high_usd = (_usd(each, count, usd_per_hour) for each in (seconds, low_s, high_s))
    return Estimate(
        instance_type=machine,
        count=count,
        spot=spot,
        seconds=seconds,
        low_s=low_s,
        high_s=high_s,
        usd=usd,
        low_usd=low_usd,
        high_usd=high_usd,
        attempts=found.attempts,
        same_type=found.same_type,
        spot_usd=None if found.saving is None else (usd * (1 - found.saving)).quantize(_KEPT),
    )


def _usd(seconds: float, count: int, usd_per_hour: Decimal) -> Decimal:
    return (Decimal(ceil(seconds) * count) * usd_per_hour / 3600).quantize(_KEPT)
