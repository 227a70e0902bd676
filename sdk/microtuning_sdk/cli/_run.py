"""`microtuning run SPEC` and `microtuning check SPEC`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import InvalidSpec, Problem
from microtuning_core.spec_files import read_spec_text
from microtuning_sdk._connection import Stage, connect
from microtuning_sdk._display import detached
from microtuning_sdk._draft import Draft, draft
from microtuning_sdk._estimates import as_the_stage_knows, estimate_view, estimates
from microtuning_sdk._preflight import preflight, shown
from microtuning_sdk._run import Run
from microtuning_sdk._submit import submit
from microtuning_sdk.cli._common import add_json, add_stage, add_verb, exit_status, print_json

if TYPE_CHECKING:
    import argparse


def add_parsers(verbs: Any) -> None:
    run = add_verb(verbs, "run", run_spec, "Submit a spec file and follow its run to the end.")
    run.add_argument("--no-wait", action="store_true", help="print the run's id and return at once")
    check = add_verb(verbs, "check", check_spec, "Check a spec file, its data and its code; nothing is uploaded.")
    add_json(check)
    run.add_argument("--no-preflight", action="store_true", help="do not try data and code before the upload")
    for parser in (run, check):
        parser.add_argument("spec", metavar="SPEC", type=Path, help="a spec, YAML or JSON (docs/sdk.md)")
        add_stage(parser)


def run_spec(arguments: argparse.Namespace) -> int:
    stage = connect(arguments.stage)
    ready = read_draft(stage, arguments.spec)
    if not arguments.no_preflight:
        found = preflight(*as_the_stage_knows(stage, ready))
        for line in shown(found):
            _say(line)
        found.raise_if_broken()
    started = submit(stage, ready, _say)
    print(started.run_id, flush=True)
    if started.interrupted:
        _say(detached(started.run_id))
        return 0
    if arguments.no_wait:
        _say(f"follow it with: microtuning runs wait {started.run_id}")
        return 0
    return exit_status(Run(started.run_id, stage).wait(logs=True))


def check_spec(arguments: argparse.Namespace) -> int:
    stage = connect(arguments.stage)
    ready, past, silence = as_the_stage_knows(stage, read_draft(stage, arguments.spec))
    found, uploads = preflight(ready, past, silence), [each.key for each in ready.parcels]
    if arguments.json:
        print_json(
            {
                "name": ready.spec.name,
                "tenant": ready.spec.tenant,
                "uploads": uploads,
                "findings": found.as_json(),
                "estimates": [estimate_view(each) for each in estimates(ready, past)],
            }
        )
    else:
        print(f"{arguments.spec} is valid: {ready.spec.name!r} for tenant {ready.spec.tenant!r}")
        print(f"would upload {', '.join(uploads) or 'nothing'}")
        for line in shown(found):
            print(line)
    found.raise_if_broken()
    return 0


def read_draft(stage: Stage, file: Path) -> Draft:
    """The draft of a spec file; local paths in it start from its own folder."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InvalidSpec([Problem(str(file), f"cannot be read ({error.strerror})")]) from error
    document, lines = read_spec_text(text, file.name)
    if not isinstance(document, dict):
        raise InvalidSpec([Problem("spec", "a spec is a mapping of fields to values", lines.get(""))])
    return draft(stage, document, folder=file.absolute().parent, lines=lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
