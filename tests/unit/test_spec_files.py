"""A spec file: what it says, on which line, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.errors import InvalidSpec
from microtuning_core.spec_files import dump_spec_text, read_spec_text

CASES = Path(__file__).parents[1] / "cases"

SPEC = """\
name: sort digits
model: {arch: Transformer}
algorithm:
  type: grpo
  learning_rate: 3e-4
compute:
  fallbacks:
    - ml.m5.large
    - ml.m5.xlarge
"""


def the_problem(text: str | bytes, file: str = "spec.yaml") -> tuple[str, str, int | None]:
    with pytest.raises(InvalidSpec) as refused:
        read_spec_text(text, file)
    (problem,) = refused.value.problems
    return problem.field, problem.message, problem.line


def test_every_field_knows_its_line() -> None:
    document, lines = read_spec_text(SPEC)
    assert document["algorithm"] == {"type": "grpo", "learning_rate": 0.0003}
    assert lines == {
        "": 1, "name": 1, "model": 2, "model.arch": 2,
        "algorithm": 3, "algorithm.type": 4, "algorithm.learning_rate": 5, "compute": 6,
        "compute.fallbacks": 7, "compute.fallbacks.0": 8, "compute.fallbacks.1": 9,
    }  # fmt: skip


def test_json_with_tabs_gives_the_same_document_and_its_own_lines() -> None:
    document, lines = read_spec_text('{\n\t"name": "x",\n\t"model": {\n\t\t"arch": "Transformer"\n\t}\n}', "spec.json")
    assert document == {"name": "x", "model": {"arch": "Transformer"}}
    assert (lines["name"], lines["model.arch"]) == (2, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("5E7", 5e7), ("no", "no"), ("on", "on"), ("007", "007"), ("1:30", "1:30"), ("0x10", "0x10"),
     ("2026-01-02", "2026-01-02"), ("true", True), ("~", None), ("", None), ("'1'", "1"), ("-1", -1), (".5", ".5"),
     ("1_000", "1_000"), (".nan", ".nan")],
)  # fmt: skip
def test_scalars_mean_what_they_mean_in_json(text: str, value: object) -> None:
    document, _ = read_spec_text(f"x: {text}")
    assert document["x"] == value
    assert type(document["x"]) is type(value)


@pytest.mark.parametrize(
    ("text", "field", "words", "line"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "b.c", "given twice, first in line 3", 4),
        ("a:\n\tb: 1\n", "spec", "a tab stands where YAML wants blanks", 2),
        ("a: [1,\nb: 2\n", "spec", "not valid YAML", 3),
        ("a: &x 1\nb: *x\n", "spec", "anchors and aliases", 1),
        ("a: !!python/object/apply:os.system [ls]\n", "spec", "tags such as", 1),
        ("a: 1\n---\nb: 2\n", "spec", "not valid YAML", 2),
        ("a: 1\n? [b]\n: 2\n", "spec", "a field's name is text", 2),
        ("a: \x07\n", "spec", "not valid YAML", 1),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, field: str, words: str, line: int) -> None:
    found_field, message, found_line = the_problem(text)
    assert (found_field, found_line) == (field, line)
    assert words in message


def test_bytes_that_are_not_utf_8_are_refused_with_their_line() -> None:
    assert the_problem(b"name: x\nmodel: \xff\n") == ("spec", "is not UTF-8", 2)


def test_a_byte_order_mark_changes_nothing() -> None:
    assert read_spec_text(b"\xef\xbb\xbfname: x\n") == read_spec_text(b"name: x\n")


def test_json_that_is_cut_off_is_refused_with_its_line() -> None:
    assert the_problem('{"a": 1,\n "b": ', "s.json")[2] == 2


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}'])
def test_json_is_as_strict_as_yaml(text: str) -> None:
    the_problem(text, "s.json")


def test_two_thousand_nested_lists_are_refused_and_break_nothing() -> None:
    assert "nested too deeply" in the_problem("a: " + "[" * 2000 + "]" * 2000)[1]


def test_a_spec_of_more_than_a_megabyte_is_refused() -> None:
    assert "1000001 bytes" in the_problem("#" + "x" * 1_000_000)[1]


def test_an_empty_file_is_no_mapping_and_no_crash() -> None:
    assert read_spec_text("") == (None, {})


def test_hyperparameters_come_back_with_the_same_values_and_types() -> None:
    hyperparameters: dict[str, Any] = json.loads((CASES / "c49_hparams.json").read_text("utf-8"))
    document, _ = read_spec_text(dump_spec_text({"hyperparameters": hyperparameters}))
    assert json.dumps(document["hyperparameters"]) == json.dumps(hyperparameters)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _json, max_size=4))
def test_whatever_is_written_reads_back_the_same(document: dict[str, Any]) -> None:
    read, _ = read_spec_text(dump_spec_text(document))
    assert json.dumps(read) == json.dumps(document)


def test_a_number_of_5000_digits_is_refused_and_not_a_crash():
    with pytest.raises(InvalidSpec, match="too many digits"):
        read_spec_text("seed: " + "1" * 5000)
