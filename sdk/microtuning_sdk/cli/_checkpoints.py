"""`microtuning checkpoints RUN`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtuning_sdk._run import Run
from microtuning_sdk._views import checkpoints_view
from microtuning_sdk.cli._common import add_json, add_run_id, add_stage, add_verb, print_json, print_table

if TYPE_CHECKING:
    import argparse


def add_parsers(verbs: Any) -> None:
    parser = add_verb(verbs, "checkpoints", list_checkpoints, "List the checkpoints of a run, oldest first.")
    add_run_id(parser)
    add_json(parser)
    add_stage(parser)


def list_checkpoints(arguments: argparse.Namespace) -> None:
    run = Run(arguments.run_id, arguments.stage)
    view = checkpoints_view(run.checkpoints())
    if arguments.json:
        return print_json(view)
    columns = ("lineage", "step", "whole", "uri")
    return print_table(columns, [[row[column] for column in columns] for row in view["checkpoints"]])
