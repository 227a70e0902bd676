"""A stage that an earlier version left in mid-work is taken over: nothing is lost, and every run comes to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_local import cloud as local

if TYPE_CHECKING:
    from tests.integration.conftest import StageUnderTest

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
