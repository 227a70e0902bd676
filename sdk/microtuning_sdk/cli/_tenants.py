"""`microtuning tenants list | show | limit`."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from microtuning_core.domain.cost import latest, total
from microtuning_core.domain.errors import InvalidName, UnknownTenant
from microtuning_core.domain.names import check_tenant
from microtuning_core.domain.tenants import GPU_FAMILIES, Standing, TenantLimits
from microtuning_sdk import _views
from microtuning_sdk._connection import connect
from microtuning_sdk.cli._common import add_json, add_stage, add_verb, print_json, print_table, usd

if TYPE_CHECKING:
    from decimal import Decimal

    from microtuning_sdk._connection import Stage

NO_LIMIT = "none"
# option -> field; each takes a number or "none"
LIMITS = {
    "--max-running-runs": ("max_running_runs", "runs that may train at the same time; 0 lets none start"),
    "--max-waiting-runs": ("max_waiting_runs", "runs that may wait; a submit beyond it is refused"),
    "--budget-usd-per-day": ("budget_usd_per_day", "what its runs may cost in one UTC day"),
    "--budget-usd-per-month": ("budget_usd_per_month", "what its runs may cost in one UTC month"),
}


def add_parsers(verbs: Any) -> None:
    about = "List tenants, show where one stands, and change its limits."
    group = verbs.add_parser("tenants", help=about, description=about)
    inner = group.add_subparsers(title="verbs", metavar="VERB", required=True)
    listing = add_verb(
        inner, "list", list_tenants, "List the tenants of a stage: what runs, waits, is allowed and spent."
    )
    show = add_verb(
        inner, "show", show_tenant, "Show a tenant: limits, running and waiting runs, and what it has spent."
    )
    limit = add_verb(
        inner, "limit", limit_tenant, "Change limits of a tenant, over what the stage's configuration says."
    )
    for parser in (show, limit):
        parser.add_argument("tenant", metavar="TENANT", type=check_tenant, help="its name")
    for option, (_, meaning) in LIMITS.items():
        limit.add_argument(option, metavar="N", help=f'{meaning} ("none" = no limit)')
    limit.add_argument("--weight", metavar="N", help="its share of the slots, against the weights of other tenants")
    limit.add_argument(
        "--gpus", metavar="FAMILY=N", action="append", type=_gpus,
        help='GPUs of a family at a time, once a family; "none" alone takes all such limits away',
    )  # fmt: skip
    limit.add_argument("--reset", action="store_true", help="take all changes back: the configuration counts again")
    for parser in (listing, show, limit):
        add_json(parser)
        add_stage(parser)


def list_tenants(arguments: argparse.Namespace) -> None:
    stage = connect(arguments.stage)
    views = [_view(stage, tenant) for tenant in sorted(stage.admissions.tenants())]
    if arguments.json:
        return print_json({"tenants": views})
    columns = ("tenant", "running", "max_running_runs", "waiting", "max_waiting_runs", "weight", "gpus", "month_usd")
    rows = [view | view["limits"] | {"month_usd": usd(view["month_usd"]), "gpus": _in_short(view)} for view in views]
    return print_table(columns, [[row.get(column) for column in columns] for row in rows])


def show_tenant(arguments: argparse.Namespace) -> None:
    view = _view(connect(arguments.stage), arguments.tenant)
    if arguments.json:
        return print_json(view)
    print(f"{view['tenant']}  {view['running']} running, {view['waiting']} waiting (as of {view['at'] or 'never'})")
    print_table(("limit", "value"), [(name, _worded(value)) for name, value in view["limits"].items()])
    print(f"spent: {usd(view['day_usd'])} USD today, {usd(view['month_usd'])} USD this month (UTC)")
    for run_id, place in sorted(view["places"].items(), key=lambda item: item[1]):
        print(f"{place}. in the queue: {run_id}")
    return None


def limit_tenant(arguments: argparse.Namespace) -> None:
    stage, tenant = connect(arguments.stage), arguments.tenant
    change = None if arguments.reset else _change(arguments)
    known = stage.admissions.tenants()
    if tenant not in known:
        raise UnknownTenant(tenant, tuple(sorted(known)))
    stage.admissions.change_limits(tenant, change)
    changed = stage.admissions.limit_changes().get(tenant)
    view = {"tenant": tenant, "changed": changed.model_dump(mode="json", exclude_unset=True) if changed else {}}
    if arguments.json:
        return print_json(view)
    told = ", ".join(f"{name} {_worded(value)}" for name, value in view["changed"].items()) or "nothing"
    print(f"changed of {tenant}: {told}; it holds from the stage's next grant of a slot on", file=sys.stderr)
    return None


def _view(stage: Stage, tenant: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    entries = latest(stage.ledger.month(tenant, f"{now:%Y-%m}"))
    today = total(entry for entry in entries if entry.day == now.date())
    return tenant_view(tenant, stage.admissions.standing(tenant), today, total(entries))


def tenant_view(tenant: str, standing: Standing | None, day_usd: Decimal, month_usd: Decimal) -> dict[str, Any]:
    """`at`, and with it what stands, is null while the stage has not looked at the tenant yet."""
    return {
        "tenant": tenant,
        "at": _views.when(standing.at) if standing else None,
        "running": standing.running if standing else None,
        "waiting": len(standing.places) if standing else None,
        "places": standing.places if standing else {},
        "limits": standing.limits.model_dump(mode="json") if standing else {},
        "day_usd": _views.money(day_usd),
        "month_usd": _views.money(month_usd),
    }


def _change(arguments: argparse.Namespace) -> TenantLimits:
    """What the options set; at least one of them must."""
    given = {field: getattr(arguments, field) for field, _ in LIMITS.values()} | {"weight": arguments.weight}
    fields: dict[str, Any] = {
        field: None if text == NO_LIMIT else text for field, text in given.items() if text is not None
    }
    if arguments.gpus is not None:
        fields["gpus"] = {family: count for each in arguments.gpus for family, count in each.items()}
    if not fields:
        raise InvalidName(
            "change of limits", "", "at least one of the options, such as --max-running-runs 5, or --reset"
        )
    try:
        return TenantLimits.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field, message = str(first["loc"][0]), first["msg"].removeprefix("Value error, ")
        option = f"--{field.replace('_', '-')}"
        raise InvalidName(f"value of {option}", str(first["input"]), f"a number that it takes: {message}") from error


def _gpus(text: str) -> dict[str, int]:
    """A10G=8"""
    if text == NO_LIMIT:
        return {}
    family, _, count = text.partition("=")
    if family not in GPU_FAMILIES or not (count.isascii() and count.isdigit()) or len(count) > 6:
        families = ", ".join(GPU_FAMILIES)
        raise argparse.ArgumentTypeError(f"{text!r} is not FAMILY=N with one of {families}, nor {NO_LIMIT!r}")
    return {family: int(count)}


def _in_short(view: dict[str, Any]) -> str:
    return ", ".join(f"{family}={count}" for family, count in view["limits"].get("gpus", {}).items())


def _worded(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{family}={count}" for family, count in value.items()) or NO_LIMIT
    return NO_LIMIT if value is None else str(value)
