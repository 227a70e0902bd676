"""Texts from user code, which may hold anything and must never be what a job fails of. Imports nothing heavy."""

from __future__ import annotations

import traceback


def printable(text: str) -> str:
    """`text` with half surrogate pairs written out (\\ud800): nothing that stores or shows text takes them."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def text_of(error: BaseException) -> str:
    """What an exception says; its own __str__ may raise, too."""
    try:
        return printable(str(error))
    except BaseException as another:
        return f"(its text cannot be had: __str__ raised {type(another).__name__})"


def traceback_of(error: BaseException) -> str:
    """As Python would print it; formatting runs user code as well (a SyntaxError with odd parts, say)."""
    try:
        return printable("".join(traceback.format_exception(error)))
    except BaseException as another:
        return f"{type(error).__name__} (its traceback cannot be had: {type(another).__name__})\n"
