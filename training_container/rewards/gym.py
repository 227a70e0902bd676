"""Rewards by a name of reasoning-gym: `reasoning_gym:<task>`, scored as the task itself scores an answer.

Runs in the reward's process; reasoning_gym is imported there alone. The entry a completion is held to is the row's column
`entry`, the JSON object {question, answer, metadata} that reasoning_gym made, or else its columns `question` (or the
prompt), `answer` and `metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..user_code import Refusal
from .functions import Function, text_of_last

PREFIX = "reasoning_gym:"


def load_task(task: str) -> Function:
    """The task's scorer as a reward function of one completion.

    Raises:
        Refusal: reasoning-gym is not installed, or has no such task.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise Refusal(f"reasoning-gym cannot be imported ({error}); pip install 'microtuning[rewards]'") from error
    if task not in DATASETS:
        raise Refusal(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
    score_answer = reasoning_gym.get_score_answer_fn(task)

    def score(prompt: Any, completion: Any, **row: Any) -> float:
        return float(score_answer(answer_in(text_of_last(completion)), entry_of(prompt, row)))

    return score


def answer_in(text: str) -> str:
    """What the last <answer> tag holds, as reasoning_gym's own prompts ask for it; else all of it."""
    from reasoning_gym.utils import extract_answer

    found: str | None = extract_answer(text)
    return text.strip() if found is None else found


def entry_of(prompt: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the completion is held to.

    Raises:
        Refusal: the row has neither `entry` nor `answer`.
    """
    entry = row.get("entry")
    if isinstance(entry, str):
        entry = json.loads(entry)
    if isinstance(entry, Mapping):
        return {"metadata": {}, **entry}
    if "answer" not in row:
        raise Refusal(
            "the row has neither a column `entry` (the object that reasoning_gym made) nor `answer`; it has "
            f"{', '.join(sorted(row)) or 'no columns'}"
        )
    question = row.get("question", text_of_last(prompt))
    return {"question": question, "answer": row["answer"], "metadata": row.get("metadata") or {}}
