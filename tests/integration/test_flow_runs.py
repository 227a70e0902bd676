"""Whole runs on the local cloud: how they start, end, fail and come back. The container is done in a moment."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.layout import checkpoints_prefix, config_prefix, receipt_key, run_record_key, spec_key
from microtuning_core.domain.run import RunStatus
from microtuning_core.usecases.settle import settle
from microtuning_local import cloud as local

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.conftest import StageUnderTest

pytestmark = pytest.mark.cloud


# -- the way of a run --------------------------------------------------------------------------------------------------


def test_an_upload_starts_one_run_that_ends_as_a_registered_model(stage: StageUnderTest) -> None:
    before = set(stage.executions())
    run_id = stage.submit("succeed", name="hello")
    run = stage.ended_and_paid(run_id)
    assert (run.status, run.verdict, run.model_version) == ("completed", "completed", "hello/v0001".replace("0001", "1"))
    assert set(stage.executions()) - before == {run_id}
    assert stage.execution_ended(run_id)["status"] == "SUCCEEDED"
    assert [attempt.outcome for attempt in run.attempts] == ["completed"]
    assert stage.services.admissions.slots().held == {}
