"""What a model's own chat template and tokenizer would do to the rows.

Conversations that need it are rendered here as training renders them, so that what is said is what will happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.errors import InvalidData

from ..failures import JobFailure
from .findings import Finding
from .parts import parts_of


def about_template(rows: Sequence[Row], tokenizer: Any, field: str) -> Iterator[Finding]:
    """Whether conversations can be rendered, and where in them the labels are."""
    template = tokenizer.chat_template or ""
    if any(row.is_chat for row in rows) and not template:
        yield Finding(
            "error", field, "the rows are messages, and the model's tokenizer has no chat template",
            "Give prompt and completion as text, or a model with a chat template.",
        )  # fmt: skip
        return
    several = [row for row in rows if row.shape == "messages" and _answers(row) > 1]
    if several and "generation" not in template.replace("add_generation_prompt", ""):
        if why := _why_not_rendered(several, tokenizer):
            yield Finding("error", field, why, "Give a chat template with {% generation %} marks, or a row an answer.")
            return
        yield Finding(
            "note", field,
            f"{len(several):,} rows have several assistant turns, and the chat template does not mark what the assistant "
            "says ({% generation %}); it renders the turns one after the other, so each is found and learned",
        )  # fmt: skip


def _why_not_rendered(rows: Sequence[Row], tokenizer: Any) -> str:
    from .. import data

    try:
        for row in rows:
            data.render_row(row, tokenizer)
    except InvalidData as error:
        return f"{error.file}, line {error.line}: {error.reason}"
    return ""


def about_tokens(rows: Sequence[Row], tokenizer: Any, field: str, kind: str) -> Iterator[Finding]:
    """What padding and the start token do to these rows."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id and kind != "reward":
        yield Finding(
            "note",
            field,
            "the tokenizer pads with its end token; padding is masked by its place, so the end is learned",
        )
    if twice := [row for row in rows if _begins_twice(row, tokenizer)]:
        yield Finding(
            "note", field,
            f"{len(twice):,} rows begin with {tokenizer.bos_token!r}, which the tokenizer adds as well; training keeps one "
            f"(first: {twice[0].file}, line {twice[0].line})",
            f"Take {tokenizer.bos_token!r} out of the text, since other programs will keep both.",
        )  # fmt: skip
    if kind == "reward" and field == "data.train" and (why := _why_not_padded(tokenizer)):
        yield Finding("error", "model", why)


def _why_not_padded(tokenizer: Any) -> str:
    """A score model finds a row's end by its padding; asked of a copy, since the answer may set a token for it."""
    from ..engine.models import padding_apart

    try:
        padding_apart(copy(tokenizer))
    except JobFailure as error:
        return error.message
    return ""


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
