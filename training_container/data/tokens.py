"""Texts and conversations as token ids, and which of them the model is to say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.errors import InvalidData

from ..engine import Example


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids with what the tokenizer puts at the start of a text (a BOS, say), but no end token of its own.

    A text that begins with the BOS itself does not get a second one.
    """
    ids: list[int] = tokenizer(text)["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    doubled = len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id
    return ids[1:] if doubled else ids


def chat_text(tokenizer: Any, messages: Sequence[Any], *, ask: bool, tools: Any = None) -> str:
    """Messages through the model's own chat template; `ask` opens the assistant's next turn."""
    options = {} if tools is None else {"tools": tools}
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask, **options))


# --- answers ---------------------------------------------------------------------------------------------------------


def answered(row: Row, prompt: Any, answer: Any, tokenizer: Any) -> Example:
    """A prompt and what is to be said to it, texts or messages: the answer is trained, with the token that ends it."""
    if isinstance(prompt, str):
        return answered_text(prompt, answer, tokenizer)
    return conversation(row, [*prompt, *answer], tokenizer, after=len(prompt))


def answered_text(prompt: str, answer: str, tokenizer: Any) -> Example:
    """The prompt's ids are always those it has when the model is asked; the answer's are those it has behind them, or by
    itself where a token would span both. An end token that the answer brings along is not doubled."""
    before, whole = encode(tokenizer, prompt), encode(tokenizer, prompt + answer)
    goes_on = whole[: len(before)] == before
    said = whole[len(before) :] if goes_on else _bare(tokenizer, answer)
    ended = said[-1:] == [tokenizer.eos_token_id]
    return _marked([before, said if ended else [*said, tokenizer.eos_token_id]])


def conversation(row: Row, messages: Sequence[Any], tokenizer: Any, *, after: int = 0) -> Example:
    """Every assistant's message from `after` on is trained, with whatever the template ends it with.

    Where they are is found by rendering the conversation up to each of them: that text has to be how the whole one begins.

    Raises:
        InvalidData: no such message, or a template that writes earlier messages differently once others follow.
    """
    tools = row.values.get("tools")
    turns = [index for index, each in enumerate(messages) if index >= after and each["role"] == "assistant"]
    if not turns:
        raise InvalidData(row.file, "has no message of the assistant's, so there is nothing to learn", line=row.line)
    if turns[0] == 0:
        raise InvalidData(row.file, "begins with the assistant's message, which nothing asks for", line=row.line)
    beginnings = [
        chat_text(tokenizer, messages[:end], ask=ask, tools=tools)
        for turn in turns
        for end, ask in ((turn, True), (turn + 1, False))
    ]
    whole = chat_text(tokenizer, messages, ask=False, tools=tools)
    if not all(whole.startswith(beginning) for beginning in beginnings):
        raise InvalidData(
            row.file,
            "the chat template renders earlier messages differently once others follow, so labels cannot be placed",
            line=row.line,
            next_step="Give a chat template with {% generation %} marks, or one row an answer, or prompt and completion as "
            "text.",
        )
    cuts = [0, *(len(beginning) for beginning in beginnings), len(whole)]
    return _marked(_parts(tokenizer, [whole[a:b] for a, b in pairwise(cuts)]))


def _parts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text: as they are in all of them together, where no token spans two; else each text's by itself."""
    beginnings = [[], *(_bare(tokenizer, text) for text in accumulate(texts))]
    whole = beginnings[-1]
    if any(whole[: len(beginning)] != beginning for beginning in beginnings):
        return [_bare(tokenizer, text) for text in texts]
    return [whole[len(a) : len(b)] for a, b in pairwise(beginnings)]


def _bare(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _marked(parts: Sequence[Sequence[int]]) -> Example:
    """Parts in turn given and trained; the first token has nothing before it, so it cannot be trained."""
    tokens = [token for part in parts for token in part]
    trained = [index % 2 == 1 for index, part in enumerate(parts) for _ in part]
    return Example(tokens, [False, *trained[1:]])
