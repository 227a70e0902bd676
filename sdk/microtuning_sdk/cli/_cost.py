"""`microtuning cost [RUN]`."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.cost import shown
from microtuning_core.domain.names import check_tenant
from microtuning_core.domain.reports import GROUPS
from microtuning_sdk._connection import DEFAULT_TENANT, connect
from microtuning_sdk._costs import every_tenant, group_view, month_statement, statement
from microtuning_sdk._run import Run
from microtuning_sdk.cli._common import add_json, add_stage, add_verb, print_json, print_table, usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from microtuning_core.domain.cost import LedgerEntry
    from microtuning_sdk._costs import Statement

FORMATS = ("table", "json", "csv", "focus")
_COLUMNS = ("run_id", "attempt", "line", "day", "instance_type", "billed_s", "amount_usd", "state")


def add_parsers(verbs: Any) -> None:
    parser = add_verb(verbs, "cost", show_cost, "Show what a run, or a tenant's month, has cost by the ledger.")
    parser.add_argument("run_id", metavar="RUN", nargs="?", help="a run's id; without it a month of the tenant")
    parser.add_argument(
        "--tenant", type=check_tenant, metavar="NAME",
        help=f"whose month (default: {DEFAULT_TENANT}; with --by tenant, every tenant's)",
    )  # fmt: skip
    parser.add_argument("--month", metavar="YYYY-MM", type=_month, help="which month, UTC (default: this one)")
    parser.add_argument("--by", choices=GROUPS, help="one row for each of these, in place of every entry")
    parser.add_argument("--format", choices=FORMATS, help="default: table; focus is FOCUS 1.2 as CSV, of every entry")
    add_json(parser)
    add_stage(parser)


def show_cost(arguments: argparse.Namespace) -> None:
    found = statement_of(arguments)
    match arguments.format or ("json" if arguments.json else "table"):
        case "json":
            print_json(found.as_json(arguments.by))
        case "csv":
            _print_csv(found, arguments.by)
        case "focus":
            sys.stdout.write(found.as_focus())
        case _:
            _print_tables(found, arguments.by)


def statement_of(arguments: argparse.Namespace) -> Statement:
    if arguments.run_id:
        run = Run(arguments.run_id, arguments.stage)
        return statement(run.stage, run.cost().lines)
    stage = connect(arguments.stage)
    tenants = [arguments.tenant or DEFAULT_TENANT]
    if arguments.by == "tenant" and arguments.tenant is None:
        tenants = every_tenant(stage)
    return month_statement(stage, arguments.month or datetime.now(UTC).strftime("%Y-%m"), tenants)


def _month(text: str) -> str:
    if not re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a year and a month, such as 2026-07")
    return text


def _print_tables(found: Statement, by: str | None) -> None:
    if by is None:
        print_table(_COLUMNS, [_cells(entry) for entry in found.entries])
    else:
        columns = (by, "machine_s", "amount_usd", "saved_usd", "state")
        print_table(columns, [_group_cells(group_view(group)) for group in found.by(by)])
    print(f"total: {shown(found.total_usd)} USD")
    view = found.as_json()
    if view["saved_usd"] != "0":
        print(f"saved by spot: {usd(view['saved_usd'])} USD")
    if view["utilisation"] is not None:
        print(f"utilisation: {100 * view['utilisation']:.1f} % of billed machine time made progress")
    if view["stale_prices"]:
        print(f"! old prices, see `microtuning prices refresh`: {', '.join(view['stale_prices'])}")
    for kind, price in view["usd_per_million_tokens"].items():
        print(f"a million tokens {kind}: {usd(price)} USD")


def _cells(entry: LedgerEntry) -> list[object]:
    number = entry.attempt or f"e{entry.execution}"
    amount = shown(entry.amount_usd)
    # Spot is billed for less time than it takes, and how much less is told at its end.
    state = "at most, until billed" if entry.spot and entry.state == "estimate" else entry.state
    return [entry.run_id, number, entry.line, entry.day, entry.instance_type, entry.billed_s, amount, state]


def _group_cells(view: dict[str, Any]) -> Sequence[object]:
    return view["key"], usd(view["machine_s"]), usd(view["amount_usd"]), usd(view["saved_usd"]), view["state"]


def _print_csv(found: Statement, by: str | None) -> None:
    """Every decimal; a spreadsheet's own rows."""
    view = found.as_json(by)
    columns = _COLUMNS if by is None else ("key", "machine_s", "amount_usd", "saved_usd", "state")
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(view["lines" if by is None else "groups"])
