"""The manifest of a checkpoint, and which checkpoint is the newest.

A checkpoint is a folder `step-<n>/`; its `manifest.json` is written last, so a folder counts only once it has one:

    {"schema_version": 1, "run_id": "acme-sort-0a1b2c3d4e5f", "attempt": 1, "lineage": 1, "step": 40, "epoch": 2,
     "world_size": 1, "global_batch": 256, "spec_sha256": "9f…", "code_sha256": null, "base_model": "Transformer",
     "revision": null, "files": [{"path": "model/model.safetensors", "bytes": 655360, "sha256": "e3…"}],
     "metrics": {"reward": 0.71}, "final": false, "created_at": "2026-01-02T03:04:05.678900Z"}

The container writes it, `on_checkpoint` verifies it, and whoever resumes reads it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt, StringConstraints, field_validator

from .record import Record, UtcTime, Value

if TYPE_CHECKING:
    from collections.abc import Iterable

MANIFEST_NAME = "manifest.json"
_STEP_FOLDER = re.compile(r"step-([0-9]+)", re.ASCII)
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class CheckpointFile(Value):
    """One file of a checkpoint; `path` is relative to the checkpoint's folder and stays inside it."""

    path: str
    bytes: NonNegativeInt
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        if not path or path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise ValueError("is a relative path with no empty, '.' or '..' part")
        return path


class CheckpointManifest(Record):
    """What a whole checkpoint holds. `step` counts optimizer steps of the main phase; 0 is the state before the first.

    `global_batch` is what one optimizer step consumes (rows for sft, completions for grpo), `base_model` what training
    began from. `final` marks the checkpoint after the last step: its `metrics` hold the evaluation before and after.
    """

    run_id: str
    attempt: PositiveInt
    lineage: PositiveInt
    step: NonNegativeInt
    epoch: NonNegativeInt
    world_size: PositiveInt
    global_batch: PositiveInt
    spec_sha256: Sha256
    code_sha256: Sha256 | None = None
    base_model: str
    revision: str | None = None
    files: tuple[CheckpointFile, ...]
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    final: bool = False
    created_at: UtcTime

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def step_folder(step: int) -> str:
    return f"step-{step}"


def step_of_folder(name: str) -> int | None:
    """The step a folder name stands for; None for any other name ("step-best", "step-7x", "handpicked").

    >>> step_of_folder("step-0100000")
    100000
    """
    match = _STEP_FOLDER.fullmatch(name)
    return int(match.group(1)) if match else None


def newest(steps: Iterable[int]) -> int | None:
    """The highest step, by number: 10000 comes after 9000. None when there is none."""
    return max(steps, default=None)


def newest_first(folders: Iterable[str]) -> list[str]:
    """The folders that are checkpoints, highest step first; two spellings of one step: the plain one first."""
    numbered = [(step, name) for name in folders if (step := step_of_folder(name)) is not None]
    return [name for step, name in sorted(numbered, key=lambda pair: (-pair[0], len(pair[1])))]
