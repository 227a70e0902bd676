"""Rows to draw completions for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.errors import InvalidData

from .tokens import chat_text, encode


@dataclass(frozen=True)
class Prompt:
    """A row to draw completions for."""

    tokens: list[int]
    row: Row

    @property
    def columns(self) -> dict[str, Any]:
        """What the reward function gets beside prompts and completions."""
        return {key: value for key, value in self.row.values.items() if key != "prompt"}


def render_prompts(rows: Sequence[Row], tokenizer: Any, max_prompt_tokens: int) -> tuple[list[Prompt], int]:
    """Prompts that leave room for a completion, and the number of rows that do not.

    Raises:
        InvalidData: none does.
    """
    prompts = [Prompt(prompt_tokens(row, tokenizer), row) for row in rows]
    usable = [prompt for prompt in prompts if 0 < len(prompt.tokens) <= max_prompt_tokens]
    if not usable:
        raise InvalidData(
            rows[0].file,
            f"holds 0 usable rows: every prompt is longer than the {max_prompt_tokens} tokens that max_length leaves it",
            next_step="Raise max_length, lower max_completion_tokens or shorten the prompts.",
        )
    return usable, len(prompts) - len(usable)


def prompt_tokens(row: Row, tokenizer: Any) -> list[int]:
    """Ids of the row's prompt, which end where the model is to go on."""
    if row.is_chat:
        text = chat_text(tokenizer, row.values["prompt"], ask=True, tools=row.values.get("tools"))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return encode(tokenizer, row.values["prompt"])
