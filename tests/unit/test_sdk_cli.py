"""The command line: its verbs, its help, its exit status, and that docs and SDK name the same verbs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.errors import (
    InvalidSpec,
    LocalCloudError,
    MicrotuningError,
    Problem,
    RunFailed,
    RunNotFound,
    RunStopped,
    SubmitRefused,
)
from microtuning_core.domain.run import RunStatus
from microtuning_sdk import Run, cli
from microtuning_sdk.cli import _parser, _run
from microtuning_sdk.cli._common import exit_status

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs"

VERBS = [
    "run", "check", "runs list", "runs show", "runs logs", "runs wait", "runs cancel", "checkpoints", "cost",
    "local up", "local down", "local status", "local reset", "local env", "local tick", "local reclaim", "doctor",
]  # fmt: skip

# SDK verb -> CLI verb
SAME_VERB = {
    "fit": "run", "check": "check", "wait": "runs wait", "logs": "runs logs", "cancel": "runs cancel", "view": "runs show",
    "checkpoints": "checkpoints", "cost": "cost",
}  # fmt: skip
ONLY_IN_PYTHON = {"spec", "metrics", "training_job", "raise_if_unsuccessful"}


def verbs_of(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                below = list(verbs_of(inner, f"{prefix}{name} "))
                yield from below or [(f"{prefix}{name}", inner)]


def test_the_verbs_are_these_and_no_others() -> None:
    assert [name for name, _ in verbs_of(_parser.build_parser())] == VERBS


def test_every_verb_has_a_heading_in_the_docs_with_its_options_and_nothing_else_has_one() -> None:
    text = (DOCS / "cli.md").read_text("utf-8")
    headings = re.findall(r"^## `microtuning ([a-z ]+?)(?: [A-Z\[].*)?`$", text, re.MULTILINE)
    assert headings == VERBS
    sections = dict(zip(headings, re.split(r"^## .*$", text, flags=re.MULTILINE)[1:], strict=True))
    for name, parser in verbs_of(_parser.build_parser()):
        assert (parser.description and parser.description.endswith((".", ")"))) or '"$(' in (parser.description or "")
        options = {o for a in parser._actions for o in a.option_strings} - {"-h", "--help"}
        missing = {option for option in options if f"`{option}" not in sections[name]} - {"--stage", "--json"}
        assert not missing, f"docs/cli.md does not say what {name} {missing} does"


def test_every_option_and_argument_has_a_help_text() -> None:
    for name, parser in verbs_of(_parser.build_parser()):
        assert all(action.help for action in parser._actions), name


def test_a_verb_of_the_sdk_is_a_verb_of_the_cli_and_has_a_heading() -> None:
    methods = {name for name, value in vars(Run).items() if callable(value) and not name.startswith("_")}
    assert methods | {"fit", "check", "spec"} == set(SAME_VERB) | ONLY_IN_PYTHON
    assert set(SAME_VERB.values()) <= set(VERBS)
    headings = re.findall(r"^### `(?:run|trainer)\.(\w+)", (DOCS / "sdk.md").read_text("utf-8"), re.MULTILINE)
    assert set(headings) >= methods | {"fit", "check", "spec"}


@pytest.mark.parametrize("arguments", [[], ["runs"], ["run"], ["nonsense"], ["runs", "list", "--limit", "many"]])
def test_a_mistake_in_the_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: microtuning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunFailed("default-x-0z3k8q5m1c7t", "boom"), 1),
        (RunStopped("default-x-0z3k8q5m1c7t", "cancelled"), 3),
        (RunNotFound("default-x-0z3k8q5m1c7t"), 2),
        (InvalidSpec([Problem("name", "is missing")]), 2),
        (SubmitRefused([Problem("name", "is missing")]), 2),
        (LocalCloudError("The emulator process did not start."), 1),
    ],
)
def test_an_error_is_one_line_on_stderr_with_its_exit_status(
    error: MicrotuningError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> Any:
        raise error

    monkeypatch.setattr(_run, "connect", fails)
    assert cli.main(["check", "spec.yaml"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"microtuning: {error}\n"


def test_ctrl_c_before_anything_was_started_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(_run, "connect", interrupted)
    assert cli.main(["run", "spec.yaml"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_spec_file_that_is_not_there_is_a_mistake_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_run, "connect", lambda _: None)
    assert cli.main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("training", 0), ("failed", 1), ("stopped", 3)])
def test_the_exit_status_is_that_of_the_run(status: str, code: int) -> None:
    run: Any = SimpleNamespace(status=RunStatus(status))
    assert exit_status(run) == code
