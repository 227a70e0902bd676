"""An episode as token ids: what the model was shown, and what it said, each id as it was drawn and never tokenized again.

What stands between two turns (the end of a turn, the observation, the header of the next) is rendered by the chat template
around a stand-in for what the model said, and only what comes after the stand-in is taken. So a template that rewrites
earlier turns (that drops their <think>, say) changes nothing of the ids that are there, and the mask cannot shift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from microtuning_core.domain.datasets import Row

from ..data import encode
from ..engine import Completion
from ..failures import UserFailure
from ..texts import printable
from .protocol import Action, Turn

Messages = list[dict[str, Any]]
_STAND_IN = "7f3a said 7f3a"
_LONGEST_TOKEN = 256  # characters, and more than any has


@dataclass
class Transcript:
    """One episode so far.

    tokens: all of them, of which the first `prompt_tokens` are the prompt and the first observation.
    sampled: one flag a token: the model drew it. logprobs: one a sampled token, in order.
    messages: the prompt's (the first `prompt_messages`), then what was said and shown. is_chat: shown as messages.
    rewards: one a turn that the environment rewarded. finished: the last turn ended with a stop token, and there was room
        for the next where there should have been one.
    """

    row: Row
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    messages: Messages = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    is_chat: bool = False
    prompt_tokens: int = 0
    prompt_messages: int = 0
    turns: int = 0
    done: bool = False
    finished: bool = True
    timed_out: bool = False

    @property
    def total(self) -> float | None:
        """The sum of the environment's rewards: NaN where one is not a number, the sum is beyond what a float holds, or the
        time was over; None without any."""
        if self.timed_out or not all(math.isfinite(reward) for reward in self.rewards):
            return math.nan
        try:
            return math.fsum(self.rewards) if self.rewards else None
        except OverflowError:
            return math.nan

    @property
    def sampled_tokens(self) -> int:
        return sum(self.sampled)

    def show(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.sampled += [False] * len(ids)

    def say(self, completion: Completion, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.tokens += completion.tokens
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.finished = completion.finished
        self.turns += 1

    def count(self, turn: Turn) -> None:
        """The reward and metrics of a turn, and whether it was the last."""
        if turn.reward is not None:
            self.rewards.append(turn.reward)
        for name, value in turn.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.done = turn.done

    def end(self, *, timed_out: bool = False, truncated: bool = False) -> None:
        self.done, self.timed_out = True, self.timed_out or timed_out
        self.finished = self.finished and not truncated


class Scribe:
    """Writes transcripts: knows the tokenizer, its chat template and the tokens that end a turn."""

    def __init__(self, tokenizer: Any, stop_tokens: Sequence[int]) -> None:
        self._tokenizer, self._stop_tokens = tokenizer, frozenset(stop_tokens)
        self._vocabulary = len(tokenizer)

    def begin(self, row: Row, turn: Turn, *, room: int | None = None) -> Transcript:
        """The prompt (if the row has one) and the first observation; an episode without a token, and at its end, where
        these are so long that they are far beyond its `room` of tokens.

        Raises:
            UserFailure: there is neither, or the tokenizer cannot render them, or the row is text and the observation
                messages.
        """
        transcript = Transcript(row, tools=turn.tools, is_chat=self._is_chat(row, turn))
        if turn.tools:
            self._refuse_other_tools()
        if (ids := self._ids_of(turn)) is not None:
            first = ids
        else:
            text = self._opening(transcript, turn)
            if room is not None and _is_beyond(text, room):
                transcript.end(truncated=True)
                return transcript
            first = self._tokens(text) if transcript.is_chat else encode(self._tokenizer, printable(text))
        if not first:
            raise UserFailure(
                f"An episode begins with nothing: {row.file}, line {row.line} has no prompt, and reset gave no observation."
            )
        transcript.show(first)
        transcript.prompt_tokens, transcript.prompt_messages = len(first), len(transcript.messages)
        return transcript

    def _opening(self, transcript: Transcript, turn: Turn) -> str:
        """What the model reads before its first turn."""
        row = transcript.row
        if transcript.is_chat:
            transcript.messages = _first_messages(row, turn)
            return self._render(transcript.messages, turn.tools)
        return f"{row.values.get('prompt') or ''}{'' if turn.observation is None else _text_of(turn)}"

    def action(self, completion: Completion) -> Action:
        """What the model said, without the token that ended it."""
        ids = completion.tokens[:-1] if self._ends_with_stop(completion.tokens) else completion.tokens
        return Action(
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            raw=self._tokenizer.decode(ids, skip_special_tokens=False),
            ids=list(completion.tokens),
        )

    def observe(self, transcript: Transcript, turn: Turn, *, room: int) -> None:
        """Show the observation of a turn after which the episode goes on, or end it where that leaves no room.

        Args:
            room: how many tokens the episode may have before the model's next turn.

        Raises:
            UserFailure: the observation cannot follow what is there.
        """
        messages: Messages = []
        if (ids := self._ids_of(turn)) is not None:
            ids = _rest(transcript, ids) if turn.whole else ids
        else:
            messages = _messages_of(turn) if transcript.is_chat else []
            text = self._between(transcript, messages) if transcript.is_chat else _text_of(turn)
            ids = None if _is_beyond(text, room) else self._tokens(text)
        if ids is None or len(transcript.tokens) + len(ids) > room:
            transcript.end(truncated=True)
            return
        transcript.show(ids)
        transcript.messages += messages

    def _between(self, transcript: Transcript, messages: Messages) -> str:
        """What the template writes from the end of the model's turn to the header of its next."""
        stand_in = {"role": "assistant", "content": _STAND_IN}
        shown = transcript.messages[: transcript.prompt_messages]
        system = [each for each in shown[:1] if each["role"] == "system"]
        asked = [each for each in shown if each["role"] == "user"][-1:]
        before = [*system, *asked]
        _, found, after = self._render([*before, stand_in, *messages], transcript.tools).rpartition(_STAND_IN)
        if not found:
            raise UserFailure(
                "The chat template does not write what the assistant said, so no turn can follow another."
            )
        last = self._tokenizer.decode(transcript.tokens[-1:])
        return after.removeprefix(last) if self._ends_with_stop(transcript.tokens) else after

    def _render(self, messages: Messages, tools: list[dict[str, Any]]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserFailure(f"The model's chat template cannot render messages of {roles}: {error}") from error

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(printable(text), add_special_tokens=False)["input_ids"])

    def _ids_of(self, turn: Turn) -> list[int] | None:
        """The observation where it is token ids.

        Raises:
            UserFailure: the model has no such token.
        """
        ids = [item for item in turn.observation or [] if isinstance(item, int)]
        if unknown := [token for token in ids if not 0 <= token < self._vocabulary]:
            raise UserFailure(
                f"The observation holds the token {unknown[0]}, and the model's tokenizer has the tokens 0 to "
                f"{self._vocabulary - 1}."
            )
        return ids or None

    def _ends_with_stop(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] in self._stop_tokens

    def _is_chat(self, row: Row, turn: Turn) -> bool:
        """Rows say it by their prompt; without one, a model that has a chat template is talked to in messages."""
        if row.values.get("prompt"):
            return row.is_chat
        return isinstance(turn.observation, list) or bool(self._tokenizer.chat_template)

    def _refuse_other_tools(self) -> None:
        if "<tool_call>" not in (self._tokenizer.chat_template or ""):
            raise UserFailure(
                "The environment has tools, and the model's chat template does not write calls in <tool_call> tags, the "
                "only form that is read here. Take a model of that form (Qwen, Hermes), or an environment with `step`."
            )


def _is_beyond(text: str, room: int) -> bool:
    """Whether it has more tokens than there is room for, whatever they are: megabytes are not read to learn that."""
    return len(text) > max(1, room) * _LONGEST_TOKEN


def _first_messages(row: Row, turn: Turn) -> Messages:
    """The prompt's messages and the first observation; a text goes on where the user's last message ends, as two messages
    of one role in a row are refused by many templates."""
    prompt = [dict(message) for message in row.values.get("prompt") or []]
    if turn.observation is None:
        return prompt
    if isinstance(turn.observation, str) and prompt and prompt[-1]["role"] == "user":
        prompt[-1]["content"] += turn.observation
        return prompt
    return prompt + _messages_of(turn)


def _messages_of(turn: Turn) -> Messages:
    if isinstance(turn.observation, list):
        return [message for message in turn.observation if isinstance(message, dict)]
    return [{"role": "user", "content": _text_of(turn)}]


def _text_of(turn: Turn) -> str:
    if isinstance(turn.observation, str):
        return turn.observation
    given = "nothing" if turn.observation is None else "messages, while the rows are plain text"
    raise UserFailure(f"The observation of a turn after which the episode goes on is {given}; give a text.")


def _rest(transcript: Transcript, ids: list[int]) -> list[int]:
    """What a whole context adds to the episode so far."""
    so_far = len(transcript.tokens)
    if ids[:so_far] != transcript.tokens:
        raise UserFailure(
            f"The observation after turn {transcript.turns} does not begin with the {so_far} tokens of the episode so far: "
            "the environment rewrote earlier turns. Let its renderer keep them as they were."
        )
    return ids[so_far:]
