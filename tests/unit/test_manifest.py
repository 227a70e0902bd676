"""The manifest of a checkpoint, and which one is the newest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from microtuning_core.domain.manifest import CheckpointManifest, newest, newest_first, step_folder, step_of_folder


def a_manifest(**changes: Any) -> dict[str, Any]:
    fields = {
        "run_id": "acme-sort-0a1b2c3d4e5f", "attempt": 1, "lineage": 1, "step": 40, "epoch": 2, "world_size": 1,
        "global_batch": 256, "spec_sha256": "9f" * 32, "base_model": "Transformer",
        "files": [{"path": "model/model.safetensors", "bytes": 3, "sha256": "e3" * 32}],
        "created_at": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    return fields | changes


@pytest.mark.parametrize(
    "name", ["step-best", "step-", "step-7x", "handpicked", "checkpoint-9", "step--1", "step-1 ", "step-²"]
)
def test_a_folder_that_is_not_step_and_a_number_is_no_checkpoint(name: str) -> None:
    assert step_of_folder(name) is None


def test_the_newest_checkpoint_has_the_highest_number_and_not_the_last_name() -> None:
    names = ["step-900", "step-1000", "step-99", "step-0100000", "step-best", "step-", "step-7x", "handpicked"]
    assert newest_first(names) == ["step-0100000", "step-1000", "step-900", "step-99"]
    names.remove("step-0100000")
    assert newest(step for name in names if (step := step_of_folder(name)) is not None) == 1000


def test_no_checkpoint_at_all_has_no_newest() -> None:
    assert newest([]) is None
    assert newest_first(["handpicked"]) == []


@given(st.integers(min_value=0, max_value=10**12))
def test_every_step_comes_back_from_its_folder_name(step: int) -> None:
    assert step_of_folder(step_folder(step)) == step


def test_a_manifest_survives_its_own_json() -> None:
    manifest = CheckpointManifest.model_validate(a_manifest(metrics={"reward": 0.5}, final=True))
    assert CheckpointManifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert manifest.total_bytes == 3


@pytest.mark.parametrize("path", ["/etc/passwd", "../other-run/x", "a/../../b", "", "a//b", "a\\b", "./a"])
def test_a_manifest_names_only_files_inside_its_own_folder(path: str) -> None:
    with pytest.raises(ValidationError, match="relative path"):
        CheckpointManifest.model_validate(a_manifest(files=[{"path": path, "bytes": 1, "sha256": "e3" * 32}]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_manifest_holds_only_finite_metrics(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        CheckpointManifest.model_validate(a_manifest(metrics={"loss": value}))
