"""The user's own code, tried before it costs anything: rewards on real rows, an environment's first turn, what is imported.

Each in the process in which a job would run it, with a short time limit. What only the training image has (a module that
is not installed here, an address, a language model) is not tried, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.spec_checks import is_code

from ..environments.pool import Environments
from ..environments.protocol import Action
from ..failures import JobFailure
from ..rewards.process import FunctionReward
from ..rewards.scores import Answers, Question
from .findings import Finding, Request, read_rows

_ROWS = 4
_A_TEXT = "I am not sure. The answer is 42, or so."
_LIMIT_S = 10.0
# Columns in which data sets keep the right answer.
_ANSWERS = ("completion", "answer", "chosen", "solution", "ground_truth", "target", "response", "output")


def about_user_code(folder: Path, request: Request) -> Iterator[Finding]:
    spec, code = request.spec, folder / "code"
    rows = _spread(read_rows(folder, request, "data.train"), _ROWS)
    if spec.algorithm.type == "multi_turn" and spec.environment.entry and rows:
        yield from about_environment(request, code, rows)
    if spec.reward is not None and rows and spec.algorithm.type != "multi_turn":
        for name, part in spec.reward.named_parts.items():
            about = "reward" if spec.reward.entry else f"reward {name}"
            yield about_reward(about, part.entry, code, rows, min(_LIMIT_S, spec.reward.time_limit_s), spec.seed)


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` rows from everywhere in the data."""
    step = max(1, len(rows) // count)
    return list(rows[::step][:count])


# --- rewards ---------------------------------------------------------------------------------------------------------


def about_reward(about: str, entry: str, code: Path, rows: Sequence[Row], limit_s: float, seed: int) -> Finding:
    """Two completions a row: its own answer and that of another row, or where there are none some other text."""
    if not is_code(entry) and not entry.startswith("reasoning_gym:"):
        return Finding("note", about, f"{entry} is asked only by the job; it was not tried here")
    if any("prompt" not in row.values for row in rows):
        return Finding("note", about, "was not tried: the rows have no prompt")
    question, has_answers = question_about(rows), any(map(_own_answer, rows))
    try:
        reward = FunctionReward(entry, code, time_limit_s=limit_s, seed=seed)
    except JobFailure as error:
        return _broken(about, error, code)
    try:
        return _judged(about, reward.score(question, step=1), limit_s, has_answers)
    except JobFailure as error:
        return _broken(about, error, code)
    finally:
        reward.close()


def question_about(rows: Sequence[Row]) -> Question:
    """Every row twice: with its own answer, then with another's. Rows without one: with texts of several lengths."""
    answers = [_own_answer(row) or _A_TEXT[: 5 * index + 3] for index, row in enumerate(rows)]
    others = [*answers[1:], "?"]
    twice = [*rows, *rows]
    texts = [*answers, *others]
    names = {name: None for row in rows for name in row.values if name != "prompt"}
    return Question(
        prompts=[row.values["prompt"] for row in twice],
        completions=[
            [{"role": "assistant", "content": text}] if row.is_chat else text
            for row, text in zip(twice, texts, strict=True)
        ],
        completion_ids=[list(range(1, len(text) + 1)) for text in texts],
        columns={name: [row.values.get(name) for row in twice] for name in names},
    )


def _own_answer(row: Row) -> str | None:
    for name in _ANSWERS:
        value = row.values.get(name)
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value = value[-1].get("content")
        if isinstance(value, str) and value:
            return value
    return None


def _judged(about: str, answers: Answers, limit_s: float, has_answers: bool) -> Finding:
    values = [each.value for each in answers.each]
    if all(each.timed_out for each in answers.each):
        return Finding(
            "warning", about, f"gave no score within {limit_s:g} s", "Make it faster, or raise its time limit."
        )
    if bad := [value for value in values if value is not None and not math.isfinite(value)]:
        return Finding(
            "error", about, f"gave {bad[0]} on rows of the data", "Return a finite number, or None to abstain."
        )
    numbers = [value for value in values if value is not None]
    if not numbers:
        return Finding("warning", about, f"abstained (None) on all {len(values)} tries", "Return numbers where it can.")
    if not has_answers:
        return Finding("ok", about, f"gave {min(numbers):.2f} to {max(numbers):.2f} for {len(values)} texts of ours: the "
                       "rows hold no answer to try")  # fmt: skip
    if len(values) > 1 and len(set(numbers)) == 1:
        found = f"gave {numbers[0]:g} to right and wrong answers alike ({len(numbers)} tries)"
        return Finding(
            "warning", about, found, "Where rewards never differ nothing is learned; look at what it compares."
        )
    half = len(values) // 2
    return Finding("ok", about, f"tried on {half} rows: {_mean(values[:half])} for the row's own answer, "
                   f"{_mean(values[half:])} for another's")  # fmt: skip


def _mean(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{math.fsum(numbers) / len(numbers):.2f}" if numbers else "no score"


def _broken(about: str, error: JobFailure, code: Path) -> Finding:
    """The user's error with file and line; a module that is missing here may be there in the training image."""
    where = _place(error, code)
    if "ModuleNotFoundError" in error.message or "ImportError" in error.message:
        return Finding("warning", about, f"was not tried{where}: {error.message}", "The training image must have it.")
    return Finding("error", about, f"fails on rows of the data{where}: {error.message}", "Correct it and call again.")


def _place(error: JobFailure, code: Path) -> str:
    if not error.file:
        return ""
    file = Path(error.file)
    name = file.relative_to(code) if file.is_relative_to(code) else file
    return f" ({name}, line {error.line})"


# --- environments ----------------------------------------------------------------------------------------------------


def about_environment(request: Request, code: Path, rows: Sequence[Row]) -> Iterator[Finding]:
    """One episode begun with each row, and one action in it."""
    settings = request.spec.environment
    limit_s = min(_LIMIT_S, settings.time_limit_s)
    pool = Environments(settings.entry or "", code, options=dict(settings.options), time_limit_s=limit_s)
    try:
        pool.open()
        turns = pool.begin([row.values for row in rows], list(range(len(rows))))
        text = next(filter(None, map(_own_answer, rows)), "1")
        answered = pool.act({index: Action(text, text, [1] * len(text)) for index in turns})
    except JobFailure as error:
        yield replace(_broken("environment", error, code), about="environment")
        return
    finally:
        pool.close()
    if len(answered) < len(rows):
        yield Finding(
            "warning", "environment", f"did not answer within {limit_s:g} s", "Make it faster, or raise the limit."
        )
    else:
        yield Finding("ok", "environment", f"{len(rows)} episodes were begun and took an action")
