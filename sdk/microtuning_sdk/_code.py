"""How the user's own code travels: one code.zip, the same bytes for the same code.

    a function of a module       rewards.py and the local modules that it imports     entry "rewards:exact_match"
    anything else callable       reward.pkl, and the local modules it needs           entry "pickle:reward.pkl"
    a training script            train.py and what it imports, or its whole folder    entry "train.py"

code.json says which Python wrote it: a pickled function can be read only by the same minor version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import sys
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import InvalidCode
from microtuning_sdk._pickles import pickled
from microtuning_sdk._sources import (
    MAX_CODE_BYTES,
    Files,
    defines,
    find_module,
    folder_files,
    imports_of,
    is_local,
    local_roots,
    root_of,
    sources_of,
)
from microtuning_sdk._uploads import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PICKLE = "reward.pkl"
MANIFEST = "code.json"
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SAME_TIME = (1980, 1, 1, 0, 0, 0)  # the first moment a zip can name


@dataclass(frozen=True)
class CodePackage:
    """Files by their path in the archive, and where to begin in them."""

    entry: str
    files: Mapping[str, bytes] = field(repr=False)

    @cached_property
    def archive(self) -> bytes:
        """The zip: sorted, without times, so that the same code has the same hash."""
        manifest = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "entry": self.entry}
        files = {**self.files, MANIFEST: json.dumps(manifest).encode()}
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(files):
                archive.writestr(_zip_entry(path), files[path])
        return buffer.getvalue()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()


def _zip_entry(path: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(path, _SAME_TIME)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def package_reward(reward: Callable[..., Any] | str, folder: Path | None = None) -> CodePackage:
    """The package for a reward function, or for the name of one ("rewards:exact_match").

    Args:
        reward: any callable, or "module:name".
        folder: where a named module is looked for first.

    Raises:
        InvalidCode: no such module or name, not callable, not picklable, or more than 50 MB.
    """
    if isinstance(reward, str):
        return _named(reward, [*([folder] if folder else []), *local_roots(), Path.cwd()])
    if not callable(reward):
        raise InvalidCode(
            repr(reward), "a reward is a function", next_step="Give a function, or its name 'module:name'."
        )
    entry = _entry_of(reward)
    if entry is not None:
        module = sys.modules[entry.partition(":")[0]]
        return _checked(CodePackage(entry, sources_of([module.__name__], [root_of(module), *local_roots()])))
    saved = pickled(reward)
    return _checked(CodePackage(f"pickle:{PICKLE}", {**_needed_by(saved.modules), PICKLE: saved.payload}))


def _entry_of(reward: Callable[..., Any]) -> str | None:
    """`module:name` when importing that module gives this very function, and its source is the user's own."""
    module = sys.modules.get(getattr(reward, "__module__", None) or "")
    if not isinstance(reward, FunctionType) or module is None or not is_local(module):
        return None
    entry = f"{module.__name__}:{reward.__qualname__}"
    if not _ENTRY.fullmatch(entry) or find_module(module.__name__, [root_of(module)]) is None:
        return None
    try:
        return entry if attrgetter(reward.__qualname__)(module) is reward else None
    except AttributeError:
        return None


def _needed_by(names: frozenset[str]) -> Files:
    """The local modules among these, with what they import."""
    loaded = [module for name in names if (module := sys.modules.get(name)) is not None and is_local(module)]
    not_loaded = [name for name in names if name not in sys.modules]
    roots = list(dict.fromkeys([*map(root_of, loaded), *local_roots()]))
    return sources_of([*(module.__name__ for module in loaded), *not_loaded], roots)


def _named(entry: str, roots: Sequence[Path]) -> CodePackage:
    if not _ENTRY.fullmatch(entry):
        raise InvalidCode(repr(entry), "it is not the name of a function", next_step="Write 'module:name'.")
    module, _, name = entry.partition(":")
    found = find_module(module, roots)
    if found is None:
        return _installed(entry, module)
    root, file = found
    package = _checked(CodePackage(entry, sources_of([module], [root, *roots])))
    if not defines(file.read_bytes(), name.partition(".")[0]):
        raise InvalidCode(repr(entry), f"{file.name} has no {name!r}", next_step="Correct the name after the colon.")
    return package


def _installed(entry: str, module: str) -> CodePackage:
    """An entry in an installed package: nothing is shipped, the training image must have it."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise InvalidCode(
            repr(entry), f"there is no module {module!r} here", next_step="Run from the folder that holds it."
        )
    return CodePackage(entry, {})


def package_script(entry: str | Path, source_dir: str | Path | None = None) -> CodePackage:
    """The package for a training script: the file and the local modules it imports, or the whole `source_dir`.

    Args:
        entry: the script's path; with `source_dir`, its path inside that folder.
        source_dir: a folder to ship whole (without hidden files and caches).
    """
    folder = local_path(Path(), entry).parent if source_dir is None else local_path(Path(), source_dir)
    name = Path(entry).as_posix() if source_dir is not None else Path(entry).name
    script = folder / name
    if not script.is_file():
        raise InvalidCode(str(script), "there is no such file", next_step="Give the path of the training script.")
    if source_dir is not None:
        return _checked(CodePackage(name, folder_files(folder)))
    if not re.fullmatch(r"[\w-]+\.py", name):
        raise InvalidCode(name, "a script is a .py file named with letters, digits, _ and -")
    text = script.read_bytes()
    return _checked(CodePackage(name, {**sources_of(imports_of(name, text), [folder]), name: text}))


def package_folder(path: Path, entry: str) -> CodePackage:
    """The package for a folder, or a single file, that a spec names."""
    if not path.exists():
        raise InvalidCode(str(path), "there is no such file or folder", next_step="Correct `code` in the spec.")
    return _checked(CodePackage(entry, folder_files(path) if path.is_dir() else {path.name: path.read_bytes()}))


def _checked(package: CodePackage) -> CodePackage:
    if MANIFEST in package.files:
        raise InvalidCode(MANIFEST, "this name is taken by Microtuning's own file", next_step="Rename your file.")
    size = sum(map(len, package.files.values()))
    if size > MAX_CODE_BYTES:
        largest = max(package.files, key=lambda path: len(package.files[path]))
        raise InvalidCode(
            largest,
            f"the code has {size / 1e6:.0f} MB with it, and at most {MAX_CODE_BYTES / 1e6:.0f} MB may travel",
            next_step="Load large objects inside the function, or give data as train_data.",
        )
    return package
