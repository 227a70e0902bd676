"""Which values of a program can stand in a spec file, and come back as they were."""

from __future__ import annotations

import math

from microtuning_core.domain.errors import a

MAX_DEPTH = 40  # a spec file ends at 50, and holds the settings of a script some way down
MAX_DIGITS = 4000  # Python reads no longer ones


def why_no_json(value: object, depth: int = 0) -> str:
    """The reason, in the words of a Problem; "" for a value that JSON has.

    A tuple is refused too: it would come back as a list.
    """
    if depth > MAX_DEPTH:
        return "is nested too deeply"
    match value:
        case None | bool() | str():
            return ""
        case int():
            return "has too many digits" if abs(value) >= 10**MAX_DIGITS else ""
        case float():
            return "" if math.isfinite(value) else "is not a finite number"
        case list():
            return next(filter(None, (why_no_json(part, depth + 1) for part in value)), "")
        case dict():
            if not all(isinstance(name, str) for name in value):
                return "holds a name that is no text"
            return next(filter(None, (why_no_json(part, depth + 1) for part in value.values())), "")
        case tuple() | set() | frozenset():
            return f"holds {a(type(value).__name__)}; give a list"
    return f"holds {a(type(value).__name__)}, which JSON does not have"
