"""The folder that becomes one function's zip: its handler, what handlers share, microtuning_core and PyYAML.

A folder holds nothing that its function does not import: no other handler, no caches, no times. So its hash moves only
when one of these files does, and changing one handler redeploys one function. Powertools and pydantic come with AWS's
layer.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from microtuning_core.domain.tenants import StageTenants, stage_module

if TYPE_CHECKING:
    from collections.abc import Iterator

CORE = Path("sdk/microtuning_core")
HANDLERS = Path("functions")
STAGE_MODULE = HANDLERS / "_stage.py"


def handler_names(root: Path) -> list[str]:
    """The handlers that exist: every module of functions/ whose name does not begin with an underscore."""
    return sorted(path.stem for path in (root / HANDLERS).glob("*.py") if not path.name.startswith("_"))


def stage_function(name: str, *, root: Path, into: Path, tenants: StageTenants | None = None) -> Path:
    """Write the folder of function `name` from the sources under `root` to `into`/`name`, replacing what was there.

    `tenants` travel with it: whom the stage serves, and how much of it each may use.

    Raises:
        FileNotFoundError: functions/<name>.py is missing though FUNCTIONS has a row for it.
    """
    folder = into / name
    shutil.rmtree(folder, ignore_errors=True)
    for source, inside in sorted(_files(name, root)):
        target = folder / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    (folder / STAGE_MODULE).write_text(stage_module(tenants or StageTenants()), encoding="utf-8")
    return folder


def _files(name: str, root: Path) -> Iterator[tuple[Path, Path]]:
    """Pairs of (file, its place in the folder)."""
    handler = root / HANDLERS / f"{name}.py"
    if not handler.is_file():
        raise FileNotFoundError(
            f"FUNCTIONS has a row {name} but there is no {handler}. Write the handler or take the row away."
        )
    shared = (root / HANDLERS).glob("_*.py")
    yield from ((path, HANDLERS / path.name) for path in (handler, *shared))
    core = root / CORE
    yield from ((path, Path(core.name) / path.relative_to(core)) for path in core.rglob("*.py"))
    yield from ((path, Path("yaml") / path.name) for path in _pyyaml().glob("*.py"))


def _pyyaml() -> Path:
    """The installed PyYAML; without its C part it is pure Python and runs on any machine."""
    spec = importlib.util.find_spec("yaml")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("Lambda bundles carry PyYAML and it is not installed here. Run pip install pyyaml.")
    return Path(spec.origin).parent
