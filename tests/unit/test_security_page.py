"""docs/security.md promises nothing without a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")


def named_files(text: str) -> list[str]:
    """Every test file of a text, by its path or by its bare name."""
    return re.findall(r"[\w/]*test_\w+\.py", text)


def test_every_file_that_the_page_names_is_there() -> None:
    named = {*named_files(PAGE), *re.findall(r"(?:tests|infrastructure)/[\w/]+\.(?:py|txt)", PAGE)}
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).is_file() or list((ROOT / "tests").rglob(name)), name


@pytest.mark.parametrize("command", re.findall(r"`pytest ([^`]+)`", PAGE))
def test_every_command_of_the_control_table_finds_tests(command: str) -> None:
    files, _, word = command.partition(" -k ")
    names = [name for file in files.split() for name in re.findall(r"def (test_\w+)", (ROOT / file).read_text("utf-8"))]
    assert [name for name in names if word in name]


def test_every_threat_names_what_shows_that_it_is_met() -> None:
    section = PAGE.split("## Threats")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert [row for row in rows if not named_files(row.rsplit("|", 2)[1])] == []


def test_every_control_has_its_evidence_and_a_box() -> None:
    rows = [row.split("|") for row in PAGE.split("## Control table")[1].splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 10
    assert all(len(row) == 5 and row[2].strip() and row[3].strip() == "☐" for row in rows)
