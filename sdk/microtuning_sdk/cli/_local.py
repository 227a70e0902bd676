"""`microtuning local up | down | status | reset | env | tick | reclaim`: the local cloud."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import InvalidName
from microtuning_core.domain.names import parse_job_name, parse_run_id
from microtuning_sdk._connection import LOCAL
from microtuning_sdk._run import Run
from microtuning_sdk.cli._common import add_json, add_verb, print_json

if TYPE_CHECKING:
    import argparse
    from types import ModuleType


def add_parsers(verbs: Any) -> None:
    text = "Start, stop and poke the local cloud."
    inner = verbs.add_parser("local", help=text, description=text).add_subparsers(
        title="verbs", metavar="VERB", required=True
    )
    add_verb(inner, "up", up, "Start the local cloud and deploy Microtuning to it.")
    add_verb(inner, "down", down, "Stop the local cloud; everything is kept for the next start.")
    add_json(add_verb(inner, "status", status, "Say what runs, and where."))
    add_verb(inner, "reset", reset, "Stop the local cloud and forget everything in it.")
    add_verb(inner, "env", env, 'Print variables for the aws CLI and boto3: eval "$(microtuning local env)".')
    add_verb(inner, "tick", tick, "Run the reconciler now instead of at its next minute.")
    reclaim_parser = add_verb(inner, "reclaim", reclaim, "Take a spot job's machine away, as AWS may at any moment.")
    reclaim_parser.add_argument("job", metavar="JOB", help="a training job's name, or the id of a run")


def up(_: argparse.Namespace) -> None:
    endpoint = _cloud().up().endpoint
    print(f"the local cloud is up at {endpoint.endpoint_url}")
    print('point other tools at it: eval "$(microtuning local env)"', file=sys.stderr)


def down(_: argparse.Namespace) -> None:
    _cloud().down()
    print("the local cloud is down")


def status(arguments: argparse.Namespace) -> int:
    found = _cloud().status()
    url = found.endpoint.endpoint_url if found.endpoint else None
    view = {"running": found.running, "endpoint_url": url, "stack": found.stack, "jobs_running": found.jobs_running}
    view["home"] = str(found.home)
    if arguments.json:
        print_json(view)
    elif found.running:
        print(
            f"running at {url}, stack {found.stack or 'not deployed'}, {found.jobs_running} jobs, state in {found.home}"
        )
    else:
        print(f"not running; state in {found.home}. Start it: microtuning local up")
    return 0


def reset(_: argparse.Namespace) -> None:
    _cloud().reset()
    print("the local cloud is gone, with everything that was in it")


def env(_: argparse.Namespace) -> None:
    for name, value in _cloud().environment().items():
        print(f"export {name}={shlex.quote(value)}")


def tick(_: argparse.Namespace) -> None:
    print_json(_cloud().tick())


def reclaim(arguments: argparse.Namespace) -> None:
    job_name = _job_of(arguments.job)
    _cloud().reclaim(job_name)
    print(f"took the machine of {job_name} away")


def _job_of(name: str) -> str:
    """The job itself, or the newest one of a run; the local cloud must run already, and a look does not start it."""
    try:
        return parse_job_name(name).run_id and name
    except InvalidName:
        parse_run_id(name)
        _cloud().running_endpoint()
        current = Run(name, LOCAL).record.current
        if current is None:
            raise InvalidName("job name", name, "that of a run with an attempt; this one has none yet") from None
        return current.job_name


def _cloud() -> ModuleType:
    from microtuning_local import cloud

    return cloud
