"""The process in which a user's reward function runs: `python -m training_container.reward_worker FD ENTRY CODE PARENT`.

It answers {"ready": true} once the function is loaded, then each {"seed", "arguments"} with {"rewards": [...]} or
{"error": {message, file, line, traceback}}, over a socket, as JSON behind its length. Imports nothing heavy, so that it
starts in a tenth of a second; the function is called in the main thread, where signal.alarm works.
"""

from __future__ import annotations

import asyncio
import functools
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .processes import die_with_parent
from .texts import text_of, traceback_of

Reward = Callable[..., Any]
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LENGTH = struct.Struct("!Q")


class Refusal(Exception):
    """Something about the function or its answer that the user must correct; the message is the whole story."""


def main(arguments: list[str]) -> None:
    descriptor, entry, code, parent = int(arguments[0]), arguments[1], Path(arguments[2]), int(arguments[3])
    die_with_parent(parent)
    stay_until_told(signal.SIGTERM)
    with socket.socket(fileno=descriptor) as channel:
        serve(channel, entry, code)


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


def serve(channel: socket.socket, entry: str, code: Path) -> None:
    reward: Reward | None = None

    def load() -> dict[str, Any]:
        nonlocal reward
        reward = load_reward(entry, code)
        return {"ready": True}

    send(channel, answer(load, code))
    while reward is not None:
        try:
            request = receive(channel)
        except EOFError:
            return  # the trainer is done
        call = functools.partial(call_reward, reward, request["arguments"], request["seed"])
        send(channel, answer(lambda: {"rewards": call()}, code))  # noqa: B023  # called at once


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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(code)]
    outside = [
        frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
    ]
    chosen = own or outside or frames
    return (chosen[-1].filename, chosen[-1].lineno) if chosen else (None, None)


# --- loading ---------------------------------------------------------------------------------------------------------


def load_reward(entry: str, code: Path) -> Any:
    """The function an entry names: "module:name", or "pickle:reward.pkl" as fit() wrote it."""
    sys.path.insert(0, str(code))
    kind, _, name = entry.partition(":")
    if kind == "pickle":
        return _unpickled(code / name, code)
    found: Any = importlib.import_module(kind)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Refusal(f"{kind} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise Refusal(f"it is a {type(found).__name__}, not a function")
    return found


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


# --- calling ---------------------------------------------------------------------------------------------------------


def call_reward(reward: Reward, arguments: dict[str, Any], seed: int) -> list[float | None]:
    """One number or None a completion, from whatever the function returned."""
    _seed(seed)
    by_position, by_name = accepted(reward, arguments)
    result = reward(*by_position, **by_name)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return as_rewards(result, len(arguments["completions"]))


async def _awaited(result: Any) -> Any:
    return await result


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def accepted(reward: Reward, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Those of the arguments the signature takes: by position what it takes no other way, the rest by name.

    Raises:
        Refusal: it asks for one that is neither an argument nor a column of the data.
    """
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):
        return [], arguments  # a built-in without a signature
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


def as_rewards(result: Any, count: int) -> list[float | None]:
    """A list, tuple, generator or one-dimensional array of numbers, checked: a value too few would shift all others."""
    if isinstance(result, str | bytes | dict | set | frozenset) or not hasattr(result, "__iter__"):
        raise Refusal(f"it returned a {type(result).__name__}; return one number (or None) a completion, in a list")
    values = list(_iterated(result))
    if len(values) != count:
        raise Refusal(f"it returned {len(values)} rewards for {count} completions")
    return [as_number(value, index) for index, value in enumerate(values)]


def _iterated(result: Any) -> Iterator[Any]:
    try:
        return iter(result)
    except TypeError as error:  # an array without dimensions has __iter__ and refuses to use it
        raise Refusal("it returned a single number; return one a completion, in a list") from error


def as_number(value: Any, index: int) -> float | None:
    """None abstains; Python, numpy and torch numbers, bool, Decimal and Fraction count as floats; nothing else does."""
    if value is None:
        return None
    is_text_or_container = isinstance(value, str | bytes) or (hasattr(value, "__len__") and not _is_scalar_array(value))
    if not is_text_or_container and not isinstance(value, complex):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
        except (TypeError, ValueError):
            pass  # falls through to the refusal
    raise Refusal(f"reward {index} is a {type(value).__name__} ({value!r:.40}), not a number")


def _is_scalar_array(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0


# --- the wire --------------------------------------------------------------------------------------------------------


def send(channel: socket.socket, message: dict[str, Any]) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1:])
