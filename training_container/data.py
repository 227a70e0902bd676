"""Rows: reading them from a channel, their order in each epoch, and turning them into tokens.

What a row may look like, and what is refused, is decided in microtuning_core.domain.datasets, for all of Microtuning alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from microtuning_core.domain.datasets import Row, check_rows, is_data_file, read_rows
from microtuning_core.domain.errors import InvalidData

from .engine import Example

# --- reading ---------------------------------------------------------------------------------------------------------


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


# --- order -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cursor:
    """Where in the data a run stands: rows before `position` of this epoch's order are done.

    The end of an epoch is written as the start of the next, never as (epoch, all rows): so a run resumed exactly there
    cannot take the coming epoch for done.
    """

    epoch: int = 0
    position: int = 0

    def take(self, rows: int, batch: int, seed: int) -> tuple[list[int], Cursor]:
        """Indices of the next batch, and the cursor after it. An epoch's last batch may be smaller."""
        indices = epoch_order(seed, self.epoch, rows)[self.position : self.position + batch]
        end = self.position + len(indices)
        return indices, Cursor(self.epoch + 1, 0) if end >= rows else Cursor(self.epoch, end)

    def steps_left(self, rows: int, batch: int, epochs: int) -> int:
        """Batches from here to the end of the last epoch."""
        if self.epoch >= epochs:
            return 0
        return math.ceil((rows - self.position) / batch) + (epochs - self.epoch - 1) * math.ceil(rows / batch)


def epoch_order(seed: int, epoch: int, rows: int) -> list[int]:
    """The order of one epoch: a permutation that follows from seed and epoch alone, so a cursor is all there is to save."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(rows, generator=generator).tolist()


# --- supervised rows -------------------------------------------------------------------------------------------------


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
    values = row.values
    match row.shape:
        case "prompt_completion":
            return _two_parts(encode(tokenizer, values["prompt"]), values["completion"], tokenizer)
        case "text":
            tokens = [*encode(tokenizer, values["text"]), tokenizer.eos_token_id]
            return Example(tokens, [False] + [True] * (len(tokens) - 1))
        case "chat_prompt_completion":
            return _chat(row, values["prompt"], values["completion"], tokenizer)
        case "messages":
            return _messages(row, values["messages"], tokenizer)
        case shape:
            raise InvalidData(row.file, f"a row of shape {shape} cannot be learned from", line=row.line)


def truncate(example: Example, max_length: int) -> Example:
    return Example(example.tokens[:max_length], example.trained[:max_length])


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids with what the tokenizer puts at the start of a text (a BOS, say), but no end token of its own."""
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids[:-1] if len(ids) > 0 and ids[-1] == tokenizer.eos_token_id else ids


def _two_parts(prompt: list[int], completion: str, tokenizer: Any) -> Example:
    """Prompt and completion are tokenized apart, as they are when the model is asked: ids never merge across."""
    learned = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return _joined(prompt, learned)


def _joined(prompt: list[int], learned: list[int]) -> Example:
    tokens = [*prompt, *learned]
    trained = [False] * len(prompt) + [True] * len(learned)
    return Example(tokens, [False, *trained[1:]])


def _chat(row: Row, prompt: list[Any], completion: list[Any], tokenizer: Any) -> Example:
    before = chat_text(tokenizer, prompt, ask=True)
    whole = chat_text(tokenizer, [*prompt, *completion], ask=False)
    if not whole.startswith(before):
        raise InvalidData(
            row.file,
            "the chat template renders the prompt differently once the answer follows, so labels cannot be placed",
            line=row.line,
            next_step="Give prompt and completion as text.",
        )
    learned = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
    return _joined(tokenizer(before, add_special_tokens=False)["input_ids"], learned)


def _messages(row: Row, messages: list[Any], tokenizer: Any) -> Example:
    """Labels on every assistant turn where the template marks them ({% generation %}), else on the last one."""
    if "{% generation" in (tokenizer.chat_template or "") or "{%- generation" in (tokenizer.chat_template or ""):
        marked = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        trained = [bool(flag) for flag in marked["assistant_masks"]]
        return Example(list(marked["input_ids"]), [False, *trained[1:]])
    if messages[-1]["role"] != "assistant":
        raise InvalidData(
            row.file, "its last message is not the assistant's, so there is nothing to learn", line=row.line
        )
    return _chat(row, messages[:-1], messages[-1:], tokenizer)


def chat_text(tokenizer: Any, messages: list[Any], *, ask: bool) -> str:
    """Messages through the model's own chat template; `ask` opens the assistant's next turn."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))


# --- prompts ---------------------------------------------------------------------------------------------------------


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
    if row.is_chat:
        text = chat_text(tokenizer, row.values["prompt"], ask=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return encode(tokenizer, row.values["prompt"])
