"""The process in which a reward function runs: `python -m training_container.rewards.worker FD ENTRY CODE PARENT`.

It answers {"ready": true, "form": …} once the function is loaded, then each {"number", "seed", "step", "first", "limit_s",
"arguments"} with {"answers": [...], "metrics": {...}} or {"error": {message, file, line, traceback}}, over a socket. Every
message says what it answers, as "to": [number of the request, 0 for loading; index among its messages].

A function that scores one completion at a time gives one message a completion ("one"), so that whoever waits sees which one
hangs; the others one for all ("batch"; "together": an async function of one completion, over all of them at once).

Imports nothing heavy, so that it starts in a tenth of a second; functions are called in the main thread, where signal.alarm
works.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..forked import in_one_process
from ..processes import die_with_parent
from ..user_code import answer, load_entry, receive, send, stay_until_told
from .functions import Function, is_async, score_batch, score_one, score_together, scores_one
from .gym import PREFIX, load_task

# Of the time limit: what an async function has, so that it is ended before its process is.
_SHARE_OF_LIMIT = 0.9


def main(arguments: list[str]) -> None:
    descriptor, entry, code, parent = int(arguments[0]), arguments[1], Path(arguments[2]), int(arguments[3])
    die_with_parent(parent)
    stay_until_told(signal.SIGTERM)
    with socket.socket(fileno=descriptor) as channel:
        serve(channel, entry, code)


def serve(channel: socket.socket, entry: str, code: Path) -> None:
    function: Function | None = None

    def load() -> dict[str, Any]:
        nonlocal function
        function = load_task(entry.removeprefix(PREFIX)) if entry.startswith(PREFIX) else load_entry(entry, code)
        return {"ready": True, "form": form_of(function)}

    send(channel, answer(in_one_process(load), code) | {"to": [0, 0]})
    while function is not None:
        try:
            request = receive(channel)
        except EOFError:
            return  # the trainer is done
        for index, work in enumerate(calls(function, request)):
            reply = answer(in_one_process(work), code)
            send(channel, reply | {"to": [request["number"], index]})
            if "error" in reply:
                break


def form_of(function: Function) -> str:
    if not scores_one(function):
        return "batch"
    return "together" if is_async(function) else "one"


def calls(function: Function, request: dict[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """The work of one request, in as many pieces as there are messages."""
    arguments, seed, form = request["arguments"], request["seed"], form_of(function)

    def batch() -> dict[str, Any]:
        answers, metrics = score_batch(function, arguments, seed=seed, step=request["step"])
        return {"answers": [each.as_json() for each in answers], "metrics": metrics}

    def together() -> dict[str, Any]:
        limit_s = _SHARE_OF_LIMIT * request["limit_s"]
        answers = score_together(function, arguments, seed=seed, limit_s=limit_s)
        return {"answers": [each.as_json() for each in answers]}

    def one(index: int) -> dict[str, Any]:
        own_seed = seed * 1_000_003 + request["first"] + index
        return {"answers": [score_one(function, arguments, index, seed=own_seed).as_json()]}

    if form == "one":
        for index in range(len(arguments["completions"])):
            yield lambda: one(index)  # noqa: B023  # called at once
    else:
        yield batch if form == "batch" else together


if __name__ == "__main__":
    main(sys.argv[1:])
