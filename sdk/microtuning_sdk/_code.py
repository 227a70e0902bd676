"""How the user's own code travels: one code.zip, the same bytes for the same code.

    a function or class of a module   rewards.py and the local modules that it imports     entry "rewards:exact_match"
    anything else callable            reward.pkl, and the local modules it needs           entry "pickle:reward.pkl"
    a training script                 train.py and what it imports, or its whole folder    entry "train.py"

Several of them (rewards, a loss, an environment) travel in one archive, each under the field of the spec that names it.
code.json says which Python wrote it: a pickled function can be read only by the same minor version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
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
from microtuning_sdk._pickles import called, pickled
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

MANIFEST = "code.json"
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SAME_TIME = (1980, 1, 1, 0, 0, 0)  # the first moment a zip can name


@dataclass(frozen=True)
class CodePackage:
    """Files by their path in the archive, and where to begin in them.

    entries: what each field of the spec shall name, such as {"reward.entry": "rewards:exact", "loss.entry": …}.
    """

    entry: str
    files: Mapping[str, bytes] = field(repr=False)
    entries: Mapping[str, str] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Piece:
    """One thing of the user's that the spec names: a callable, or its name "module:name".

    kind: what it is, for messages ("reward"). called_with: names of the arguments it will be given; None = not checked.
    """

    value: Callable[..., Any] | str
    kind: str = "reward"
    called_with: tuple[str, ...] | None = None


def package_all(pieces: Mapping[str, Piece], folder: Path | None = None) -> CodePackage:
    """One package for several pieces, by the field of the spec that names each.

    Args:
        folder: where named modules are looked for first.

    Raises:
        InvalidCode: as package_reward; or two different files of the same path.
    """
    packages = {field: _packed(piece, _pickle_name(field), folder) for field, piece in pieces.items()}
    files: Files = {}
    for package in packages.values():
        for path, content in package.files.items():
            if files.setdefault(path, content) != content:
                raise InvalidCode(path, "two different files have this name", next_step="Rename one of the modules.")
    entries = {field: package.entry for field, package in packages.items()}
    return _checked(CodePackage(next(iter(entries.values())), files, entries))


def _pickle_name(field: str) -> str:
    """reward.entry -> reward.pkl, reward.parts.length.entry -> reward_length.pkl."""
    return "_".join(part for part in field.split(".") if part not in ("parts", "entry")) + ".pkl"


def package_reward(reward: Callable[..., Any] | str, folder: Path | None = None) -> CodePackage:
    """The package for a reward function, or for the name of one ("rewards:exact_match").

    Args:
        reward: any callable, or "module:name".
        folder: where a named module is looked for first.

    Raises:
        InvalidCode: no such module or name, not callable, not picklable, or more than 50 MB.
    """
    return package_all({"reward.entry": Piece(reward)}, folder)


def _packed(piece: Piece, pickle_name: str, folder: Path | None) -> CodePackage:
    value = piece.value
    if isinstance(value, str):
        return _named(value, [*([folder] if folder else []), *local_roots(), Path.cwd()])
    if not callable(value):
        raise InvalidCode(
            repr(value), f"a {piece.kind} is a function", next_step="Give a function, or its name 'module:name'."
        )
    if piece.called_with is not None:
        _check_signature(value, piece.kind, piece.called_with)
    entry = _entry_of(value)
    if entry is not None:
        module = sys.modules[entry.partition(":")[0]]
        return _checked(CodePackage(entry, sources_of([module.__name__], [root_of(module), *local_roots()])))
    saved = pickled(value)
    files = {pickle_name: saved.payload, f"{pickle_name}.json": json.dumps(_origin(value)).encode()}
    return _checked(CodePackage(f"pickle:{pickle_name}", {**_needed_by(saved.modules), **files}))


def _origin(value: Callable[..., Any]) -> dict[str, str]:
    """Where a pickled function was written, for messages: a pickle forgets its file."""
    function = inspect.unwrap(getattr(value, "func", value))
    written = getattr(function, "__code__", None)
    file = Path(written.co_filename).name if written else ""
    return {"name": called(value), "file": file or getattr(type(value), "__module__", "")}


def _check_signature(value: Callable[..., Any], kind: str, names: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return  # a built-in without a signature
    try:
        signature.bind(*names)
    except TypeError as error:
        raise InvalidCode(
            called(value),
            f"a {kind} is called with ({', '.join(names)}), and it takes {signature} ({error})",
            next_step=f"Write it as def {value.__name__ if isinstance(value, FunctionType) else kind}"
            f"({', '.join(names)}).",
        ) from error


def _entry_of(value: Callable[..., Any]) -> str | None:
    """`module:name` when importing that module gives this very function or class, and its source is the user's own."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if not isinstance(value, FunctionType | type) or module is None or not is_local(module):
        return None
    entry = f"{module.__name__}:{value.__qualname__}"
    if not _ENTRY.fullmatch(entry) or find_module(module.__name__, [root_of(module)]) is None:
        return None
    try:
        return entry if attrgetter(value.__qualname__)(module) is value else None
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
    entries = {"algorithm.entry": name}
    if source_dir is not None:
        return _checked(CodePackage(name, folder_files(folder), entries))
    if not re.fullmatch(r"[\w-]+\.py", name):
        raise InvalidCode(name, "a script is a .py file named with letters, digits, _ and -")
    text = script.read_bytes()
    return _checked(CodePackage(name, {**sources_of(imports_of(name, text), [folder]), name: text}, entries))


def package_folder(path: Path, entries: Mapping[str, str]) -> CodePackage:
    """The package for a folder, or a single file, that a spec names; `entries` by the field that holds each."""
    if not path.exists():
        raise InvalidCode(str(path), "there is no such file or folder", next_step="Correct `code` in the spec.")
    files = folder_files(path) if path.is_dir() else {path.name: path.read_bytes()}
    return _checked(CodePackage(next(iter(entries.values()), ""), files, entries))


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
