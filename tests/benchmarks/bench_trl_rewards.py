"""The rewards of bench_trl, as the user's code of one side and as a function of the other."""

from __future__ import annotations

import zlib
from typing import Any


def scattered(completions: list[str], **_: Any) -> list[float]:
    """A number in [0, 1) that follows from the text alone: groups without spread, which one side drops, do not occur."""
    return [zlib.crc32(text.encode()) % 9973 / 9973 for text in completions]


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]
