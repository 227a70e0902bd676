"""`microtuning prices list` and `microtuning prices refresh`."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from microtuning_sdk._connection import connect
from microtuning_sdk._prices import price_rows, refresh
from microtuning_sdk.cli._common import add_json, add_stage, add_verb, print_json, print_table

if TYPE_CHECKING:
    from microtuning_sdk._prices import Refreshed


def add_parsers(verbs: Any) -> None:
    group = verbs.add_parser("prices", help="Prices of machines, and AWS's own list of them.")
    prices = group.add_subparsers(title="verbs", metavar="VERB", required=True)
    shown = add_verb(prices, "list", list_prices, "List the price that each type is planned with, its source and date.")
    read = add_verb(prices, "refresh", refresh_prices, "Read AWS's price list into the stage; new attempts use it.")
    read.add_argument("--region", type=_region, help="of the prices (default: the stage's own)")
    for parser in (shown, read):
        add_json(parser)
        add_stage(parser)


def list_prices(arguments: argparse.Namespace) -> None:
    rows = price_rows(connect(arguments.stage))
    if arguments.json:
        return print_json({"prices": rows})
    columns = ("instance_type", "usd_per_hour", "region", "as_of", "", "source")
    print_table(columns, [[_mark(row, column) for column in columns] for row in rows])
    if any(row["stale"] for row in rows):
        print("stale: the price is old; `microtuning prices refresh` looks it up again")
    return None


def _mark(row: dict[str, Any], column: str) -> object:
    return row[column] if column else ("stale" if row["stale"] else "")


def refresh_prices(arguments: argparse.Namespace) -> None:
    found = refresh(connect(arguments.stage), arguments.region)
    if arguments.json:
        return print_json(_as_json(found))
    print(f"{len(found.reading.prices)} prices of {found.region}; changed: {', '.join(found.changed) or 'none'}")
    for each in found.reading.refused:
        print(f"! {each.what} {each.why}")
    if found.reading.missing:
        print(f"! not in the list of {found.region}, and priced as before: {', '.join(found.reading.missing)}")
    return None


def _as_json(found: Refreshed) -> dict[str, Any]:
    return {
        "region": found.region,
        "prices": {each.instance_type: str(each.usd_per_hour) for each in found.reading.prices},
        "changed": list(found.changed),
        "refused": [{"what": each.what, "why": each.why} for each in found.reading.refused],
        "missing": list(found.reading.missing),
    }


def _region(text: str) -> str:
    if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a region, such as eu-west-1")
    return text
