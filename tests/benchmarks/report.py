"""How a benchmark shows itself: a table on the terminal, the same rows as JSON in build/."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BUILD = Path(__file__).parents[2] / "build"


def show(name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> Path:
    """Prints the rows (all with the same columns) and writes build/<name>.json with the machine they were measured on.

    facts: go into the file, and above the table where they are single values.
    """
    single = (f"{key} {value}" for key, value in facts.items() if not isinstance(value, list | dict))
    table = Table(title=f"{name}: " + ", ".join(single))
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console().print(table)
    BUILD.mkdir(exist_ok=True)
    path = BUILD / f"{name}.json"
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    document = {"name": name, "at": datetime.now(UTC).isoformat(), "machine": machine, **facts, "rows": list(rows)}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", "utf-8")
    print(f"written to {path.relative_to(BUILD.parent)}")
    return path


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def median_row(rows: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    """The median of every numeric column, under `label` in the first."""
    first, *others = rows[0]
    return {first: label} | {column: statistics.median(row[column] for row in rows) for column in others}
