"""What user code wants shown beside a score, as JSON can hold it. Imports nothing heavy.

A note is for a person to read, so nothing in it is refused: what JSON has no form for is told in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

_SHOWN = 200  # characters of what is no value of JSON
_DEEPEST = 32
_MOST_ELEMENTS = 4_096  # of an array
_LARGEST_INT = 2**63
_LEFT_OUT = "…"
_SEVERAL = (list, tuple, set, frozenset)


def plain(value: Any, within: tuple[int, ...] = ()) -> Any:
    """`value` in None, bool, int, float, str, list and dict alone; always something that JSON holds, whatever it is.

    Numbers and arrays of numpy and torch become Python's, sets and tuples lists, keys texts; NaN, infinities and what else
    there is become the beginning of their repr; what holds itself, or nests too deep, is left out there.

    Args:
        within: ids of what it lies in.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float | Decimal | Fraction):
        return _number(value)
    if id(value) in within or len(within) >= _DEEPEST:
        return _LEFT_OUT
    return _attempted(_of_many, value, (*within, id(value)))


def in_words(value: Any, most: int = _SHOWN) -> str:
    """The beginning of its repr, which may raise."""
    try:
        text = repr(value)
    except Exception as error:  # it is the user's own code
        return f"a {type(value).__name__} (its repr raised {type(error).__name__})"
    return text if len(text) <= most else text[:most] + _LEFT_OUT


def _number(value: float | Decimal | Fraction) -> Any:
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGEST_INT else in_words(value)
    try:
        number = float(value)
    except (OverflowError, ValueError):  # a Fraction too large, a signalling NaN
        return in_words(value)
    return number if math.isfinite(number) else str(number)


def _of_many(value: Any, within: tuple[int, ...]) -> Any:
    """What holds others, an array, or another object."""
    if isinstance(value, Mapping):
        return {_key(name): plain(each, within) for name, each in value.items()}
    if isinstance(value, _SEVERAL):
        return [plain(each, within) for each in value]
    if _is_array(value) and math.prod(value.shape) <= _MOST_ELEMENTS:
        return plain(value.tolist(), within)
    return in_words(value)


def _attempted(convert: Callable[[Any, tuple[int, ...]], Any], value: Any, within: tuple[int, ...]) -> Any:
    """To ask an object for what it holds may run code of its own, which may raise (a tensor without data, say)."""
    try:
        return convert(value, within)
    except Exception:
        return in_words(value)


def _is_array(value: Any) -> bool:
    """Whether it is an array, a tensor or one number of numpy's or torch's."""
    shape = getattr(value, "shape", None)
    return isinstance(shape, Iterable) and callable(getattr(value, "tolist", None)) and not isinstance(value, type)


def _key(name: Any) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    return in_words(name)
