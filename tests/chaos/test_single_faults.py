"""Each fault by itself, on a supervised run and on one with rewards, which are under way at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from microtuning_sdk import Run, connect
from tests.chaos.faults import SINGLE, Fault
from tests.chaos.laws import Reference, check
from tests.chaos.world import RECIPES, Struck, World

ROOT = Path(__file__).parents[2]
STRIKE_AT = 5


@pytest.mark.parametrize("name", SINGLE)
def test_a_run_survives(name: str, world: World, undisturbed: dict[str, Reference]) -> None:
    fault = SINGLE[name]
    fault.before(world)
    runs = world.begin_all(spot=fault.spot)
    strike(fault, world, runs)
    world.drive(*runs)
    check(world, runs, [fault], undisturbed)


def strike(fault: Fault, world: World, runs: list[Struck]) -> None:
    """Each run when it has come to its middle, whichever is there first; a fault of the stage when all have."""
    waiting = list(runs)
    while waiting:
        here = world.until(
            lambda: next((run for run in waiting if run.has_come_to(STRIKE_AT)), None), "middle", ticks=True
        )
        waiting.remove(here)
        if not fault.at_once:
            fault.strike(world, [here])
    if fault.at_once:
        fault.strike(world, runs)


BEGIN = """
import sys
from tests.chaos.world import submit
from microtuning_sdk import connect
run = submit(sys.argv[1], sys.argv[2], connect("local"), compute={"spot": False, "hung_after_s": 3})
print(run.run_id, flush=True)
run.wait(logs=True)
"""
WRONG_CLOCK = """
import time_machine
from datetime import datetime, timedelta, UTC
time_machine.travel(datetime.now(UTC) - timedelta(days=3), tick=True).start()
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_outlives_its_client_whose_clock_was_wrong(
    recipe: str, world: World, undisturbed: dict[str, Reference]
) -> None:
    wishes = world.folder / "wishes"
    wishes.mkdir()
    argv = [sys.executable, "-c", WRONG_CLOCK + BEGIN, recipe, str(wishes)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as client:
        assert client.stdout is not None
        run_id = client.stdout.readline().strip()
        assert run_id, client.wait()
        run = world.adopt(Run(run_id, connect("local")), recipe, wishes)
        assert run.comes_to(STRIKE_AT), run.story()
        client.send_signal(signal.SIGKILL)
    world.drive(run)
    check(world, [run], [Fault("client killed")], undisturbed)
