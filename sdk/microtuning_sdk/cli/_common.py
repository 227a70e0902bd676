"""What several groups share: options, and output as JSON or as a table."""

from __future__ import annotations

import argparse
import json
import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.cost import shown
from microtuning_core.domain.names import check_tenant
from microtuning_core.domain.run import RunStatus
from microtuning_sdk._connection import DEFAULT_TENANT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from microtuning_core.domain.run import Run

MOST = 1_000_000


def add_verb(
    verbs: Any, name: str, verb: Callable[[argparse.Namespace], int | None], help_text: str
) -> argparse.ArgumentParser:
    """A verb with its help; a sentence, shown in the list of verbs and above the verb's own options."""
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(verb=verb)
    return parser


def add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", help="the deployment to use (default: $MICROTUNING_STAGE, else local)")


def add_tenant(parser: argparse.ArgumentParser, whose: str) -> None:
    """`--tenant`, which must be a name that a tenant can have."""
    parser.add_argument(
        "--tenant", type=check_tenant, default=DEFAULT_TENANT, help=f"{whose} (default: %(default)s)", metavar="NAME"
    )


def count(text: str) -> int:
    """A whole number from 1 on, as an argument."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:10]) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST:,}")
    return int(text)


def seconds(text: str) -> float:
    """A time from 0 on, as an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 on")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON; its keys never change their meaning")


def add_run_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_id", metavar="RUN", help="the run's id, as `runs list` shows it")


def usd(text: str | None) -> str | None:
    """An amount of a view as a table shows it: 4 decimals. JSON keeps them all."""
    return None if text is None else shown(Decimal(text))


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns by blanks, as wide as what is in them: nothing is cut off, so that ids can be copied."""
    if not rows:
        print("none yet")
        return
    texts = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def exit_status(run: Run) -> int:
    """0 for a run that completed or goes on, 1 for a failed, 3 for a stopped one."""
    return {RunStatus.FAILED: 1, RunStatus.STOPPED: 3}.get(run.status, 0)
