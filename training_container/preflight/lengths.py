"""Rows in tokens: how long they are, what the limits cut off, and what a tokenizer or chat template would do to them.

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

from microtuning_core.domain.datasets import Row, common_beginning

from .findings import Finding, Request, read_rows

_CHARACTERS_A_TOKEN = 4
_TOKENS_A_MESSAGE = 4  # what a chat template puts around one
# A whole rendering with a tokenizer of Python's own takes a millisecond.
EXACT_ROWS = 2000

Part = str | list[dict[str, Any]]


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
        from .. import data

        self.tokenizer, self._data = tokenizer, data

    def prompt(self, prompt: Part) -> int:
        if isinstance(prompt, str):
            return len(self._data.encode(self.tokenizer, prompt)) if prompt else 0
        return len(self._ids(self._data.chat_text(self.tokenizer, prompt, ask=True)))

    def completion(self, prompt: Part, completion: Part) -> int:
        if isinstance(prompt, str) and isinstance(completion, str):
            return len(self._ids(completion)) + 1
        whole = self._data.chat_text(self.tokenizer, [*prompt, *completion], ask=False)
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

    return Exact(AutoTokenizer.from_pretrained(request.model, trust_remote_code=False))


# --- rows ------------------------------------------------------------------------------------------------------------


def parts_of(row: Row) -> tuple[Part, list[Part]] | None:
    """`(prompt, completions)` of a row; None of one that only the user's own code understands."""
    values, prompt = row.values, row.values.get("prompt")
    match row.shape:
        case "text":
            return "", [values["text"]]
        case "messages":
            return values["messages"][:-1], [values["messages"][-1:]]
        case "prompt" | "chat_prompt":
            return values["prompt"], []
        case "prompt_completion" | "chat_prompt_completion" | "labelled" | "chat_labelled":
            return values["prompt"], [values["completion"]]
        case "preference" | "chat_preference":
            chosen, rejected = values["chosen"], values["rejected"]
            if prompt is not None:
                return prompt, [chosen, rejected]
            shared = common_beginning(chosen, rejected)
            return chosen[:shared], [chosen[shared:], rejected[shared:]]
    return None


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
            yield from about_tokenizer(rows, measure.tokenizer, field)
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


def about_tokenizer(rows: Sequence[Row], tokenizer: Any, field: str) -> Iterator[Finding]:
    """What its template, padding and start token do to these rows."""
    template = tokenizer.chat_template or ""
    if any(row.is_chat for row in rows) and not template:
        yield Finding(
            "error", field, "the rows are messages, and the model's tokenizer has no chat template",
            "Give prompt and completion as text, or a model with a chat template.",
        )  # fmt: skip
    several = [row for row in rows if row.shape == "messages" and _answers(row) > 1]
    if several and template and "generation" not in template.replace("add_generation_prompt", ""):
        yield Finding(
            "warning", field,
            f"{len(several):,} rows have several assistant turns, and the chat template does not mark what the assistant "
            "says ({% generation %}), so only the last turn of each is learned",
            "Give a tokenizer whose template has generation markers, or a row a turn.",
        )  # fmt: skip
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield Finding(
            "note",
            field,
            "the tokenizer pads with its end token; padding is masked by its place, so the end is learned",
        )
    if twice := [row for row in rows if _begins_twice(row, tokenizer)]:
        yield Finding(
            "warning", field,
            f"{len(twice):,} rows begin with {tokenizer.bos_token!r}, which the tokenizer adds as well, so it comes twice "
            f"(first: {twice[0].file}, line {twice[0].line})",
            f"Take {tokenizer.bos_token!r} out of the text.",
        )  # fmt: skip


def _answers(row: Row) -> int:
    return sum(message["role"] == "assistant" for message in row.values["messages"])


def _begins_twice(row: Row, tokenizer: Any) -> bool:
    parts = parts_of(row)
    if not tokenizer.bos_token or parts is None or row.is_chat:
        return False
    prompt, completions = parts
    text = prompt or (completions[0] if completions else "")
    if not str(text).startswith(tokenizer.bos_token):
        return False
    return list(tokenizer(str(text))["input_ids"][:2]) == [tokenizer.bos_token_id] * 2
