"""The /opt/ml tree of a SageMaker training job; MICROTUNING_ML_ROOT puts it elsewhere (the local SageMaker, tests)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_ML_ROOT = "/opt/ml"


@dataclass(frozen=True)
class MlTree:
    """Every path below one root. Nothing is created by asking for a path."""

    root: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> MlTree:
        return cls(Path(environment.get("MICROTUNING_ML_ROOT") or DEFAULT_ML_ROOT))

    def located(self, value: Any) -> Any:
        """`value`, with each text in it that names a place under /opt/ml naming the same place under this root."""
        if isinstance(value, str):
            is_ours = value == DEFAULT_ML_ROOT or value.startswith(DEFAULT_ML_ROOT + "/")
            return f"{self.root}{value.removeprefix(DEFAULT_ML_ROOT)}" if is_ours else value
        if isinstance(value, dict):
            return {key: self.located(item) for key, item in value.items()}
        return [self.located(item) for item in value] if isinstance(value, list) else value

    def channel(self, name: str) -> Path:
        return self.root / "input" / "data" / name

    @property
    def channels(self) -> list[str]:
        folder = self.root / "input" / "data"
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    @property
    def input_config(self) -> Path:
        return self.root / "input" / "config"

    @property
    def code(self) -> Path:
        """The user's sources, unpacked."""
        return self.root / "code"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def output_data(self) -> Path:
        return self.root / "output" / "data"

    @property
    def failure(self) -> Path:
        return self.root / "output" / "failure"

    def make_outputs(self) -> None:
        for folder in (self.code, self.checkpoints, self.model, self.output_data):
            folder.mkdir(parents=True, exist_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Replace `path` by rename, so that a reader sees the old text or the new one and never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
