"""Records of earlier versions are read by this one, and mean the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from microtuning_core.domain.cost import LedgerEntry, total
from microtuning_core.domain.manifest import CheckpointManifest
from microtuning_core.domain.progress import Progress
from microtuning_core.domain.run import Run
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.spec_files import read_spec_text

STORED = sorted((Path(__file__).parents[1] / "stored").glob("stage_*.json"))


@pytest.fixture(params=STORED, ids=lambda path: path.stem)
def stage(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(request.param.read_text("utf-8"))
    return document


def rows(stage: dict[str, Any], table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stage["tables"][f"microtuning-local-{table}"]
    return found


def objects(stage: dict[str, Any], suffix: str) -> list[str]:
    found = [text for key, text in stage["objects"].items() if key.endswith(suffix)]
    assert found, suffix
    return found


def test_runs_are_read(stage: dict[str, Any]) -> None:
    runs = [Run.model_validate_json(row["record"]["S"]) for row in rows(stage, "runs") if row["sk"]["S"] == "META"]
    mirrored = {run.run_id: run for run in map(Run.model_validate_json, objects(stage, "/run.json"))}
    assert runs
    assert {run.run_id: run for run in runs} == mirrored


def test_what_a_run_cost_is_still_the_sum_of_its_entries(stage: dict[str, Any]) -> None:
    entries = [LedgerEntry.model_validate_json(row["record"]["S"]) for row in rows(stage, "ledger")]
    runs = [Run.model_validate_json(row["record"]["S"]) for row in rows(stage, "runs") if row["sk"]["S"] == "META"]
    paid = [run for run in runs if run.is_final]
    assert paid
    for run in paid:
        assert run.cost_usd == total([entry for entry in entries if entry.run_id == run.run_id])


def test_what_machines_wrote_is_read(stage: dict[str, Any]) -> None:
    for text in objects(stage, "/manifest.json"):
        assert CheckpointManifest.model_validate_json(text).files
    for text in objects(stage, "/progress.json"):
        assert Progress.model_validate_json(text).step > 0


def test_specs_are_still_good(stage: dict[str, Any]) -> None:
    for text in objects(stage, ".yaml"):
        document, _ = read_spec_text(text)
        assert isinstance(document, dict)
        assert parse_spec({"tenant": "keeper", **document}).tenant == "keeper"
