"""Rows that say which answer is the better one, or whether an answer is good.

An answer gets the tokens that its prompt leaves of max_length, whatever the other's length: a long answer does not eat a
short one's room. A longer one is cut, and its end token with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microtuning_core.domain.datasets import Row, common_beginning
from microtuning_core.domain.errors import InvalidData

from ..engine import Example
from .supervised import truncate
from .tokens import answered

_PAIRS = ("preference", "chat_preference")


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, whose ids both examples begin with. Labels: 1 the chosen, 0 the rejected."""

    chosen: Example
    rejected: Example

    @property
    def examples(self) -> tuple[Example, Example]:
        return self.chosen, self.rejected

    @property
    def is_tie(self) -> bool:
        """Nothing tells the two apart, perhaps because what did was cut off."""
        return list(self.chosen.tokens) == list(self.rejected.tokens)


@dataclass(frozen=True)
class Pairs:
    """What could be used. dropped: rows whose prompt leaves no room; cut: answers that lost their end; ties: see Pair."""

    pairs: list[Pair]
    dropped: int = 0
    cut: int = 0

    @property
    def ties(self) -> int:
        return sum(pair.is_tie for pair in self.pairs)


def render_pairs(rows: Sequence[Row], tokenizer: Any, max_length: int) -> Pairs:
    """Each row's two answers; the examples of the row with index i have group i.

    Raises:
        InvalidData: no prompt leaves room for an answer.
    """
    whole = [_pair(row, index, tokenizer) for index, row in enumerate(rows)]
    usable = [pair for pair in whole if all(_has_room(example, max_length) for example in pair.examples)]
    _refuse_none(usable, rows, max_length)
    cut = sum(len(example.tokens) > max_length for pair in usable for example in pair.examples)
    pairs = [Pair(*(_cut(example, max_length) for example in pair.examples)) for pair in usable]
    return Pairs(pairs, len(whole) - len(pairs), cut)


def _pair(row: Row, index: int, tokenizer: Any) -> Pair:
    prompt, chosen, rejected = parts_of(row)
    good, bad = (answered(row, prompt, answer, tokenizer) for answer in (chosen, rejected))
    if good.tokens[: good.first_trained] != bad.tokens[: bad.first_trained]:
        raise InvalidData(
            row.file,
            "chosen and rejected do not both begin with the assistant's message, so they answer different prompts",
            line=row.line,
            next_step="Put all that comes before the answers into `prompt`.",
        )
    return Pair(replace(good, label=1.0, group=index), replace(bad, label=0.0, group=index))


def parts_of(row: Row) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected; conversations without a prompt of their own have their common beginning as one."""
    prompt, chosen, rejected = (row.values.get(name) for name in ("prompt", "chosen", "rejected"))
    if prompt is not None:
        return prompt, chosen, rejected
    assert isinstance(chosen, list) and isinstance(rejected, list)  # texts without a prompt are no row of pairs
    shared = common_beginning(chosen, rejected)
    return chosen[:shared], chosen[shared:], rejected[shared:]


# --- answers marked good or bad --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rated:
    """An answer with label 1 (good) or 0 (bad), and the same prompt with another prompt's answer (None: there is none)."""

    example: Example
    mismatched: Example | None


@dataclass(frozen=True)
class Marked:
    """What could be used, and what could not, as in Pairs."""

    rows: list[Rated]
    dropped: int = 0
    cut: int = 0


def render_marked(rows: Sequence[Row], tokenizer: Any, max_length: int) -> Marked:
    """Answers marked good or bad; a pair is one of each, all good ones of pairs before all bad ones.

    The mismatched answer is that of the nearest row before, in a circle, with another prompt: it follows from the data
    alone, so batches of any size have it.

    Raises:
        InvalidData: no prompt leaves room for an answer.
    """
    whole = [replace(answered(row, prompt, said, tokenizer), label=label) for row, prompt, said, label in _said(rows)]
    usable = [example for example in whole if _has_room(example, max_length)]
    _refuse_none(usable, rows, max_length)
    cut = sum(len(example.tokens) > max_length for example in usable)
    rated = [
        Rated(_cut(example, max_length), mate and _cut(mate, max_length))
        for example, mate in zip(usable, mismatched(usable), strict=True)
    ]
    return Marked(rated, len(whole) - len(usable), cut)


def _said(rows: Sequence[Row]) -> list[tuple[Row, Any, Any, float]]:
    """(row, prompt, answer, label) of each answer."""
    single = [row for row in rows if row.shape not in _PAIRS]
    pairs = [(row, *parts_of(row)) for row in rows if row.shape in _PAIRS]
    return [
        *((row, row.values["prompt"], row.values["completion"], float(row.values["label"])) for row in single),
        *((row, prompt, chosen, 1.0) for row, prompt, chosen, _ in pairs),
        *((row, prompt, rejected, 0.0) for row, prompt, _, rejected in pairs),
    ]


def mismatched(examples: Sequence[Example]) -> list[Example | None]:
    """Each row's prompt with the answer of the nearest row before it, in a circle, whose prompt is another."""
    prompts = [tuple(example.tokens[: example.first_trained]) for example in examples]
    other = next((index for index in reversed(range(len(examples))) if prompts[index] != prompts[0]), None)
    found: list[Example | None] = []
    for index, example in enumerate(examples):
        if index and prompts[index - 1] != prompts[index]:
            other = index - 1
        found.append(None if other is None else _asked(example, examples[other]))
    return found


def _asked(asking: Example, answering: Example) -> Example:
    prompt, start = asking.first_trained, answering.first_trained
    return Example(
        [*asking.tokens[:prompt], *answering.tokens[start:]], [False] * prompt + list(answering.trained[start:])
    )


# --- room ------------------------------------------------------------------------------------------------------------


def _has_room(example: Example, max_length: int) -> bool:
    """For the first token of an answer; one of which a chat template shows nothing has none."""
    return example.first_trained < min(max_length, len(example.tokens))


def _cut(example: Example, max_length: int) -> Example:
    return replace(truncate(example, max_length), label=example.label, group=example.group)


def _refuse_none(usable: Sequence[object], rows: Sequence[Row], max_length: int) -> None:
    if not usable:
        raise InvalidData(
            rows[0].file,
            f"holds 0 usable rows: no prompt leaves room for an answer within max_length {max_length}",
            next_step="Raise max_length or shorten the prompts.",
        )
