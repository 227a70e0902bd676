"""The world of the chaos tests: the session's local cloud, and what undisturbed runs give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from microtuning_local import cloud as local
from microtuning_local.cloud import LocalCloud
from tests.chaos.laws import Reference
from tests.chaos.world import World

# What every run of the tests breaks, beside the first five random schedules; `make chaos` breaks everything.
LITTLE = ("[worker killed]", "[machine lost]", "[events drop]", "[hang]", "clock_was_wrong[sft]")
SCHEDULES = "test_a_run_survives_a_schedule"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker("chaos")
    if os.environ.get("CHAOS") != "all":
        left_out = [item for item in ours if not item.name.endswith(LITTLE) and not item.name.startswith(SCHEDULES)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def undisturbed(cloud: LocalCloud, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """By recipe."""
    world = World(cloud, tmp_path_factory.mktemp("undisturbed"))
    runs = world.begin_all()
    world.drive(*runs)
    assert [run.record.status for run in runs] == ["completed", "completed"], world.stories()
    return {run.recipe: Reference(run.weights_sha256(world.folder), run.losses()) for run in runs}


@pytest.fixture
def world(cloud: LocalCloud, tmp_path: Path) -> Iterator[World]:
    """The session's cloud; SageMaker's faults end with the test. After a restart it has the same addresses."""
    made = World(cloud, tmp_path)
    yield made
    local.faults({})
