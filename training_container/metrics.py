"""Metrics and other events: one JSON object a line, on stdout (CloudWatch Logs) and in output/data/metrics.jsonl.

    {"event": "metrics", "step": 40, "time": "2026-01-02T03:04:05.678Z", "attempt": 1, "reward": 0.71, "loss": 0.02}
    {"event": "eval", "when": "before", "step": 0, …}   {"event": "phase" | "recovery" | "notice", …}

Every line is valid JSON, and UTF-8 once read: a value that is not finite becomes null, half a surrogate pair an escape.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .texts import printable


class EventLog:
    """Writes events; `attempt` is stamped on each. Of several processes only the main one writes."""

    def __init__(self, path: Path, attempt: int, *, writes: bool = True) -> None:
        self._path, self._attempt, self._writes = path, attempt, writes

    def emit(self, event: str, metrics: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Write one event; `metrics` have names of others' choosing, and never take the place of a field of ours.

        One write a line, so that a killed process leaves no half line before the next one's.
        """
        if not self._writes:
            return
        ours = {"event": event, "time": now_text(), "attempt": self._attempt} | fields
        others = {name: value for name, value in (metrics or {}).items() if name not in ours}
        line = json.dumps(json_safe(ours | others)) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_safe(value: Any) -> Any:
    """`value` with plain Python numbers and whole characters in it, and null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {printable(str(key)): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, str):
        return printable(value)
    if value is None or isinstance(value, bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def finite_only(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of `metrics`, as manifests and progress.json hold them."""
    safe = {key: json_safe(value) for key, value in metrics.items()}
    return {key: float(value) for key, value in safe.items() if isinstance(value, int | float)}
