"""What the container measures for the ledger: steps, tokens and what it saved, kept by a worker that is started again."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from microtuning_core.domain.manifest import CheckpointFile, CheckpointManifest
from microtuning_core.domain.progress import Progress
from training_container.progress import ProgressWriter


def writer(folder: Path, attempt: int = 1) -> ProgressWriter:
    return ProgressWriter(
        folder, run_id="acme-sort-0a1b2c3d4e5f", attempt=attempt, lineage=1, every_s=10, started_at_s=time.monotonic()
    )


def saved() -> CheckpointManifest:
    files = tuple(CheckpointFile(path=name, bytes=100, sha256="0" * 64) for name in ("a", "b"))
    return CheckpointManifest(
        run_id="acme-sort-0a1b2c3d4e5f", attempt=1, lineage=1, step=3, epoch=0, world_size=1, global_batch=8,
        spec_sha256="0" * 64, base_model="Transformer", files=files, created_at=datetime.now(UTC),
    )  # fmt: skip


def written(folder: Path, metering: ProgressWriter) -> Progress:
    metering.write(3, 10, eval_before={}, eval_after={}, at_once=True)
    return Progress.model_validate_json((folder / "progress.json").read_bytes())


def measured(metering: ProgressWriter) -> None:
    for _ in range(3):
        metering.meter.count_step(0.5)
    metering.meter.count(trained=70, prefill=20)
    metering.meter.add_seconds("update", 1.5)
    metering.meter.count_saved(saved())


def test_steps_tokens_and_checkpoints_are_counted(tmp_path: Path) -> None:
    metering = writer(tmp_path)
    measured(metering)
    found = written(tmp_path, metering)
    assert (found.steps_done, found.tokens.trained, found.tokens.prefill, found.phase_ms.update) == (3, 70, 20, 1500)
    assert (found.saved.checkpoints, found.saved.files, found.saved.bytes) == (1, 3, 200)  # with the manifest
    assert found.longest_step_ms == 500


def test_a_worker_that_is_started_again_counts_its_second_tries_too(tmp_path: Path) -> None:
    first = writer(tmp_path)
    measured(first)
    written(tmp_path, first)
    second = writer(tmp_path)
    measured(second)
    found = written(tmp_path, second)
    assert (found.steps_done, found.saved.checkpoints, found.tokens.trained) == (6, 2, 140)


def test_another_attempt_begins_at_nothing(tmp_path: Path) -> None:
    first = writer(tmp_path)
    measured(first)
    written(tmp_path, first)
    found = written(tmp_path, writer(tmp_path, attempt=2))
    assert (found.attempt, found.steps_done, found.saved.checkpoints, found.tokens.trained) == (2, 0, 0, 0)
