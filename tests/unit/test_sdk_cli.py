"""The command line: its verbs, its help, its exit status, and that docs and SDK name the same verbs."""

from __future__ import annotations

import argparse
import ast
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.errors import (
    InvalidCode,
    InvalidData,
    InvalidName,
    InvalidSpec,
    LaunchRefused,
    LocalCloudError,
    LocalRequestRefused,
    MicrotuningError,
    Problem,
    RunFailed,
    RunNotFound,
    RunStopped,
    StageUnreachable,
    SubmitRefused,
    a,
)
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.run import FINAL, RunStatus
from microtuning_local import home
from microtuning_sdk import Run, Stage, _interrupts, cli
from microtuning_sdk.cli import _parser, _run, _runs
from microtuning_sdk.cli._common import exit_status

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs"
RUN_ID = "default-x-0z3k8q5m1c7t"
SDK = Path(__file__).parents[2] / "sdk"

VERBS = [
    "run", "check", "runs list", "runs show", "runs logs", "runs wait", "runs cancel",
    "runs rollback", "runs fork", "runs pin", "runs budget", "runs rollouts",
    "checkpoints", "cost", "prices list", "prices refresh", "tenants list", "tenants show", "tenants limit",
    "local up", "local down", "local status", "local reset", "local env", "local tick", "local reclaim", "doctor",
]  # fmt: skip

# SDK verb -> CLI verb
SAME_VERB = {
    "fit": "run", "check": "check", "estimate": "check", "wait": "runs wait", "logs": "runs logs",
    "cancel": "runs cancel", "view": "runs show",
    "checkpoints": "checkpoints", "cost": "cost", "rollback": "runs rollback", "fork": "runs fork", "pin": "runs pin",
    "rollouts": "runs rollouts", "raise_budget": "runs budget",
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
    assert methods | {"fit", "check", "estimate", "spec"} == set(SAME_VERB) | ONLY_IN_PYTHON
    assert set(SAME_VERB.values()) <= set(VERBS)
    headings = re.findall(r"^### `(?:run|trainer)\.(\w+)", (DOCS / "sdk.md").read_text("utf-8"), re.MULTILINE)
    assert set(headings) >= methods | {"fit", "check", "estimate", "spec"}


@pytest.mark.parametrize(
    "arguments",
    [[], ["runs"], ["run"], ["nonsense"],
     *(["runs", "list", "--limit", n] for n in ("many", "-1", "0", "1.5", "", "9" * 5000, "²")),
     *(["cost", "--month", month] for month in ("2026-13", "2026-00", "foo", "2026-1", "", "2026-01-01", "２０２６-01")),
     *(["runs", "wait", "x", "--timeout", s] for s in ("-1", "nan", "inf", "soon"))],
)  # fmt: skip
def test_a_mistake_in_the_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: microtuning" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["cost"], ["runs", "list"]])
@pytest.mark.parametrize("tenant", ["X/..", "../x", "", "a" * 17, "UPPER", "a#b"])
def test_a_tenant_that_cannot_be_is_refused_before_anything_is_asked(
    verb: list[str], tenant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*verb, "--tenant", tenant]) == 2
    assert capsys.readouterr().err == (
        f"microtuning: {tenant!r} is not a valid tenant. "
        "A tenant is 2 to 16 lower-case letters or digits, a letter first.\n"
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RunFailed(RUN_ID, "boom"), 1),
        (RunStopped(RUN_ID, "cancelled"), 3),
        (RunNotFound(RUN_ID), 2),
        (InvalidSpec([Problem("name", "is missing")]), 2),
        (SubmitRefused([Problem("name", "is missing")]), 2),
        (LocalCloudError("The emulator process did not start."), 1),
        (LocalRequestRefused("There is no such job."), 2),
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


@pytest.mark.parametrize("debug", ["", "1"])
def test_an_error_that_nobody_foresaw_is_one_sentence_and_its_traceback_is_for_who_asks(
    debug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> Any:
        raise ZeroDivisionError("by\nzero.")

    monkeypatch.setenv("MICROTUNING_DEBUG", debug)
    monkeypatch.setattr(_run, "connect", fails)
    assert cli.main(["check", "spec.yaml"]) == 1
    printed = capsys.readouterr().err
    assert printed.endswith(
        "microtuning: ZeroDivisionError: by zero. "
        "This is a bug; run again with MICROTUNING_DEBUG=1 for the traceback.\n"
    )
    assert ("Traceback" in printed, printed.count("\n") > 1) == (bool(debug), bool(debug))


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_presses_in_a_hurry_count_once_and_a_later_one_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(_interrupts, "time", SimpleNamespace(monotonic=lambda: now))
    with _interrupts.one_interrupt():
        for begin in (100.0, 103.0):
            now = begin
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            now = begin + 1.9
            signal.raise_signal(signal.SIGINT)
            with _interrupts.one_interrupt():  # the outer one still answers
                signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


PROGRAM = """
import atexit, os, signal, sys, time
def press(*_): os.kill(os.getpid(), signal.SIGINT)
"""


def ended(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=60)


def test_ctrl_c_pressed_twice_and_again_while_the_program_ends_is_still_no_error() -> None:
    done = ended("""
from microtuning_sdk import cli
from microtuning_sdk.cli import _runs
class Run:
    def __init__(self, *_): pass
    def logs(self, follow):
        yield "a line"
        try:
            press()
            time.sleep(9)
        finally:
            press()
atexit.register(press)
_runs.Run = Run
sys.argv[1:] = ["runs", "logs", "x", "--follow"]
sys.exit(cli.main())
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a line\n", "")


@pytest.mark.parametrize("module", ["boto3", "pydantic", "rich.console", "microtuning_sdk.cli._parser"])
def test_ctrl_c_while_modules_load_ends_with_130_and_no_traceback(module: str) -> None:
    done = ended(f"""
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            press()
sys.meta_path.insert(0, Finder())
from microtuning_sdk.cli import main
sys.argv[1:] = ["runs", "list"]
sys.exit(main())
""")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_program_loads_next_to_nothing_before_it_can_answer_ctrl_c() -> None:
    done = ended("before = set(sys.modules); import microtuning_sdk.cli; print(*set(sys.modules) - before)")
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded <= {"microtuning_sdk"} | sys.stdlib_module_names
    assert len(done.stdout.split()) < 12


# --- errors in words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", ".", "..", " .", ". ", "…", "!", "?"])
@pytest.mark.parametrize(
    "make",
    [
        lambda text: InvalidSpec([Problem("name", text), Problem("tenant", text, 3)]),
        lambda text: SubmitRefused([Problem("name", text)]),
        lambda text: InvalidData("x.jsonl", text, next_step=text),
        lambda text: InvalidCode("reward", text, next_step=text),
        lambda text: InvalidName("tenant", "X", text),
        lambda text: RunFailed(RUN_ID, text),
        lambda text: RunStopped(RUN_ID, text),
        lambda text: StageUnreachable("dev", text),
        lambda text: LaunchRefused("capacity", text),
        lambda text: LocalCloudError(text, next_step=text),
        lambda text: MicrotuningError(text, next_step=text),
        lambda text: MicrotuningError(text),
    ],
)
def test_sentences_end_once_and_are_one_blank_apart(make: Any, end: str) -> None:
    text = str(make(f"it says so{end}"))
    assert not re.search(r"\.\.|[!?…]\.|  | \.|[.!?…][A-Z]", text)
    assert text.endswith((".", "!", "?", "…"))


@pytest.mark.parametrize(
    ("noun", "named"),
    [("int", "an int"), ("float", "a float"), ("S3 URI", "an S3 URI"), ("object key", "an object key")],
)
def test_a_noun_has_its_article(noun: str, named: str) -> None:
    assert a(noun) == named


def test_every_error_of_the_local_cloud_has_a_next_step_and_none_proposes_to_forget_everything() -> None:
    for path in SDK.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "LocalCloudError",
                "LocalRequestRefused",
            ):
                given = {keyword.arg for keyword in node.keywords}
                assert given & {"next_step", "log_path"}, f"{path}:{node.lineno}"
                assert "local reset" not in ast.unparse(node), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    "verb", ["env", "tick", "reclaim local-default-x-0z3k8q5m1c7t-a001", "reclaim default-x-0z3k8q5m1c7t"]
)
@pytest.mark.parametrize("was_up", [False, True])
def test_a_local_cloud_that_is_not_up_is_named_as_such_with_the_next_step(
    verb: str, was_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MICROTUNING_HOME", str(tmp_path))
    if was_up:
        home.local_home().prepare()
        url = "http://127.0.0.1:9"
        home.write_endpoint(home.local_home(), home.Endpoint(endpoint_url=url, sagemaker_url=url, token="t"))
    status = cli.main(["local", *verb.split()])
    printed = capsys.readouterr()
    if was_up and verb == "env":
        assert (status, "AWS_ENDPOINT_URL=http://127.0.0.1:9" in printed.out) == (0, True)
        return
    what = "is not running" if was_up else "was never started here"
    assert (status, printed.err) == (1, f"microtuning: The local cloud {what}. Run `microtuning local up` first.\n")


def test_what_is_neither_a_job_nor_a_run_is_a_mistake_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MICROTUNING_HOME", str(tmp_path))
    assert cli.main(["local", "reclaim", "nonsense"]) == 2
    assert "is not a valid run id" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- what verbs say --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said"), [("training", "asked to stop"), ("completed", "is completed already; nothing was asked"),
                         ("failed", "is failed already"), ("stopped", "is stopped already")]
)  # fmt: skip
def test_only_a_run_that_is_not_over_is_asked_to_stop(
    status: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    record = SimpleNamespace(status=RunStatus(status), is_final=RunStatus(status) in FINAL)
    stage = Stage(StackNames("local", "000000000000", "us-east-1"), SimpleNamespace())  # type: ignore[arg-type]
    vars(stage)["runs"] = SimpleNamespace(get=lambda _: record)
    vars(stage)["objects"] = SimpleNamespace(put=lambda key, _: asked.append(key))
    monkeypatch.setattr(_runs, "Run", lambda run_id, _: Run(run_id, stage))
    assert cli.main(["runs", "cancel", RUN_ID]) == 0
    assert said in capsys.readouterr().err
    assert len(asked) == (status == "training")


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
