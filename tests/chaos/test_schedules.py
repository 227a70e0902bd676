"""Random schedules of one to five faults; `make chaos N=200` for many, `SEED=` for one again."""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos.faults import MIXING, Fault
from tests.chaos.laws import Reference, check
from tests.chaos.world import RECIPES, STEPS, World

FIRST = int(os.environ.get("CHAOS_SEED", "0"))
COUNT = int(os.environ.get("CHAOS_N", "5"))


def schedule(seed: int) -> tuple[str, list[Fault], list[int]]:
    """A recipe, and faults with the steps to strike at: each finds a machine that has got further than the last."""
    chance = random.Random(seed)
    faults = chance.choices(MIXING, k=chance.randint(1, 5))
    steps = sorted(chance.sample(range(2, STEPS - 1), k=len(faults)))
    return chance.choice(RECIPES), faults, steps


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_run_survives_a_schedule(seed: int, world: World, undisturbed: dict[str, Reference]) -> None:
    recipe, faults, steps = schedule(seed)
    print(f"seed {seed}: {recipe}, {[f'{fault.name} at {step}' for fault, step in zip(faults, steps, strict=True)]}")
    run = world.begin(recipe)
    for fault, step in zip(faults, steps, strict=True):
        if not run.comes_to(step):
            break  # the last fault came too close to the end
        fault.strike(world, [run])
    world.drive(run)
    check(world, [run], faults, undisturbed)
