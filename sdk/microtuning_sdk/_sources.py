"""Which source files a piece of user code needs: its own module, and the local modules that it imports.

    rewards.py:  from textlib import clean   ->   {"rewards.py": …, "textlib/__init__.py": …, "textlib/words.txt": …}

Local means: found under a folder of the user's own on `sys.path`. The standard library, installed packages and
Microtuning itself are not shipped, since the training image has them. Imports are read from the syntax tree; nothing is
executed. A package (a folder with `__init__.py`) is shipped whole: it may load its own parts and data by name.
"""

from __future__ import annotations

import ast
import site
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from microtuning_core.domain.errors import InvalidCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

Files = dict[str, bytes]

MAX_CODE_BYTES = 50_000_000
_OURS = frozenset({"microtuning_core", "microtuning_sdk", "microtuning_local", "training_container"})
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


def is_local(module: ModuleType) -> bool:
    """Whether the module is a source file of the user's own."""
    file: str | None = getattr(module, "__file__", None)
    own_name = module.__name__.partition(".")[0] not in _OURS and module.__name__ != "__main__"
    return file is not None and file.endswith(".py") and own_name and _is_own_place(Path(file))


def local_roots() -> list[Path]:
    """The folders on `sys.path` that are the user's own, in order."""
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir() and _is_own_place(folder)]


def _is_own_place(path: Path) -> bool:
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed.add(Path(site.getusersitepackages()))
    is_installed = any(path.is_relative_to(folder) for folder in installed)
    return not is_installed and not {"site-packages", "dist-packages"} & set(path.parts)


def root_of(module: ModuleType) -> Path:
    """The folder that must be on sys.path for the module's name to find its file."""
    file = Path(module.__file__ or "")
    depth = module.__name__.count(".") + (file.name == "__init__.py")
    return file.parents[min(depth, len(file.parents) - 1)]


def find_module(name: str, roots: Sequence[Path]) -> tuple[Path, Path] | None:
    """`(root, file)` of a local module by its dotted name, or None when no root has it."""
    for root in roots:
        base = root.joinpath(*name.split("."))
        for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if file.is_file():
                return root, file
    return None


def sources_of(modules: Iterable[str], roots: Sequence[Path]) -> Files:
    """The sources of these modules and of every local module that they import, by path in the archive."""
    files: Files = {}
    waiting, seen = list(modules), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] in _OURS | sys.stdlib_module_names:
            continue
        seen.add(name)
        found = find_module(name, roots)
        for path, text in _shipped_with(name, *found) if found else ():
            if path not in files:
                files[path] = text
                waiting += imports_of(path, text)
        _check_size(files)
    return files


def _shipped_with(name: str, root: Path, file: Path) -> Iterator[tuple[str, bytes]]:
    package = root / name.partition(".")[0]
    if (package / "__init__.py").is_file():
        for path, content in folder_files(package).items():
            yield f"{package.name}/{path}", content
    else:
        yield file.relative_to(root).as_posix(), file.read_bytes()


def folder_files(folder: Path) -> Files:
    """Everything in a folder but hidden files, caches and links out of it."""
    files: Files = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in parts):
            files["/".join(parts)] = path.read_bytes()
            _check_size(files)
    return files


def _check_size(files: Files) -> None:
    total = sum(map(len, files.values()))
    if total > MAX_CODE_BYTES:
        largest = max(files, key=lambda path: len(files[path]))
        raise InvalidCode(
            f"The code ({len(files)} files)",
            f"it has {total / 1e6:.0f} MB so far, of which {largest} has {len(files[largest]) / 1e6:.0f} MB, "
            f"and at most {MAX_CODE_BYTES / 1e6:.0f} MB may travel",
            next_step="Move the code into a folder without data, and give data as train_data.",
        )


def imports_of(path: str, text: bytes) -> set[str]:
    """The dotted names that a source file imports, also inside functions; relative ones made absolute.

    Raises:
        InvalidCode: the file has a syntax error.
    """
    if not path.endswith(".py"):
        return set()
    try:
        tree = ast.parse(text, path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InvalidCode(
            path, f"{getattr(error, 'msg', error)} in line {line}", next_step="Correct the file."
        ) from error
    package = path.removesuffix(".py").removesuffix("/__init__").split("/")
    package = package if path.endswith("__init__.py") else package[:-1]
    return {name for node in ast.walk(tree) for name in _imported(node, package)}


def _imported(node: ast.AST, package: list[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _prefixes(alias.name)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield from _prefixes(f"{base}.{alias.name}" if base else alias.name)


def _prefixes(name: str) -> Iterator[str]:
    """`a.b.c` may need a, a.b and a.b.c; a name that is no module is simply not found."""
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def defines(text: bytes, name: str) -> bool:
    """Whether a module's source gives it the top-level name; a star import may give any."""
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return True
            case ast.Import() | ast.ImportFrom() if any((a.asname or a.name) in (name, "*") for a in node.names):
                return True
            case ast.Assign() | ast.AnnAssign() | ast.If() | ast.Try() | ast.With():
                if any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node)):
                    return True
                if any(isinstance(i, ast.FunctionDef | ast.ClassDef) and i.name == name for i in ast.walk(node)):
                    return True
    return False
