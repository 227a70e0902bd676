"""Rows as tokens: order, labels, truncation, chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.datasets import Row, read_rows
from microtuning_core.domain.errors import InvalidData
from training_container.data import Cursor, epoch_order, read_channel, render_prompts, render_row, render_supervised
from training_container.engine.presets import character_tokenizer

CASES = Path(__file__).parents[1] / "cases"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<assistant>{% generation %}{{ message['content'] }}\n{% endgeneration %}"
    "{% else %}<{{ message['role'] }}>{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def a_tokenizer(template: str | None = None) -> Any:
    tokenizer = character_tokenizer([chr(code) for code in range(10, 127)])
    tokenizer.chat_template = template
    return tokenizer


def learned(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """(whole text, learned text) of one row, <eos> written out."""
    example = render_row(Row(row, "a.jsonl", 1), tokenizer)
    trained = [token for token, flag in zip(example.tokens, example.trained, strict=True) if flag]
    return tokenizer.decode(example.tokens), tokenizer.decode(trained)


# --- order -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
def test_every_epoch_takes_each_row_once_and_the_number_of_steps_is_known_ahead(
    rows: int, batch: int, epochs: int, seed: int
) -> None:
    cursor, taken, steps = Cursor(), [], Cursor().steps_left(rows, batch, epochs)
    for step in range(steps):
        assert cursor.steps_left(rows, batch, epochs) == steps - step
        indices, cursor = cursor.take(rows, batch, seed)
        taken += indices
    assert cursor == Cursor(epochs, 0)
    assert all(sorted(taken[epoch * rows : (epoch + 1) * rows]) == list(range(rows)) for epoch in range(epochs))
    assert len(taken) == rows * epochs


def test_the_order_differs_by_epoch_and_by_seed_and_is_the_same_every_time() -> None:
    assert epoch_order(0, 0, 50) == epoch_order(0, 0, 50)
    assert len({tuple(epoch_order(seed, epoch, 50)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_the_end_of_an_epoch_is_written_as_the_start_of_the_next() -> None:
    assert Cursor(0, 4).take(8, 4, 0)[1] == Cursor(1, 0)


# --- labels ----------------------------------------------------------------------------------------------------------


def test_only_the_completion_and_the_end_are_learned() -> None:
    assert learned({"prompt": "2+2=", "completion": "4"}, a_tokenizer()) == ("2+2=4<eos>", "4<eos>")


def test_all_of_a_text_but_its_first_token_is_learned() -> None:
    assert learned({"text": "abc"}, a_tokenizer()) == ("abc<eos>", "bc<eos>")


def test_each_row_of_a_mixed_file_is_rendered_by_its_own_shape() -> None:
    rows = read_rows("c07.jsonl", (CASES / "c07_mixed_shapes.jsonl").read_bytes())
    tokenizer = a_tokenizer(TEMPLATE)
    assert [learned(row.values, tokenizer) for row in rows] == [
        ("Say hi.hi<eos>", "hi<eos>"),
        ("<user>Say hi.\n<assistant>hi\n", "hi\n"),
        ("<user>Say hi.\n<assistant>hi\n", "hi\n"),
    ]


def test_a_mixed_file_is_refused_by_a_run_naming_the_first_row_that_deviates(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes((CASES / "c07_mixed_shapes.jsonl").read_bytes())
    with pytest.raises(InvalidData, match=r"train\.jsonl, line 2: is a chat row"):
        read_channel(tmp_path, "sft", has_chat_template=True)


TURNS = [
    {"role": role, "content": text}
    for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
]


def test_every_assistant_turn_is_learned_whether_the_template_marks_them_or_not() -> None:
    whole = "<user>1\n<assistant>2\n<user>3\n<assistant>4\n"
    assert learned({"messages": TURNS}, a_tokenizer(MARKED_TEMPLATE)) == (whole, "2\n4\n")
    assert learned({"messages": TURNS}, a_tokenizer(TEMPLATE)) == (whole, "2\n4\n")


def test_what_the_user_says_last_is_read_and_not_learned() -> None:
    assert learned({"messages": TURNS[:3]}, a_tokenizer(TEMPLATE)) == ("<user>1\n<assistant>2\n<user>3\n", "2\n")


def test_of_a_chat_completion_the_assistants_messages_alone_are_learned() -> None:
    row = {"prompt": TURNS[:1], "completion": TURNS[1:]}
    assert learned(row, a_tokenizer(TEMPLATE)) == ("<user>1\n<assistant>2\n<user>3\n<assistant>4\n", "2\n4\n")
    row = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert learned(row, a_tokenizer(TEMPLATE))[1] == "4\n", "the prompt's own answers are given"


def test_a_template_that_rewrites_earlier_turns_is_refused_by_line() -> None:
    rewrites = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(InvalidData, match=r"a\.jsonl, line 1: the chat template renders earlier messages differently"):
        learned({"messages": TURNS}, a_tokenizer(rewrites))


def test_messages_without_an_answer_are_refused_by_line() -> None:
    with pytest.raises(InvalidData, match="line 1: has no message of the assistant's"):
        learned({"messages": TURNS[:1]}, a_tokenizer(TEMPLATE))


def test_a_row_cut_to_nothing_to_learn_is_dropped_and_a_run_of_such_rows_is_refused() -> None:
    rows = read_rows("c30.jsonl", (CASES / "c30_truncated.jsonl").read_bytes())
    rendered = render_supervised(rows, a_tokenizer(), 64)
    assert (len(rendered.examples), rendered.dropped) == (1, 1)
    with pytest.raises(InvalidData, match="0 usable rows: cut to max_length 64"):
        render_supervised(rows[:1], a_tokenizer(), 64)


def test_prompts_without_room_for_a_completion_are_dropped_and_refused_when_none_is_left() -> None:
    rows = [Row({"prompt": "p" * size}, "a.jsonl", size) for size in (3, 9)]
    prompts, dropped = render_prompts(rows, a_tokenizer(), 8)
    assert ([len(prompt.tokens) for prompt in prompts], dropped) == ([3], 1)
    with pytest.raises(InvalidData, match="0 usable rows: every prompt is longer than the 2 tokens"):
        render_prompts(rows, a_tokenizer(), 2)


def test_a_folder_is_read_with_its_nested_and_gzip_parts_in_the_order_of_their_names(tmp_path: Path) -> None:
    rows = read_channel(CASES / "c09_folder" / "train", "script", has_chat_template=True)
    assert [row.file for row in rows] == ["a/part-000.jsonl", "a/part-000.jsonl", "b/part-001.jsonl.gz"]


@pytest.mark.parametrize("name", ["c05_empty.jsonl", "c05_only_newlines.jsonl"])
def test_an_empty_channel_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes((CASES / name).read_bytes())
    with pytest.raises(InvalidData, match="0 usable rows"):
        read_channel(tmp_path, "sft", has_chat_template=True)
