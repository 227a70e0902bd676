"""`microtuning cost [RUN]`."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from microtuning_sdk._connection import connect
from microtuning_sdk._run import Run
from microtuning_sdk._views import cost_view
from microtuning_sdk.cli._common import add_json, add_stage, add_tenant, add_verb, print_json, print_table, usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from microtuning_core.domain.cost import LedgerEntry


def add_parsers(verbs: Any) -> None:
    parser = add_verb(verbs, "cost", show_cost, "Show what a run, or a tenant's month, has cost by the ledger.")
    parser.add_argument("run_id", metavar="RUN", nargs="?", help="a run's id; without it a month of the tenant")
    add_tenant(parser, "whose month")
    parser.add_argument("--month", metavar="YYYY-MM", type=_month, help="which month, UTC (default: this one)")
    add_json(parser)
    add_stage(parser)


def show_cost(arguments: argparse.Namespace) -> None:
    view = cost_view(_entries(arguments))
    if arguments.json:
        return print_json(view)
    columns = ("run_id", "attempt", "line", "day", "instance_type", "billed_s", "amount_usd", "state")
    lines = [row | {"amount_usd": usd(row["amount_usd"])} for row in view["lines"]]
    print_table(columns, [[row[column] for column in columns] for row in lines])
    return print(f"total: {usd(view['total_usd'])} USD")


def _month(text: str) -> str:
    if not re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a year and a month, such as 2026-07")
    return text


def _entries(arguments: argparse.Namespace) -> Sequence[LedgerEntry]:
    if arguments.run_id:
        return Run(arguments.run_id, arguments.stage).cost().lines
    month = arguments.month or datetime.now(UTC).strftime("%Y-%m")
    return connect(arguments.stage).ledger.month(arguments.tenant, month)
