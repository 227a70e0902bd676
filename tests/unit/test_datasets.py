"""Reading data sets, and refusing the ones that cannot be trained on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.datasets import Row, check_rows, common_beginning, is_data_file, read_rows, row_shape
from microtuning_core.domain.errors import InvalidData

CASES = Path(__file__).parents[1] / "cases"
SUMS = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "3+3=", "completion": "6"},
    {"prompt": "4+4=", "completion": "8"},
]
USER, ASSISTANT = {"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "hi"}


def rows_of(*values: dict[str, Any]) -> list[Row]:
    return [Row(row, "train.jsonl", line) for line, row in enumerate(values, start=1)]


def read_case(name: str) -> list[Row]:
    return read_rows(name, (CASES / name).read_bytes())


@pytest.mark.parametrize("name", ["c01_bom.jsonl", "c01_nobom.jsonl", "c03_crlf_blank.jsonl"])
def test_a_byte_order_mark_crlf_and_blank_lines_leave_the_same_3_rows(name: str) -> None:
    assert [row.values for row in read_case(name)] == SUMS


def test_a_line_number_counts_blank_lines_as_an_editor_does() -> None:
    assert [row.line for row in read_case("c03_crlf_blank.jsonl")] == [1, 3, 5]


texts = st.text(st.characters(exclude_categories=["Cs"]))
objects = st.dictionaries(texts, st.one_of(texts, st.integers(-(2**53), 2**53), st.booleans(), st.none()), max_size=3)


@given(
    st.lists(objects, max_size=5),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["", " ", "\t"]), max_size=3),
    st.booleans(),
)
def test_rows_do_not_depend_on_mark_line_ends_blank_lines_or_gzip(
    values: list[dict[str, Any]], bom: bool, crlf: bool, blanks: list[str], final_newline: bool
) -> None:
    end = "\r\n" if crlf else "\n"
    lines = [line for value in values for line in (json.dumps(value, ensure_ascii=False), *blanks)]
    data = (b"\xef\xbb\xbf" if bom else b"") + (end.join(lines) + (end if final_newline else "")).encode()
    assert [row.values for row in read_rows("a.jsonl", data)] == values
    assert [row.values for row in read_rows("a.jsonl.gz", gzip.compress(data))] == values


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
        (b'{"prompt": "a"', "is not valid JSON"),
        (b'["a"]', "is a JSON array, not an object"),
        (b"17", "is a JSON number, not an object"),
        (b"null", "is a JSON null, not an object"),
        (b'{"reward": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b'{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_line(line: bytes, reason: str) -> None:
    with pytest.raises(InvalidData) as refusal:
        read_rows("part.jsonl", b'{"prompt": "fine"}\n\n' + line + b"\n")
    assert (refusal.value.file, refusal.value.line) == ("part.jsonl", 3)
    assert reason in str(refusal.value)


def test_a_utf_16_file_is_refused_as_not_utf_8() -> None:
    with pytest.raises(InvalidData, match=r"a\.jsonl, line 1: is not UTF-8"):
        read_rows("a.jsonl", '{"prompt": "a"}'.encode("utf-16"))


@pytest.mark.parametrize(
    "data", [b"plain text", gzip.compress(b'{"a": 1}')[:-6], b"", gzip.compress(b"x" * 99)[:12] + b"\xff" * 30]
)
def test_a_broken_gzip_file_is_refused_by_name(data: bytes) -> None:
    if data == b"":
        assert read_rows("a.jsonl.gz", data) == []
        return
    with pytest.raises(InvalidData, match=r"a\.jsonl\.gz: is not a whole gzip file"):
        read_rows("a.jsonl.gz", data)


def test_a_folder_gives_its_nested_and_gzip_parts_once_each_and_no_markers() -> None:
    folder = CASES / "c09_folder"
    keys = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    data_keys = [key for key in keys if is_data_file(key)]
    assert data_keys == ["train/a/part-000.jsonl", "train/b/part-001.jsonl.gz"]
    assert sum(len(read_rows(key, (folder / key).read_bytes())) for key in data_keys) == 3


@pytest.mark.parametrize("key", ["train/", "train", "train/_SUCCESS", "train/.DS_Store", "train/_temporary/a.jsonl",
                                 "train/.cache/a.jsonl", "train/a.json", "train/a.gz", "model.tar.gz", ""])  # fmt: skip
def test_a_key_that_is_no_data_is_not_read(key: str) -> None:
    assert not is_data_file(key)


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": "a", "answer": "b"}, "prompt"),
        ({"text": "a"}, "text"),
        ({"messages": [USER, ASSISTANT]}, "messages"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "chat_prompt_completion"),
        ({"prompt": [USER]}, "chat_prompt"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "unknown"),
        ({"prompt": "a", "completion": 4}, "unknown"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "unknown"),
        ({"messages": []}, "unknown"),
        ({"messages": [{"role": "user"}]}, "unknown"),
        ({"prompt": 4}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_the_shape_of_a_row_is_judged_by_the_row_itself(row: dict[str, Any], shape: str) -> None:
    assert row_shape(row) == shape


@pytest.mark.parametrize("name", ["c05_empty.jsonl", "c05_only_newlines.jsonl"])
@pytest.mark.parametrize("algorithm", ["sft", "grpo", "script"])
def test_a_file_without_rows_is_refused_with_0_usable_rows(name: str, algorithm: str) -> None:
    with pytest.raises(InvalidData, match="0 usable rows"):
        check_rows(read_case(name), algorithm, name)


def test_plain_and_chat_rows_together_are_refused_at_the_first_row_that_deviates() -> None:
    with pytest.raises(InvalidData, match=r"c07_mixed_shapes\.jsonl, line 2: is a chat row \(messages\)"):
        check_rows(read_case("c07_mixed_shapes.jsonl"), "sft", "c07_mixed_shapes.jsonl")


def test_two_chat_shapes_together_are_fine_with_a_template_and_refused_without() -> None:
    chat = read_case("c07_mixed_shapes.jsonl")[1:]
    check_rows(chat, "sft", "chat.jsonl")
    with pytest.raises(InvalidData, match="line 2: holds chat messages, and this model has no chat template"):
        check_rows(chat, "sft", "chat.jsonl", has_chat_template=False)


@pytest.mark.parametrize(
    ("algorithm", "row", "reason"),
    [
        ("sft", {"prompt": "a", "answer": "b"}, "sft needs `prompt` and `completion`"),
        ("sft", {"question": "a"}, r"this row has question \(string\)"),
        ("grpo", {"text": "a"}, "grpo needs a `prompt`"),
        ("grpo", {"prompt": ""}, "has an empty prompt"),
        ("grpo", {"prompt": "a", "completions": "b"}, "has the column 'completions'"),
        ("grpo", {}, "this row has no fields"),
    ],
)
def test_a_row_without_what_the_algorithm_needs_is_refused_by_line(
    algorithm: str, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidData, match=reason) as refusal:
        check_rows(rows_of({"prompt": "a", "completion": "b"}, row), algorithm, "train.jsonl")
    assert refusal.value.line == 2


def test_a_script_run_may_have_rows_of_its_own_kind() -> None:
    check_rows(rows_of({"anything": [1]}, {"text": "a"}), "script", "train.jsonl")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_is_not_finite_is_refused_by_line(number):
    with pytest.raises(InvalidData, match="line 2") as raised:
        read_rows("x.jsonl", b'{"prompt": "a"}\n{"prompt": "b", "weight": ' + number.encode() + b"}\n")
    assert raised.value.line == 2


# --- preferences and labels ------------------------------------------------------------------------------------------

PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
CHAT_PAIR = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "no"}]}


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        (PAIR, "preference"),
        (CHAT_PAIR, "chat_preference"),
        ({key: [USER, *CHAT_PAIR[key]] for key in ("chosen", "rejected")}, "chat_preference"),
        ({"prompt": "2+2=", "completion": "5", "label": False}, "labelled"),
        ({"prompt": [USER], "completion": [ASSISTANT], "label": True}, "chat_labelled"),
        ({"prompt": "2+2=", "completion": "5", "label": "no"}, "prompt_completion"),
        ({"chosen": "4", "rejected": "5"}, "unknown"),
        ({"prompt": "2+2=", "chosen": "4"}, "unknown"),
        ({"prompt": "2+2=", "chosen": "4", "rejected": 5}, "unknown"),
        ({"prompt": "2+2=", "chosen": [ASSISTANT], "rejected": [ASSISTANT]}, "unknown"),
    ],
)
def test_pairs_and_labels_have_shapes_of_their_own(row: dict[str, Any], shape: str) -> None:
    assert row_shape(row) == shape


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "reward"])
def test_preference_algorithms_take_pairs_and_name_the_row_that_is_none(algorithm: str) -> None:
    check_rows(rows_of(PAIR, PAIR), algorithm, "train.jsonl")
    with pytest.raises(InvalidData, match=f"train.jsonl, line 2.*{algorithm} needs `prompt`, `chosen` and `rejected`"):
        check_rows(rows_of(PAIR, SUMS[0]), algorithm, "train.jsonl")
    with pytest.raises(InvalidData, match="the same chosen and rejected"):
        check_rows(rows_of(PAIR | {"rejected": "4"}), algorithm, "train.jsonl")


def test_kto_takes_labels_and_pairs_and_refuses_a_completion_without_a_label() -> None:
    check_rows(rows_of(PAIR, SUMS[0] | {"label": True}), "kto", "train.jsonl")
    with pytest.raises(InvalidData, match="kto needs `prompt`, `completion` and `label`"):
        check_rows(rows_of(SUMS[0]), "kto", "train.jsonl")


@pytest.mark.parametrize("algorithm", ["grpo", "distillation"])
def test_whoever_draws_needs_a_prompt(algorithm: str) -> None:
    check_rows(rows_of(PAIR, SUMS[0]), algorithm, "train.jsonl")
    with pytest.raises(InvalidData, match="no prompt of its own"):
        check_rows(rows_of({key: CHAT_PAIR[key] for key in ("chosen", "rejected")}), algorithm, "train.jsonl")
    with pytest.raises(InvalidData, match="empty prompt"):
        check_rows(rows_of({"prompt": ""}), algorithm, "train.jsonl")


@pytest.mark.parametrize("algorithm", ["multi_turn", "custom", "script"])
def test_the_users_own_code_knows_its_own_rows(algorithm: str) -> None:
    check_rows(rows_of({"start": 3}, {"goal": [1, 2]}), algorithm, "train.jsonl")


@pytest.mark.parametrize(
    ("row", "algorithm", "says"),
    [
        (PAIR | {"chosen": ""}, "dpo", "empty chosen"),
        (PAIR | {"rejected": ""}, "reward", "empty rejected"),
        (CHAT_PAIR | {"rejected": [{"role": "assistant", "content": ""}]}, "orpo", "empty rejected"),
        ({"prompt": "2+2=", "completion": "", "label": True}, "kto", "empty completion"),
        ({"chosen": [ASSISTANT], "rejected": [USER]}, "dpo", "no common beginning"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT, USER]}, "dpo", "there is no pair"),
    ],
)
def test_an_answer_that_says_nothing_is_refused_by_line(row: dict[str, Any], algorithm: str, says: str) -> None:
    good = CHAT_PAIR if algorithm != "kto" and not isinstance(row.get("prompt"), str) else PAIR
    with pytest.raises(InvalidData, match=f"line 2.*{says}"):
        check_rows(rows_of(good, row), algorithm, "train.jsonl")


def test_the_prompt_of_a_pair_without_one_is_what_both_begin_with() -> None:
    assert common_beginning([USER, ASSISTANT], [USER, USER]) == 1
    assert common_beginning([USER], [USER, ASSISTANT]) == 1
    assert common_beginning([ASSISTANT], [USER]) == 0
