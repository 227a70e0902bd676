"""The processes in which environments run: `python -m training_container.environments.worker FD ENTRY CODE PARENT OPTIONS`.

This one loads the user's code and answers {"ready": true}; then, for every socket that is handed to it, it forks a process
that plays one episode after the other over it. So an episode has a process for itself: what it hangs or crashes in is
its own, its chance (python's and numpy's generators, seeded when it begins) depends on no other, and starting one takes
milliseconds, for the code is loaded already.

    {"begin": row, "seed": 7}    {"act": {text, raw, ids}}    {"grade": true}
    -> a Turn, a Turn, {"reward": …}; or {"error": {message, file, line, traceback}}
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..forked import in_one_process
from ..processes import die_with_parent
from ..user_code import Refusal, accepted, answer, load_entry, receive, seed_python_and_numpy, send, stay_until_told
from .cookbook import CookbookEpisode
from .own import OwnEpisode
from .protocol import Action, Awaiter, Episode
from .tools import ToolsEpisode

Factory = Callable[..., Any]


def main(arguments: list[str]) -> None:
    descriptor, entry, code, parent = int(arguments[0]), arguments[1], Path(arguments[2]), int(arguments[3])
    die_with_parent(parent)
    stay_until_told(signal.SIGTERM)
    with socket.socket(fileno=descriptor) as channel:
        serve(channel, entry, code, json.loads(arguments[4]))


def serve(channel: socket.socket, entry: str, code: Path, options: dict[str, Any]) -> None:
    """Load, then fork a player for each socket that comes."""
    factory: Factory | None = None

    def load() -> dict[str, Any]:
        nonlocal factory
        factory = load_entry(entry, code)
        return {"ready": True}

    send(channel, answer(in_one_process(load), code))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the players; the trainer decides when they end
    while factory is not None:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not descriptors:
            return  # the trainer is done
        with socket.socket(fileno=descriptors[0]) as seat:
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                channel.close()
                play(seat, factory, code, options, parent)
        send(channel, {"pid": pid})


def play(channel: socket.socket, factory: Factory, code: Path, options: dict[str, Any], parent: int) -> None:
    """One episode after the other, until the trainer is done; never returns."""
    status = 1
    try:
        die_with_parent(parent)
        os.setsid()  # so that it can be killed with what it started
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stay_until_told(signal.SIGTERM)
        player = Player(factory, options)
        while True:
            request = receive(channel)
            work = in_one_process(lambda: player.handle(request))  # noqa: B023  # called at once
            send(channel, answer(work, code))
    except (EOFError, ConnectionError):
        status = 0
    finally:
        os._exit(status)


class Player:
    """The episode that is being played."""

    def __init__(self, factory: Factory, options: dict[str, Any]) -> None:
        self._factory, self._options, self._settle = factory, options, Awaiter()
        self._episode: Episode | None = None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if "begin" in request:
            seed_python_and_numpy(request["seed"])
            self._episode = make_episode(self._factory, self._options, request["begin"], self._settle)
            return asdict(self._episode.begin(request["begin"]))
        assert self._episode is not None  # the trainer begins before it acts
        if "act" in request:
            return asdict(self._episode.act(Action(**request["act"])))
        return {"reward": self._episode.grade()}


def make_episode(factory: Factory, options: Mapping[str, Any], row: Mapping[str, Any], settle: Awaiter) -> Episode:
    """A new environment, with the options and those of the row's columns that its signature names.

    Raises:
        Refusal: an option it does not take, an argument nobody gives, or an object of no form that is known.
    """
    by_position, by_name = accepted(factory, {**row, **options})
    if unknown := [name for name in options if name not in by_name]:
        raise Refusal(f"it takes no {unknown[0]!r}, which environment.options gives")
    return form_of(settle(factory(*by_position, **by_name)), settle)


def form_of(environment: Any, settle: Awaiter) -> Episode:
    def has(*names: str) -> bool:
        return all(callable(getattr(environment, name, None)) for name in names)

    if has("initial_observation", "step"):
        return CookbookEpisode(environment, settle)
    if has("reset", "step"):
        return OwnEpisode(environment, settle)
    if has("reset"):
        return ToolsEpisode(environment, settle)
    raise Refusal(
        f"a {type(environment).__name__} is no environment: it needs reset and step, or initial_observation and step, "
        "or reset and public methods as tools"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
