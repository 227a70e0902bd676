"""The rollout log of a run, read from S3: what the model said, and how every part of the reward scored it.

Each lineage has a log of its own. One that began at an earlier step than the last one reached takes the later steps' place:
what was said there is no part of the run's history any more.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal

from microtuning_core.domain.layout import rollout_file, rollouts_prefix, step_of_rollout_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from microtuning_core.aws.objects import ObjectStore

Rollout = dict[str, Any]
Order = Literal["written", "best", "worst"]


def read_rollouts(objects: ObjectStore, run_id: str, lineages: int, step: int | None) -> list[Rollout]:
    """The completions of one step (the newest that has some by default), in the order they were drawn."""
    found = {lineage: steps_logged(objects, run_id, lineage) for lineage in range(1, lineages + 1)}
    where = standing(found)
    if step is None:
        step = max((each for each, lineage in where.items() if found[lineage][each]), default=None)
    if step is None or step not in where:
        return []
    body = objects.read(rollouts_prefix(run_id, where[step]) + rollout_file(step)) or b""
    return [json.loads(line) for line in body.decode("utf-8").splitlines()]


def steps_logged(objects: ObjectStore, run_id: str, lineage: int) -> dict[int, int]:
    """Bytes by step; 0 for a step whose lines had to go."""
    prefix = rollouts_prefix(run_id, lineage)
    sizes = {each.key.removeprefix(prefix): each.bytes for each in objects.walk(prefix)}
    return {step: size for name, size in sizes.items() if (step := step_of_rollout_file(name)) is not None}


def standing(found: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """Which lineage's word counts for each step: the newest's from its first step on, those before it up to there.

    >>> standing({1: {1: 9, 2: 9, 3: 9}, 2: {3: 9}})
    {3: 2, 1: 1, 2: 1}
    """
    counts: dict[int, int] = {}
    begins = math.inf
    for lineage in sorted(found, reverse=True):
        counts |= {step: lineage for step in sorted(found[lineage]) if step < begins}
        begins = min([begins, *found[lineage]])
    return counts


def in_order(rollouts: Sequence[Rollout], order: Order) -> list[Rollout]:
    """By reward, those without one at the end; equals as they were drawn."""
    if order == "written":
        return list(rollouts)
    sign = -1.0 if order == "best" else 1.0
    return sorted(rollouts, key=lambda each: math.inf if each["reward"] is None else sign * each["reward"])
