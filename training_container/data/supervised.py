"""Rows to imitate: completions, assistant turns, or all of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.errors import InvalidData

from ..engine import Example
from .tokens import answered, conversation, encode


@dataclass(frozen=True)
class Rendered:
    """What could be used, and how many rows could not because nothing of them was left to learn within max_length."""

    examples: list[Example]
    dropped: int


def render_supervised(rows: Sequence[Row], tokenizer: Any, max_length: int) -> Rendered:
    """Rows as token ids with a loss on what the model should say: completions, assistant turns, or all of a text.

    Raises:
        InvalidData: no row keeps a single label, so the run would end "well" having learned nothing.
    """
    examples = [truncate(render_row(row, tokenizer), max_length) for row in rows]
    usable = [example for example in examples if example.trained_tokens]
    if not usable:
        raise InvalidData(
            rows[0].file,
            f"holds 0 usable rows: cut to max_length {max_length}, none keeps a token to learn",
            next_step="Raise max_length or shorten the prompts.",
        )
    return Rendered(usable, len(examples) - len(usable))


def render_row(row: Row, tokenizer: Any) -> Example:
    """One row by its own shape; whether a completion is marked good or bad does not matter here."""
    values = row.values
    match row.shape:
        case "prompt_completion" | "chat_prompt_completion" | "labelled" | "chat_labelled":
            return answered(row, values["prompt"], values["completion"], tokenizer)
        case "text":
            return _whole_text(values["text"], tokenizer)
        case "messages":
            return _messages(row, values["messages"], tokenizer)
        case shape:
            raise InvalidData(row.file, f"a row of shape {shape} cannot be learned from", line=row.line)


def truncate(example: Example, max_length: int) -> Example:
    """The row's first tokens."""
    return Example(example.tokens[:max_length], example.trained[:max_length])


def _whole_text(text: str, tokenizer: Any) -> Example:
    tokens = [*encode(tokenizer, text), tokenizer.eos_token_id]
    return Example(tokens, [False] + [True] * (len(tokens) - 1))


def _messages(row: Row, messages: list[Any], tokenizer: Any) -> Example:
    """Labels where the template marks what the assistant says ({% generation %}), else on every message of its."""
    if not _marks_answers(tokenizer):
        return conversation(row, messages, tokenizer)
    tools = row.values.get("tools")
    marked = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, tools=tools
    )
    trained = [bool(flag) for flag in marked["assistant_masks"]]
    return Example(list(marked["input_ids"]), [False, *trained[1:]])


def _marks_answers(tokenizer: Any) -> bool:
    template = str(tokenizer.chat_template or "")
    return "{% generation" in template or "{%- generation" in template
