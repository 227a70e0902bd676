"""A new version takes over what an earlier one left in mid-work: nothing is lost, and every run comes to its end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_local import cloud as local
from microtuning_local import deploy
from tests.processes import leader_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.conftest import StageUnderTest

FAST_IMAGE = "local/fast:1"
STORED = sorted((Path(__file__).parents[1] / "stored").glob("stage_*.json"))


def put_back(stage: StageUnderTest, stored: dict[str, Any]) -> None:
    """Rows and objects as they were; the slots of the stage are those of today, and are given anew."""
    for table, items in stored["tables"].items():
        for item in items:
            if item["sk"]["S"] != "SLOTS":
                stage.client("dynamodb").put_item(TableName=table, Item=item)
    for key, text in stored["objects"].items():
        body = bytes.fromhex(text.removeprefix("hex:")) if text.startswith("hex:") else text.encode()
        if "/specs/" not in key and "/commands/" not in key:  # those would start something
            stage.put(key, body)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_runs_of_an_earlier_version_go_on(stage: StageUnderTest, path: Path) -> None:
    stored = json.loads(path.read_text("utf-8"))
    names = {row["name"]["S"]: row["pk"]["S"].rpartition("#")[2] for row in stored["tables"]["microtuning-local-runs"]
             if row["sk"]["S"] == "META"}  # fmt: skip
    put_back(stage, stored)
    completed, cost_usd = stage.run(names["platform once"]), stage.run(names["platform once"]).cost_usd
    assert [each.outcome for each in completed.attempts] == ["failed", "completed"]
    stage.cancel(names["hang"])
    local.tick()
    restored = stage.ended_and_paid(names["hang until restored"])
    assert restored.status == "completed"
    assert stage.services.runs.checkpoints(restored.run_id)[-1].step == 2, (
        "it began anew instead of from its checkpoint"
    )
    assert stage.ended(names["hang"]).status == "stopped"
    assert stage.ended(names["succeed"]).status == "completed"
    assert (stage.run(completed.run_id).status, stage.run(completed.run_id).cost_usd) == ("completed", cost_usd)
    assert not [held for held in stage.services.admissions.slots().held if held.startswith("keeper-")]


@pytest.fixture
def updated_stack(stage: StageUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Gives every function more memory; afterwards the stack is as it was, with what the tests had set by hand."""
    functions, launcher = stage.client("lambda"), stage.names.function("launch_training")
    by_hand = functions.get_function_configuration(FunctionName=launcher)["Environment"]
    monkeypatch.setitem(deploy.PARAMETERS, "TrainingImageUri", FAST_IMAGE)
    template = deploy.kept_template()
    assert template is not None
    for resource in template["Resources"].values():
        if resource["Type"] == "AWS::Lambda::Function":
            resource["Properties"]["MemorySize"] = 640

    def update() -> None:
        local.up(template=template)

    yield update
    local.up()
    functions.update_function_configuration(FunctionName=launcher, Environment={"Variables": by_hand["Variables"]})


def test_a_run_that_trains_while_the_stack_is_updated_notices_nothing(
    stage: StageUnderTest, updated_stack: Callable[[], None]
) -> None:
    """Its token was given before, its message waits in a queue, its functions are others when they are needed."""
    run_id = stage.submit("hang_until_restored")
    training = stage.training(run_id)
    with stage.held_back("training-events"):
        os.killpg(leader_of(training.attempts[0].job_name), signal.SIGKILL)
        stage.until(lambda: stage.has_ended(training.attempts[0].job_name), "the job did not end")
        updated_stack()
    told = stage.client("lambda").get_function_configuration(FunctionName=stage.names.function("on_training_event"))
    assert told["MemorySize"] == 640
    run = stage.ended_and_paid(run_id)
    assert (run.status, run.execution, run.executions) == ("completed", training.execution, 1), stage.story(run_id)
    assert [each.outcome for each in run.attempts] == ["failed", "completed"]
