"""A reward that no import can find (a lambda, a closure, a notebook's function), made into bytes; or, where that cannot
be, the name of what stands in the way.

    make(0.5)      -> bytes
    with_lock()    -> InvalidCode: with_lock.<locals>.inner captures 'lock', a _thread.lock
"""

from __future__ import annotations

import dis
import functools
import inspect
import io
import pickle  # nosec B403 # reads back what it has just written itself, to see whether that can be done
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import cloudpickle

from microtuning_core.domain.errors import InvalidCode, a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAX_DEPTH = 12


@dataclass(frozen=True)
class Pickled:
    """The bytes, and the modules that loading or calling what is in them would import."""

    payload: bytes
    modules: frozenset[str]


def pickled(reward: Callable[..., Any]) -> Pickled:
    """The reward by value. It is loaded once here, so that what cannot be loaded fails now and not in the job.

    Raises:
        InvalidCode: something that it captures cannot be pickled, or the result cannot be loaded.
    """
    try:
        payload: bytes = cloudpickle.dumps(reward)
    except Exception as error:  # whatever a captured object's own __reduce__ raises
        raise _refused(reward, error) from error
    loader = _NotingLoader(io.BytesIO(payload))
    try:
        loaded = loader.load()
    except Exception as error:
        raise InvalidCode(called(reward), f"it can be saved but not loaded again ({error})") from error
    if not callable(loaded):
        raise InvalidCode(called(reward), "what is loaded again is not callable")
    return Pickled(payload, frozenset(loader.modules))


class _NotingLoader(pickle.Unpickler):
    """Loads our own fresh pickle, and notes each module that it is looked up in, holds, or imports when called."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module != "cloudpickle.cloudpickle":
            self.modules.add(module)
        if found is cloudpickle.cloudpickle.subimport:
            return self._noted_module
        if found is cloudpickle.cloudpickle._make_function:
            return self._noted_function
        return found

    def _noted_module(self, name: str) -> Any:
        self.modules.add(name)
        return cloudpickle.cloudpickle.subimport(name)

    def _noted_function(self, code: CodeType, *rest: Any) -> Any:
        self.modules |= _imports_in(code)
        return cloudpickle.cloudpickle._make_function(code, *rest)


def _imports_in(code: CodeType) -> set[str]:
    """What `import` statements inside a function name; a relative one is left to its package."""
    names: set[str] = set()
    base = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            base = instruction.argval
            names.add(base)
        elif instruction.opname == "IMPORT_FROM":
            names.add(f"{base}.{instruction.argval}")
    return names.union(*map(_imports_in, _inner_codes(code)))


def called(value: Any) -> str:
    """What a person calls this object."""
    if isinstance(value, functools.partial):
        return f"partial({called(value.func)})"
    name = getattr(value, "__qualname__", None)
    return str(name) if name else f"the {type(value).__qualname__} object"


def _refused(reward: Callable[..., Any], error: Exception) -> InvalidCode:
    found = _culprit(reward, set(), 0)
    if found is None:
        return InvalidCode(called(reward), str(error))
    owner, name, kind = found
    return InvalidCode(
        called(reward),
        f"{owner} captures {name!r}, {a(kind)}",
        next_step=f"Create {name!r} inside the function that uses it, or in a module of your own that it imports.",
    )


def _culprit(value: Any, seen: set[int], depth: int) -> tuple[str, str, str] | None:
    """`(owner, name, type)` of the innermost part that cannot be pickled."""
    if depth > _MAX_DEPTH or id(value) in seen:
        return None
    seen.add(id(value))
    for name, part in _parts(value):
        if not _travels(part):
            return _culprit(part, seen, depth + 1) or (called(value), name, _type_name(part))
    return None


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object carries along, each under the name a person knows it by."""
    if isinstance(value, FunctionType):
        yield from _captured(value)
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"argument {i}", each) for i, each in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, dict):
        yield from ((str(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"item {i}", each) for i, each in enumerate(value))
    elif not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()


def _captured(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that was never given a value
            continue
    signature = inspect.signature(function).parameters.values()
    yield from ((each.name, each.default) for each in signature if each.default is not each.empty)
    names = _global_names(function.__code__)
    yield from ((name, each) for name, each in function.__globals__.items() if name in names and each is not function)


def _global_names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*map(_global_names, _inner_codes(code)))


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]
