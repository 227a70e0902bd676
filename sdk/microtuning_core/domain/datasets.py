"""Reading and judging data sets: the same rules in the SDK before a submit, in the handlers, and in the container.

A data set is one JSON Lines file or a prefix that holds some, plain or gzip. One row is one JSON object on one line, in
one of these shapes, judged row by row and never by the first row alone:

    {"prompt": "2+2=", "completion": "4"}                                  prompt_completion
    {"text": "Once upon a time"}                                           text
    {"prompt": "2+2=", "answer": "4"}                                      prompt (other columns go to the reward)
    {"messages": [{"role": "user", "content": "Hi"}, …]}                   messages
    {"prompt": [{"role": "user", …}], "completion": [{"role": …}]}         chat_prompt_completion
    {"prompt": [{"role": "user", …}]}                                      chat_prompt
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}                     preference
    {"prompt": […], "chosen": […], "rejected": […]}                        chat_preference; where no prompt is given, it is
                                                                           the beginning that both have in common
    {"prompt": "2+2=", "completion": "5", "label": false}                  labelled
    {"prompt": […], "completion": […], "label": true}                      chat_labelled

To add a shape: give it a name in `RowShape`, a line in `row_shape`, and a place in `_USABLE`; then render it in
training_container/data/.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import InvalidData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RowShape = Literal[
    "prompt_completion", "text", "prompt", "messages", "chat_prompt_completion", "chat_prompt",
    "preference", "chat_preference", "labelled", "chat_labelled", "unknown",
]  # fmt: skip

CHAT_SHAPES: frozenset[RowShape] = frozenset(
    {"messages", "chat_prompt_completion", "chat_prompt", "chat_preference", "chat_labelled"}
)
DATA_SUFFIXES = (".jsonl", ".jsonl.gz")

_PREFERENCES: frozenset[RowShape] = frozenset({"preference", "chat_preference"})
_LABELLED: frozenset[RowShape] = frozenset({"labelled", "chat_labelled"})
_COMPLETED: frozenset[RowShape] = _LABELLED | {"prompt_completion", "chat_prompt_completion"}
_PROMPTS: frozenset[RowShape] = _COMPLETED | _PREFERENCES | {"prompt", "chat_prompt"}
_ANY: frozenset[RowShape] = frozenset(get_args(RowShape))

_USABLE: dict[str, frozenset[RowShape]] = {
    "sft": _COMPLETED | {"text", "messages"},
    "dpo": _PREFERENCES,
    "kto": _LABELLED | _PREFERENCES,  # a pair is one good and one bad completion
    "orpo": _PREFERENCES,
    "reward": _PREFERENCES,
    "grpo": _PROMPTS,
    "distillation": _PROMPTS,
    "multi_turn": _ANY,  # a prompt, or whatever reset(**row) makes its first observation of
    "custom": _ANY,
    "script": _ANY,
}
_PAIR = "`prompt`, `chosen` and `rejected` (text, or lists of messages)"
_NEEDS = {
    "sft": "sft needs `prompt` and `completion`, or `messages`, or `text`",
    "dpo": f"dpo needs {_PAIR}",
    "kto": f"kto needs `prompt`, `completion` and `label` (true or false), or {_PAIR}",
    "orpo": f"orpo needs {_PAIR}",
    "reward": f"reward needs {_PAIR}",
    "grpo": "grpo needs a `prompt` (text or a list of messages)",
    "distillation": "distillation needs a `prompt` (text or a list of messages)",
}
# Names under which the reward function receives what the trainer itself provides.
_RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids"})
_PIECE_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One row and where it stands: `line` counts from 1 and includes blank lines, as an editor does."""

    values: dict[str, Any]
    file: str
    line: int

    @property
    def shape(self) -> RowShape:
        return row_shape(self.values)

    @property
    def is_chat(self) -> bool:
        return self.shape in CHAT_SHAPES


# --- files -----------------------------------------------------------------------------------------------------------


def is_data_file(key: str) -> bool:
    """Whether an S3 key or relative path is part of a data set: no folder marker, nothing hidden, no `_SUCCESS`."""
    parts = key.split("/")
    return not any(part.startswith((".", "_")) for part in parts) and parts[-1].endswith(DATA_SUFFIXES)


def read_rows(name: str, data: bytes) -> list[Row]:
    """The rows of one file; a byte-order mark, CRLF, blank lines and a missing final newline change nothing.

    Raises:
        InvalidData: broken gzip, text that is not UTF-8, a line that is not a JSON object, a key given twice; with the
            file and, where one is to blame, the line.
    """
    return list(_rows(name, _plain(name, data).removeprefix(_BOM)))


def _rows(name: str, text: bytes) -> Iterator[Row]:
    for line, raw in enumerate(text.split(b"\n"), start=1):
        if stripped := raw.strip():
            yield Row(_parse(name, line, stripped), name, line)


def _plain(name: str, data: bytes) -> bytes:
    if not name.endswith(".gz"):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidData(name, f"is not a whole gzip file ({error})", next_step="Compress it again.") from error


def unpacked_bytes(name: str, data: bytes, most: int) -> int:
    """The size of a file once it is unpacked, counted up to a little over `most`: a kilobyte of gzip may be a gigabyte."""
    if not name.endswith(".gz"):
        return len(data)
    count = 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while count <= most and (piece := file.read(_PIECE_BYTES)):
                count += len(piece)
    except (OSError, EOFError, zlib.error):
        return count  # what is broken about it is told by whoever reads its rows
    return count


def _parse(name: str, line: int, raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_once_each, parse_constant=_no_such_number, parse_float=_finite
        )
        json.dumps(row, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair would break later
    except UnicodeDecodeError as error:
        raise InvalidData(name, "is not UTF-8", line=line, next_step="Save the file as UTF-8.") from error
    except UnicodeEncodeError as error:
        raise InvalidData(name, "holds half of a surrogate pair (\\ud8… alone)", line=line) from error
    except RecursionError as error:
        raise InvalidData(name, "is nested too deeply", line=line) from error
    except ValueError as error:
        raise InvalidData(name, f"is not valid JSON ({error})", line=line) from error
    if not isinstance(row, dict):
        raise InvalidData(name, f"is a JSON {_kind(row)}, not an object", line=line)
    return row


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in names if names.count(key) > 1)!r} is given twice")
    return row


def _no_such_number(literal: str) -> float:
    raise ValueError(f"{literal} is not a JSON number")


def _finite(literal: str) -> float:
    number = float(literal)
    return number if math.isfinite(number) else _no_such_number(literal)


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]


# --- shapes ----------------------------------------------------------------------------------------------------------


def row_shape(row: dict[str, Any]) -> RowShape:
    """What kind of example a row is; "unknown" when it is none that can be trained on."""
    prompt = row.get("prompt")
    if "messages" in row:
        return "messages" if _is_chat(row["messages"]) else "unknown"
    if "chosen" in row or "rejected" in row:
        return _pair_shape(prompt, row.get("chosen"), row.get("rejected"))
    if isinstance(prompt, str):
        return _answered_shape(row, ("prompt", "prompt_completion", "labelled"), _is_text)
    if _is_chat(prompt):
        return _answered_shape(row, ("chat_prompt", "chat_prompt_completion", "chat_labelled"), _is_chat)
    return "text" if prompt is None and isinstance(row.get("text"), str) else "unknown"


def _answered_shape(
    row: dict[str, Any], shapes: tuple[RowShape, RowShape, RowShape], is_answer: Callable[[object], bool]
) -> RowShape:
    """A prompt alone, one with its completion, or one whose completion is marked good or bad."""
    alone, answered, labelled = shapes
    completion = row.get("completion")
    if completion is None:
        return alone
    if not is_answer(completion):
        return "unknown"
    return labelled if isinstance(row.get("label"), bool) else answered


def _pair_shape(prompt: object, chosen: object, rejected: object) -> RowShape:
    if _is_text(prompt) and _is_text(chosen) and _is_text(rejected):
        return "preference"
    is_chat = (prompt is None or _is_chat(prompt)) and _is_chat(chosen) and _is_chat(rejected)
    return "chat_preference" if is_chat else "unknown"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(message) for message in value)


def _is_message(value: object) -> bool:
    """Role and content; who only calls tools says nothing beside (OpenAI's form)."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str) or (value.get("content") is None and bool(value.get("tool_calls")))


def check_rows(rows: Sequence[Row], algorithm_type: str, file: str, *, has_chat_template: bool = True) -> None:
    """Refuse rows that the algorithm cannot use; `file` names the data set where no single row is to blame.

    `has_chat_template` is False for a model that cannot render messages (every `model.arch` preset).

    Raises:
        InvalidData: no usable rows, a row without the fields it needs, or chat and plain rows together.
    """
    if not rows:
        raise InvalidData(file, "holds 0 usable rows", next_step="Add at least one row and submit again.")
    if algorithm_type in ("custom", "script"):
        return  # the user's own loop or script knows its own rows
    for row in rows:
        _check_row(row, algorithm_type, has_chat_template)
    _check_one_kind(rows)


def _check_row(row: Row, algorithm_type: str, has_chat_template: bool) -> None:
    def refuse(reason: str, next_step: str = "") -> InvalidData:
        return InvalidData(row.file, reason, line=row.line, next_step=next_step)

    if row.shape not in _USABLE[algorithm_type]:
        raise refuse(f"{_NEEDS[algorithm_type]}, and this row has {_listed(row.values)}")
    if row.is_chat and not has_chat_template:
        raise refuse("holds chat messages, and this model has no chat template", "Give prompt and completion as text.")
    if algorithm_type == "grpo" and (clash := _RESERVED_COLUMNS & row.values.keys()):
        raise refuse(f"has the column {min(clash)!r}, a name the reward function's own arguments have")
    if algorithm_type in ("grpo", "distillation"):
        if row.shape in _PREFERENCES and not row.values.get("prompt"):
            raise refuse("has no prompt of its own, and nothing can be asked without one")
        if not row.values["prompt"]:
            raise refuse("has an empty prompt")
    if algorithm_type in ("dpo", "kto", "orpo", "reward") and (fault := _fault_of_answers(row)):
        raise refuse(fault)


def _fault_of_answers(row: Row) -> str | None:
    """What a pair or a marked completion lacks."""
    values = row.values
    names = ("chosen", "rejected") if row.shape in _PREFERENCES else ("completion",)
    if empty := next((name for name in names if _says_nothing(values[name])), None):
        return f"has an empty {empty}"
    if row.shape not in _PREFERENCES:
        return None
    chosen, rejected = values["chosen"], values["rejected"]
    if chosen == rejected:
        return "has the same chosen and rejected, so it prefers nothing"
    if values.get("prompt") is None:
        shared = common_beginning(chosen, rejected)
        if not shared:
            return (
                "has no prompt, and chosen and rejected begin with different messages, so there is no common beginning"
            )
        if shared == min(len(chosen), len(rejected)):
            return "has a chosen that only goes on where rejected ends (or the other way round), so there is no pair"
    return None


def _says_nothing(answer: Any) -> bool:
    """An empty text, or messages of which the last is empty (one that calls tools says something)."""
    return not answer if isinstance(answer, str) else not answer[-1]["content"] and "tool_calls" not in answer[-1]


def common_beginning(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many messages both begin with: the prompt of a pair that has none of its own."""
    pairs = zip(chosen, rejected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))


def _check_one_kind(rows: Sequence[Row]) -> None:
    first = rows[0]
    deviating = next((row for row in rows if row.is_chat != first.is_chat), None)
    if deviating is not None:
        raise InvalidData(
            deviating.file,
            f"is {_called(deviating)}, while {first.file}, line {first.line} is {_called(first)}",
            line=deviating.line,
            next_step="Write all rows as text, or all as messages.",
        )


def _called(row: Row) -> str:
    return f"a chat row ({row.shape})" if row.is_chat else f"a plain text row ({row.shape})"


def _listed(values: dict[str, Any]) -> str:
    return (
        ", ".join(
            f"{key} ({_kind(value) if not isinstance(value, dict) else 'object'})" for key, value in values.items()
        )
        or "no fields"
    )
