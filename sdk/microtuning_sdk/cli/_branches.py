"""`microtuning runs rollback | fork | pin | budget`: going on from a checkpoint, keeping one, and paying for more."""

from __future__ import annotations

import argparse
from typing import Any

from microtuning_core.domain.errors import InvalidSpec, Problem
from microtuning_core.spec_files import read_value
from microtuning_sdk._run import Run
from microtuning_sdk._views import money
from microtuning_sdk.cli._common import add_json, add_run_id, add_stage, add_verb, count, print_json


def add_to(inner: Any) -> None:
    rollback = add_verb(inner, "rollback", roll_back, "Continue a run from an older checkpoint, as a new lineage.")
    fork = add_verb(inner, "fork", fork_run, "Start a new run from a checkpoint, with changed settings.")
    fork.add_argument("--name", metavar="NAME", help="name of the new run (default: the old one's)")
    fork.add_argument(
        "--set", metavar="FIELD=VALUE", action="append", default=[], type=setting, dest="settings",
        help="a setting of the spec, such as algorithm.learning_rate=1e-5; may be given several times",
    )  # fmt: skip
    pin = add_verb(inner, "pin", pin_checkpoint, "Keep a checkpoint, whatever is pruned.")
    budget = add_verb(inner, "budget", set_budget, "Give a run another budget; one that its budget stopped goes on.")
    budget.add_argument("--usd", metavar="N", required=True, help="what the run may cost in all, in USD")
    for parser in (rollback, fork, pin, budget):
        add_run_id(parser)
    for parser in (rollback, fork, pin):
        parser.add_argument("--step", metavar="N", type=step, help="the checkpoint's step (default: the newest)")
        parser.add_argument("--lineage", metavar="L", type=count, help="its lineage (default: the newest that has it)")
    for parser in (rollback, fork, pin, budget):
        add_json(parser)
        add_stage(parser)


def step(text: str) -> int:
    """0 is the state before the first step."""
    return 0 if text == "0" else count(text)


def setting(text: str) -> tuple[list[str], Any]:
    """`algorithm.learning_rate=1e-5` as path and value; values are read as in a spec file."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return path.split("."), read_value(value)
    except InvalidSpec as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.problems[0].message}") from error


def as_changes(settings: list[tuple[list[str], Any]]) -> dict[str, Any]:
    """Nested as in a spec; InvalidSpec where one setting lies inside another that was given as a plain value."""
    changes: dict[str, Any] = {}
    for path, value in settings:
        place = changes
        for name in path[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InvalidSpec([Problem(".".join(path), f"{name} was given a value of its own before")])
        place[path[-1]] = value
    return changes


def roll_back(arguments: argparse.Namespace) -> None:
    run = Run(arguments.run_id, arguments.stage)
    start = run.rollback(arguments.step, lineage=arguments.lineage)
    if arguments.json:
        return print_json({"run_id": run.run_id, "lineage": start.lineage, "step": start.step})
    return print(f"{run.run_id} goes on from step {start.step} of lineage {start.lineage}")


def fork_run(arguments: argparse.Namespace) -> None:
    run = Run(arguments.run_id, arguments.stage)
    changes = as_changes(arguments.settings)
    forked = run.fork(arguments.step, lineage=arguments.lineage, name=arguments.name, changes=changes)
    if arguments.json:
        return print_json({"run_id": forked.run_id})
    return print(f"run {forked.run_id} is submitted; follow it with: microtuning runs wait {forked.run_id}")


def set_budget(arguments: argparse.Namespace) -> None:
    run = Run(arguments.run_id, arguments.stage)
    usd = run.raise_budget(arguments.usd)
    if arguments.json:
        return print_json({"run_id": run.run_id, "budget_usd": money(usd)})
    return print(f"{run.run_id} may cost {money(usd)} USD in all")


def pin_checkpoint(arguments: argparse.Namespace) -> None:
    uri = Run(arguments.run_id, arguments.stage).pin(arguments.step, lineage=arguments.lineage)
    return print_json({"uri": uri}) if arguments.json else print(f"kept at {uri}")
