"""The configuration of each stage, `<stage>.yaml` in this folder. A stage without one has the tenant `default`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microtuning_core.domain.errors import InvalidSpec, InvalidStage
from microtuning_core.domain.names import check_stage
from microtuning_core.domain.tenants import StageTenants, parse_stage
from microtuning_core.spec_files import read_spec_text

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "infrastructure/stages"


def stage_tenants(stage: str, root: Path) -> StageTenants:
    """What the stage's file under `root` declares.

    Raises:
        InvalidStage: a field that is not there, or a value that cannot be; with file and line.
    """
    path = root / FOLDER / f"{check_stage(stage)}.yaml"
    if not path.is_file():
        return StageTenants()
    file = f"{FOLDER}/{path.name}"
    try:
        document, lines = read_spec_text(path.read_bytes(), path.name)
    except InvalidSpec as error:
        raise InvalidStage(file, error.problems) from error
    return parse_stage(document, lines, file)
