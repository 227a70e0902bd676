"""What the trainer and an environment say to each other, whatever form the environment has. Imports nothing heavy."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..user_code import Refusal

_DEEPEST = 64
_LARGEST_INT = 2**63

# A text, messages with role and content, or token ids.
Observation = str | list[dict[str, Any]] | list[int] | None


@dataclass(frozen=True)
class Action:
    """What the model said in a turn: text without special tokens, text with them but for the stop token, and the ids."""

    text: str
    raw: str
    ids: list[int]


@dataclass(frozen=True)
class Turn:
    """An environment's answer to an action, or (reward None, not done) to a reset.

    observation: what comes next in the model's context; of no account when `done`.
    reward: of this turn; None where the form gives none. Not finite counts as not scored, for the whole episode.
    tools: schemas of what the model may call, for the chat template.
    whole: the observation is the whole context, not what is added to it.
    """

    observation: Observation
    reward: float | None = None
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = False


class Episode(Protocol):
    """One episode of an environment: `begin` once, `act` until a turn is done or the trainer has enough, then `grade`."""

    def begin(self, row: Mapping[str, Any]) -> Turn: ...

    def act(self, action: Action) -> Turn: ...

    def grade(self) -> float | None:
        """A reward for the whole episode beside those of its turns, where the form has one."""


class Awaiter:
    """Gives a result, awaited where it must be, on one event loop for as long as the process lives: what an async
    environment keeps open between two turns belongs to its loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(result))


async def _awaited(result: Any) -> Any:
    return await result


# --- checking what user code gives ---------------------------------------------------------------------------------------


def as_observation(value: Any, where: str) -> Observation:
    """A text, a list of messages, token ids, or what has `to_ints()` (tinker's ModelInput); an empty list is none at all.

    Raises:
        Refusal: it is none of these.
    """
    if hasattr(value, "to_ints"):
        value = value.to_ints()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and not value:
        return None
    items: list[Any] = list(value) if isinstance(value, list | tuple) else [None]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        check_sayable([min(items), max(items)], f"{where} gave token ids with")
        return items
    if all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in items):
        check_sayable(items, f"{where} gave messages with")
        return items
    raise Refusal(
        f"{where} gave {_kind(value)} as its observation; "
        "give a text, a list of messages with role and content, or token ids"
    )


def as_reward(value: Any, where: str) -> float | None:
    """A number of any kind that float() takes, None for no reward.

    Raises:
        Refusal: it is neither.
    """
    if value is None:
        return None
    if not isinstance(value, str | bytes | complex):
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError):
            pass  # falls through to the refusal
    raise Refusal(f"{where} gave {_kind(value)} as its reward; give one number, or None")


def as_done(value: Any, where: str) -> bool:
    """Whether it is over. A text or a container, which Python calls true for being there, is something in the wrong place.

    Raises:
        Refusal: it is one of these.
    """
    if isinstance(value, str | bytes | list | tuple | Mapping | set):
        raise Refusal(f"{where} gave {_kind(value)} where it says whether the episode is done; give True or False")
    return bool(value)


def as_metrics(value: Any) -> dict[str, float]:
    """The numbers of a mapping; an info dict may hold anything else, which is left out."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): float(number) for name, number in items if _is_metric(number)}


def _is_metric(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def check_sayable(value: Any, what: str, place: str = "", depth: int = 0) -> None:
    """What the model is shown must be exact, so it is never converted: JSON holds it as it is, or it is refused.

    Args:
        what: who gave it, as the refusal begins. place: of `value` in it, as Python would index it.

    Raises:
        Refusal: it holds a value that JSON does not, or nests too deep.
    """
    at = f" at {place}" if place else ""
    if depth > _DEEPEST:
        raise Refusal(f"{what} more than {_DEEPEST} lists and dicts within each other")
    if isinstance(value, dict):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise Refusal(f"{what} {_kind(wrong[0])} as a key{at}; keys are texts")
        for name, each in value.items():
            check_sayable(each, what, f"{place}[{name!r:.40}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            check_sayable(each, what, f"{place}[{index}]", depth + 1)
    elif not _is_sayable(value):
        raise Refusal(f"{what} {_kind(value)}{at}; give what JSON holds: texts, finite numbers, lists, dicts, None")


def _is_sayable(value: Any) -> bool:
    """Whether JSON holds it: an integer so large that Python refuses to write it out is nothing anybody meant."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and abs(value) < _LARGEST_INT)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} ({in_words(value)})"


def in_words(value: Any) -> str:
    """The beginning of its repr, which may raise."""
    try:
        return f"{value!r:.40}"
    except Exception as error:  # it is the user's own code
        return f"its repr raised {type(error).__name__}"
