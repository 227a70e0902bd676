"""A channel's files as rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from microtuning_core.domain.datasets import Row, check_rows, is_data_file, read_rows


def read_channel(folder: Path, algorithm_type: str, *, has_chat_template: bool) -> list[Row]:
    """All rows of a channel, files in the order of their names; refused as a submit would refuse them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    names = {path: path.relative_to(folder).as_posix() for path in files}
    rows = [row for path, name in names.items() if is_data_file(name) for row in read_rows(name, path.read_bytes())]
    check_rows(rows, algorithm_type, folder.name, has_chat_template=has_chat_template)
    return rows


def texts_of(rows: Iterable[Row]) -> Iterator[str]:
    """Every text in every row, however deep: what a character tokenizer must be able to say."""
    for row in rows:
        yield from _texts(row.values)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
