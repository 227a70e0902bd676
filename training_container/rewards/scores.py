"""What a reward is asked, what one part of it answers, and what comes of all parts together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

NOT_SCORED = math.nan


@dataclass(frozen=True)
class Question:
    """What a reward is asked about; one entry a completion in each list. Texts, or lists of messages for chat rows."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.completions)

    def part(self, start: int, stop: int) -> Question:
        chosen = slice(start, stop)
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return Question(self.prompts[chosen], self.completions[chosen], self.completion_ids[chosen], columns)

    def row(self, index: int) -> dict[str, Any]:
        """The columns of one completion's row."""
        return {name: values[index] for name, values in self.columns.items()}

    def as_arguments(self) -> dict[str, Any]:
        own = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        return self.columns | own


@dataclass(frozen=True)
class Answer:
    """Of one part, about one completion. value: None abstains. components: other numbers, for showing."""

    value: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    timed_out: bool = False

    @property
    def abstains(self) -> bool:
        """It leaves the total to the other parts; a part that was to answer and did not leaves no total at all."""
        return not self.timed_out and (self.value is None or math.isnan(self.value))

    @property
    def number(self) -> float:
        """NaN for whatever is no finite number."""
        return self.value if self.value is not None and math.isfinite(self.value) else NOT_SCORED

    def as_json(self) -> Any:
        """A number or null where that is all there is."""
        return asdict(self) if self.components or self.notes or self.timed_out else self.value

    @classmethod
    def from_json(cls, saved: Any) -> Answer:
        return cls(**saved) if isinstance(saved, dict) else cls(saved)


TIMED_OUT = Answer(None, timed_out=True)


@dataclass(frozen=True)
class Answers:
    """Of one part, one a completion.

    metrics: numbers about all of them, as the user's function logged them. cause: why some did not come, where it is known.
    """

    each: list[Answer]
    metrics: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """One after the other; metrics are means."""
        each = [each for part in parts for each in part.each]
        return cls(each, mean_of([part.metrics for part in parts]), next((p.cause for p in parts if p.cause), ""))


class Reward(Protocol):
    """One kind of reward: each has a file of its own."""

    def score(self, question: Question, *, step: int) -> Answers:
        """One answer a completion, in their order.

        Raises:
            UserFailure: it raised, or answered what is no score; the message says what was expected.
        """

    def close(self) -> None:
        """End its processes and connections."""


@dataclass(frozen=True)
class Scores:
    """One value a completion (NaN = not scored), and why some have none.

    values: the weighted sums. components: by name of the part, and as `<part>/<component>` what a part told beside its
    score; NaN where it has none. notes: texts and the like that go to the rollout log. weights: of the parts, by name.
    abstained, not_finite, timed_out: answers, over all parts. logged: means of what user functions logged.
    """

    values: list[float]
    components: Mapping[str, list[float]] = field(default_factory=dict)
    notes: Mapping[str, list[Any]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, float] = field(default_factory=dict)
    abstained: int = 0
    not_finite: int = 0
    timed_out: int = 0

    @property
    def scored(self) -> list[float]:
        return [value for value in self.values if not math.isnan(value)]

    @property
    def mean(self) -> float:
        """Over the scored completions; NaN when there is none."""
        return mean(self.values)

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        return cls(
            values=[value for part in parts for value in part.values],
            components=_columns_joined(parts, [part.components for part in parts], NOT_SCORED),
            notes=_columns_joined(parts, [part.notes for part in parts], None),
            weights=parts[0].weights if parts else {},
            logged=mean_of([part.logged for part in parts]),
            abstained=sum(part.abstained for part in parts),
            not_finite=sum(part.not_finite for part in parts),
            timed_out=sum(part.timed_out for part in parts),
        )

    @property
    def why_unscored(self) -> str:
        """As a sentence says it: "3 abstained (None), 1 timed out"."""
        found = {
            "abstained (None)": self.abstained,
            "not finite (NaN or infinite)": self.not_finite,
            "timed out": self.timed_out,
        }
        return ", ".join(f"{count} {name}" for name, count in found.items() if count)

    def counts(self) -> dict[str, int]:
        """The counts that are not 0, as metrics."""
        found = {"abstained": self.abstained, "not_finite": self.not_finite, "timed_out": self.timed_out}
        return {f"reward_{name}": count for name, count in found.items() if count}

    def metrics(self) -> dict[str, float]:
        """`reward/<part>` and `reward/<part>/<component>`: means over the completions that have it; what was logged.

        The only part of a reward is the reward itself, which is reported already.
        """
        alone = len(self.weights) < 2
        means = {name: mean(values) for name, values in self.components.items() if not (alone and name in self.weights)}
        named = {f"reward/{name.removeprefix('reward/')}": value for name, value in means.items()}
        return named | self._heldout_gap() | dict(self.logged)

    def _heldout_gap(self) -> dict[str, float]:
        """How far the parts that are trained on lie above those that only observe, on the same completions.

        The mean of the first, weighted, less the plain mean of the others. Where both are on the same scale it is the
        advantage of being trained on; on any scale it is a widening gap that tells of reward hacking, not its size.
        """
        means = {name: mean(self.components[name]) for name in self.weights if name in self.components}
        trained = {name: abs(weight) for name, weight in self.weights.items() if weight}
        held_out = [means[name] for name, weight in self.weights.items() if not weight]
        if not held_out or not trained:
            return {}
        signed = sum(self.weights[name] * means[name] for name in trained) / sum(trained.values())
        return {"reward_heldout_gap": signed - sum(held_out) / len(held_out)}


def mean(values: Iterable[float]) -> float:
    """Over those that are not NaN; NaN when there is none."""
    found = [value for value in values if not math.isnan(value)]
    return sum(found) / len(found) if found else NOT_SCORED


def mean_of(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in several for name in each)
    return {name: mean(each.get(name, NOT_SCORED) for each in several) for name in names}


def _columns_joined(
    parts: Sequence[Scores], columns: Sequence[Mapping[str, list[Any]]], missing: Any
) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in columns for name in each)
    pairs = list(zip(parts, columns, strict=True))
    return {
        name: [value for part, each in pairs for value in each.get(name) or [missing] * len(part.values)]
        for name in names
    }


def total(answers: Mapping[str, Answer], weights: Mapping[str, float]) -> float:
    """The weighted sum over the parts that have a score for one completion.

    A part that abstains leaves it to the others; NaN when all of weight do. One that timed out or is infinite has no
    score that is known, and the sum of the others would be another reward: NaN. So is a sum that no float holds.
    """
    counted = {name: each for name, each in answers.items() if weights[name] and not each.abstains}
    try:
        found = math.fsum(weights[name] * each.number for name, each in counted.items()) if counted else NOT_SCORED
    except (OverflowError, ValueError):  # of finite numbers, and of infinities that cancel
        return NOT_SCORED
    return found if math.isfinite(found) else NOT_SCORED


def combined(parts: Mapping[str, Answers], weights: Mapping[str, float]) -> Scores:
    """The scores of some completions, from what each part answered about them."""
    rows = [dict(zip(parts, row, strict=True)) for row in zip(*(part.each for part in parts.values()), strict=True)]
    every = [each for part in parts.values() for each in part.each]
    components: dict[str, list[float]] = {}
    notes: dict[str, list[Any]] = {}
    for name, part in parts.items():
        components[name] = [each.number for each in part.each]
        components |= _spread(name, [each.components for each in part.each], NOT_SCORED)
        notes |= _spread(name, [each.notes for each in part.each], None)
    return Scores(
        values=[total(row, weights) for row in rows],
        components=components,
        notes=notes,
        weights=dict(weights),
        logged={name: value for part in parts.values() for name, value in part.metrics.items()},
        abstained=sum(each.value is None and not each.timed_out for each in every),
        not_finite=sum(each.value is not None and not math.isfinite(each.value) for each in every),
        timed_out=sum(each.timed_out for each in every),
    )


def _spread(part: str, rows: Sequence[Mapping[str, Any]], missing: Any) -> dict[str, list[Any]]:
    """One list a name, as `<part>/<name>`, from one mapping a completion."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {f"{part}/{name}": [row.get(name, missing) for row in rows] for name in names}
