"""User code: loading what an entry names, calling it with what its signature takes, and saying where it went wrong.

Also what the processes in which user code runs alone (rewards, environments) share: their wire, and how they outlive a
stop. Imports nothing heavy, so that such a process starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .texts import text_of, traceback_of

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LENGTH = struct.Struct("!Q")
_OURS = Path(__file__).parent


class Refusal(Exception):
    """Something about user code or its answer that the user must correct; the message is the whole story."""


# --- loading ---------------------------------------------------------------------------------------------------------


def load_entry(entry: str, code: Path) -> Any:
    """What an entry names: "module:name" in the code folder, or "pickle:file" as fit() wrote it.

    Raises:
        Refusal: the module has no such name, it cannot be called, or it was pickled by another Python.
    """
    if str(code) not in sys.path:
        sys.path.insert(0, str(code))
    kind, _, name = entry.partition(":")
    if kind == "pickle":
        return _unpickled(code / name, code)
    _forget_namesake(kind.partition(".")[0], code)
    found: Any = importlib.import_module(kind)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refusal(f"{kind} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise Refusal(f"it is a {type(found).__name__}, not a function")
    return found


def _forget_namesake(name: str, code: Path) -> None:
    """A module of the user's own comes before one of that name that is loaded already."""
    loaded = sys.modules.get(name)
    is_theirs = (code / f"{name}.py").is_file() or (code / name).is_dir()
    if loaded is not None and is_theirs and not Path(getattr(loaded, "__file__", None) or "").is_relative_to(code):
        for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[each]
        importlib.invalidate_caches()


def _unpickled(path: Path, code: Path) -> Any:
    """Bytecode belongs to one minor version of Python; another would fail later, or crash."""
    import cloudpickle

    described = code / "code.json"
    written_by = json.loads(described.read_text("utf-8")).get("python", "") if described.is_file() else ""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if written_by and ".".join(written_by.split(".")[:2]) != here:
        raise Refusal(
            f"it was pickled by Python {written_by} and the job runs Python {here}, which cannot load it. "
            "Put the function into a module, or call fit() from the same version"
        )
    with path.open("rb") as file:
        return cloudpickle.load(file)


PICKLED = "<dynamic-code>"  # what cloudpickle calls the file of every function


def named(entry: str, code: Path) -> str:
    """As its owner knows it: "module:name", or of a pickle the function's name and the file it was written in."""
    kind, _, name = entry.partition(":")
    origin = _origin(code / f"{name}.json") if kind == "pickle" else {}
    return f"{origin['name']} ({origin['file']})" if origin else entry


def _origin(path: Path) -> dict[str, str]:
    """What fit() wrote beside a pickle."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _file_of_pickles(code: Path) -> str:
    """The one file that all pickled functions were written in; where there are several, nobody knows whose line it was."""
    files = {_origin(path).get("file") for path in code.glob("*.pkl.json")}
    return str(files.pop()) if len(files) == 1 else PICKLED


# --- calling ---------------------------------------------------------------------------------------------------------


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Those of the arguments the signature takes: by position what it takes no other way, the rest by name.

    Raises:
        Refusal: it asks for one that is neither an argument nor a column of the data.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], dict(arguments)  # a built-in without a signature
    missing = [p.name for p in parameters if _is_required(p) and p.name not in arguments]
    if missing:
        raise Refusal(f"it asks for {missing[0]!r}, and the rows have {', '.join(sorted(arguments))}")
    placed = {p.name: arguments.get(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_ONLY}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    wanted = arguments.keys() if takes_all else {p.name for p in parameters if p.kind in _BY_NAME}
    return list(placed.values()), {k: v for k, v in arguments.items() if k in wanted and k not in placed}


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not variadic


def settled(result: Any) -> Any:
    """What a function gave, awaited where it is to be awaited."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


# --- where it went wrong -----------------------------------------------------------------------------------------------


def answer(work: Callable[[], dict[str, Any]], code: Path) -> dict[str, Any]:
    """What `work` gives, or the error it ended with. Whatever user code raises is data here, SystemExit included."""
    try:
        return work()
    except Refusal as error:
        return {"error": {"message": str(error)}}
    except BaseException as error:
        file, line = user_frame(error, code)
        message = f"{type(error).__name__}: {text_of(error)}"
        return {"error": {"message": message, "file": file, "line": line, "traceback": traceback_of(error)}}


def user_frame(error: BaseException, code: Path) -> tuple[str | None, int | None]:
    """(file, line) of the innermost frame in the code folder, else of the innermost outside installed packages."""
    if isinstance(error, SyntaxError) and _is_place_in(code, error.filename, error.lineno):
        return error.filename, error.lineno  # no frame of it ever ran
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(code)]
    outside = [
        frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
    ]
    chosen = own or outside or frames
    if not chosen:
        return None, None
    file, line = chosen[-1].filename, chosen[-1].lineno
    return (_file_of_pickles(code) if file == PICKLED else file), line


def _is_place_in(code: Path, file: Any, line: Any) -> bool:
    """Whoever raises a SyntaxError says where it is, and may say anything."""
    if not isinstance(file, str) or not Path(file).is_relative_to(code):
        return False
    return line is None or (isinstance(line, int) and 0 <= line < 2**31)


def is_ours(file: str) -> bool:
    """Whether a source file is of this package."""
    return Path(file).is_relative_to(_OURS)


# --- a process of its own ----------------------------------------------------------------------------------------------


def stay_until_told(number: int) -> None:
    """Outlive a stop, which goes to every process of a job: the trainer decides when this one ends.

    By a handler that does nothing. To ignore the signal would be inherited by all that user code starts. A program started
    anew has the default again by itself; a fork gets it, and a signal that comes meanwhile waits for it.
    """
    masks = threading.local()

    def stay(*_: object) -> None:
        pass

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def end_as_usual() -> None:
        if signal.getsignal(number) is stay:
            signal.signal(number, signal.SIG_DFL)
        let_go()

    signal.signal(number, stay)
    signal.siginterrupt(number, False)
    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=end_as_usual)


def python_path() -> str:
    """Where a child finds this package, however the parent found it."""
    return os.pathsep.join([str(_OURS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """One message: JSON behind its length."""
    body = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket, *, deadline_s: float | None = None) -> dict[str, Any]:
    """One message.

    Raises:
        EOFError: the other side is gone. TimeoutError: nothing whole by `deadline_s` (time.monotonic()).
    """
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size, deadline_s))
    message: dict[str, Any] = json.loads(_exactly(channel, length, deadline_s))
    return message


def _exactly(channel: socket.socket, count: int, deadline_s: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if deadline_s is not None:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise TimeoutError
            channel.settimeout(left_s)
        chunk = channel.recv(min(count - len(parts), 1 << 20))
        if not chunk:
            raise EOFError
        parts += chunk
    return bytes(parts)
