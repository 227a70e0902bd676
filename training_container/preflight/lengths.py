"""Rows in tokens: how long they are, and what the limits cut off.

Counted exactly with a preset's characters or the model's own tokenizer; where that is not at hand, four characters count as
a token, and every finding says that it is an estimate.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from microtuning_core.domain.datasets import Row

from .findings import Finding, Request, read_rows
from .parts import Part, parts_of
from .templates import about_template, about_tokens

_CHARACTERS_A_TOKEN = 4
_TOKENS_A_MESSAGE = 4  # what a chat template puts around one
# A whole rendering with a tokenizer of Python's own takes a millisecond.
EXACT_ROWS = 2000


@dataclass(frozen=True)
class Lengths:
    """Of one row, in tokens. completions: one of most rows, two of a pair, none of a prompt alone."""

    row: Row
    prompt: int
    completions: tuple[int, ...]

    @property
    def longest(self) -> int:
        return self.prompt + max(self.completions, default=0)


class Measure(Protocol):
    """Counts a prompt, and the completion that follows it with its end token."""

    how: str

    def prompt(self, prompt: Part) -> int: ...

    def completion(self, prompt: Part, completion: Part) -> int: ...


# --- measures --------------------------------------------------------------------------------------------------------


class Characters:
    """A preset's tokenizer: a token a character."""

    how = "exact"

    def prompt(self, prompt: Part) -> int:
        return len(prompt)

    def completion(self, prompt: Part, completion: Part) -> int:
        return len(completion) + 1


class Estimate:
    """Four characters a token."""

    how = "estimated at 4 characters a token"

    def prompt(self, prompt: Part) -> int:
        return _estimated(prompt)

    def completion(self, prompt: Part, completion: Part) -> int:
        return _estimated(completion) + 1


def _estimated(part: Part) -> int:
    if isinstance(part, str):
        return -(-len(part) // _CHARACTERS_A_TOKEN)
    return sum(_estimated(str(each.get("content") or "")) + _TOKENS_A_MESSAGE for each in part)


class Exact:
    """The model's own tokenizer and chat template, as training uses them."""

    how = "exact"

    def __init__(self, tokenizer: Any) -> None:
        from ..data import chat_text, encode
        from ..data.tokens import answered_text

        self.tokenizer = tokenizer
        self._chat_text, self._encode, self._answered = chat_text, encode, answered_text

    def prompt(self, prompt: Part) -> int:
        if isinstance(prompt, str):
            return len(self._encode(self.tokenizer, prompt)) if prompt else 0
        return len(self._ids(self._chat_text(self.tokenizer, prompt, ask=True)))

    def completion(self, prompt: Part, completion: Part) -> int:
        if isinstance(prompt, str) and isinstance(completion, str):
            if not prompt:
                return len(self._encode(self.tokenizer, completion)) + 1
            whole_row = self._answered(prompt, completion, self.tokenizer)
            return len(whole_row.tokens) - whole_row.first_trained
        whole = self._chat_text(self.tokenizer, [*prompt, *completion], ask=False)
        return max(0, len(self._ids(whole)) - self.prompt(prompt))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def measure_for(request: Request) -> Measure:
    if request.spec.model.arch:
        return Characters()
    if request.model is None or not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return Estimate()
    from transformers import AutoTokenizer

    return Exact(AutoTokenizer.from_pretrained(request.model, trust_remote_code=False))  # nosec B615 # a local folder


# --- rows ------------------------------------------------------------------------------------------------------------


def measured(rows: Sequence[Row], measure: Measure, *, prompts_alone: bool) -> list[Lengths]:
    """Of every row that has parts. prompts_alone: the model says something of its own in place of the completions."""
    found = []
    for row in rows:
        if (parts := parts_of(row)) is not None:
            prompt, completions = parts
            said = () if prompts_alone else tuple(measure.completion(prompt, each) for each in completions)
            found.append(Lengths(row, measure.prompt(prompt), said))
    return found


# --- findings --------------------------------------------------------------------------------------------------------


def about_lengths(folder: Path, request: Request) -> Iterator[Finding]:
    """What the limits and the tokenizer do to the rows of each data set."""
    kind = request.spec.algorithm.type
    if kind == "script":
        return
    measure = measure_for(request)
    for field in request.rows:
        rows = read_rows(folder, request, field)
        if isinstance(measure, Exact):
            broken = [*about_template(rows, measure.tokenizer, field)]
            yield from [*broken, *about_tokens(rows, measure.tokenizer, field, kind)]
            if any(each.level == "error" for each in broken):
                continue  # such rows cannot be counted either
        draws = kind in ("grpo", "multi_turn", "distillation") and field != "algorithm.warm_start.data"
        lengths = measured(rows, measure, prompts_alone=draws)
        if lengths:
            yield from about_limits(request, field, lengths, measure.how, draws=draws)


def about_limits(request: Request, field: str, lengths: list[Lengths], how: str, *, draws: bool) -> Iterator[Finding]:
    algorithm = request.spec.algorithm
    if algorithm.type == "script":
        return
    limit = algorithm.max_length
    if algorithm.type in ("grpo", "distillation") and draws:
        limit -= algorithm.max_completion_tokens
    size = sorted(each.longest for each in lengths)
    share = f"{request.totals[field]:,} rows"
    if len(lengths) < request.totals[field]:
        share = f"{len(lengths):,} of {share}"
    what = "prompts of" if draws else "rows of"
    yield Finding(
        "ok",
        field,
        f"{share}: {what} {statistics.median_low(size):,} tokens (median), {size[-1]:,} at most; {how}",
    )
    yield from (_prompts_too_long if draws else _cut)(field, lengths, limit, how)


def _prompts_too_long(field: str, lengths: list[Lengths], limit: int, how: str) -> Iterator[Finding]:
    over = [each for each in lengths if not 0 < each.prompt <= limit]
    if over:
        yield Finding(
            _level(over, lengths),
            field,
            f"{_share(over, lengths)} leave no room for a completion and are left out (first: {_where(over[0])}); {how}",
            f"Raise max_length, or lower max_completion_tokens: a prompt may have {limit:,} tokens.",
        )


def _cut(field: str, lengths: list[Lengths], limit: int, how: str) -> Iterator[Finding]:
    over = [each for each in lengths if each.longest > limit]
    lost = [each for each in lengths if each.completions and each.prompt >= limit]
    if over:
        labels = sum(sum(each.completions) for each in lengths)
        cut = sum(min(said, max(0, each.prompt + said - limit)) for each in over for said in each.completions)
        yield Finding(
            "warning",
            field,
            f"{_share(over, lengths)} are longer than max_length {limit:,} and are cut (first: {_where(over[0])}), "
            f"and with them {100 * cut / max(1, labels):.1f}% of what is to be learned; {how}",
            "Raise max_length, or shorten these rows.",
        )
    if lost:
        yield Finding(
            _level(lost, lengths),
            field,
            f"{_share(lost, lengths)} keep nothing to learn, since the prompt alone fills max_length {limit:,}, and are "
            f"left out (first: {_where(lost[0])}); {how}",
            "Raise max_length, or shorten the prompts.",
        )


def _level(some: Sequence[Lengths], every: Sequence[Lengths]) -> Any:
    """All rows left out ends the run."""
    return "error" if len(some) == len(every) else "warning"


def _share(some: Sequence[Lengths], every: Sequence[Lengths]) -> str:
    return f"{len(some):,} rows ({100 * len(some) / len(every):.1f}%)"


def _where(lengths: Lengths) -> str:
    return f"{lengths.row.file}, line {lengths.row.line}, {lengths.longest:,} tokens"
