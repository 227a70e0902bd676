"""Rows of a reasoning-gym task, made here: the question, its answer, and the entry that the task scores answers by.

{"prompt": "How many legs …", "answer": "292", "entry": {"question": …, "answer": …, "metadata": {…}}}
"""

from __future__ import annotations

import json
from typing import Any

from microtuning_core.domain.errors import InvalidData

DEFAULT_ROWS = 1000
_EVAL_SEED = 10_007  # apart from any seed that training rows are likely to be made with


def gym_rows(task: str, count: int, *, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """`count` rows; the same seed gives the same rows, and held-out ones come from another seed.

    Raises:
        InvalidData: reasoning-gym is not installed, has no such task, or the task's entries do not survive JSON.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InvalidData(
            f"reasoning_gym:{task}",
            f"its rows are made by reasoning-gym, which cannot be imported ({error})",
            next_step="Install it: pip install 'microtuning[rewards]'; or give train_data.",
        ) from error
    if task not in DATASETS:
        raise InvalidData(
            f"reasoning_gym:{task}",
            "reasoning-gym has no such task",
            next_step=f"It has {', '.join(sorted(DATASETS))}.",
        )
    made = reasoning_gym.create_dataset(task, size=count, seed=seed + _EVAL_SEED * held_out)
    entries = [made[index] for index in range(count)]
    rows = [{"prompt": each["question"], "answer": each["answer"], "entry": _plain(each)} for each in entries]
    _check_survives(task, made, entries, rows)
    return rows


def _check_survives(task: str, made: Any, entries: list[Any], rows: list[dict[str, Any]]) -> None:
    """The right answer to a row scores as much by the entry that travels as by the one that was made."""
    for entry, row in zip(entries[:3], rows, strict=False):
        try:
            survives = made.score_answer(row["answer"], row["entry"]) == made.score_answer(row["answer"], entry)
        except Exception:  # whatever a scorer does with an entry that lost its types
            survives = False
        if not survives:
            raise InvalidData(
                f"reasoning_gym:{task}",
                "its entries hold what JSON does not have, so a job could not score by them",
                next_step="Take another task, or score with a function of your own.",
            )


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(entry, default=_as_json))
    return plain


def _as_json(value: Any) -> Any:
    """numpy's numbers and arrays as Python's, sets as lists, anything else as its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
