"""Fixtures of all tests. The local cloud starts once a session, on the first test that asks for it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from microtuning_local.cloud import LocalCloud

INTEGRATION = Path(__file__).parent / "integration"
IMAGES = {"local/tiny:1": "tiny_container.py", "local/fast:1": "fast_container.py"}

# Settings of the local SageMaker under test: containers of a few lines, and a grace time one can wait for.
LOCAL_SETTINGS = {
    "MICROTUNING_LOCAL_IMAGES": json.dumps(
        {uri: [sys.executable, str(INTEGRATION / file)] for uri, file in IMAGES.items()}
    ),
    "MICROTUNING_LOCAL_STOP_GRACE_S": "1.5",
    "MICROTUNING_LOCAL_MACHINES": "3",
}


def pytest_configure() -> None:
    """A shell without job control starts what it puts into the background deaf to Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    """The local cloud with the kept template deployed. Afterwards nothing of it is left: no process, no file."""
    from microtuning_local import cloud as local
    from microtuning_local.home import read_endpoint
    from microtuning_local.processes import group_members

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MICROTUNING_HOME", str(tmp_path_factory.mktemp("microtuning")))
        for name, value in LOCAL_SETTINGS.items():
            patch.setenv(name, os.environ.get(name, value))
        running = local.up()
        yield running
        endpoint = read_endpoint(running.home)
        assert endpoint is not None
        groups = [endpoint.emulator_pid, endpoint.sagemaker_pid]
        local.down()
        assert [group_members(group) for group in groups if group] == [[] for group in groups if group]
        assert not running.home.tmp.exists()
        local.reset()
        assert not running.home.root.exists()
