"""`microtuning runs list | show | logs | wait | cancel`; the others that belong to `runs` add themselves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.run import RunStatus
from microtuning_sdk import _views
from microtuning_sdk._connection import connect
from microtuning_sdk._run import Run
from microtuning_sdk.cli import _branches, _rollouts
from microtuning_sdk.cli._common import (
    add_json,
    add_run_id,
    add_stage,
    add_tenant,
    add_verb,
    count,
    exit_status,
    print_json,
    print_table,
    seconds,
    usd,
)

if TYPE_CHECKING:
    import argparse

_WARNINGS = (
    "budget_warning",
    "budget_stop",
    "no_warm_pool",
    "model_not_registered",
)  # events worth a line of their own
_SHOWN = ("reward", "accuracy", "loss")


def add_parsers(verbs: Any) -> None:
    group = verbs.add_parser(
        "runs", help="List, show, follow and stop runs.", description="List, show, follow and stop runs."
    )
    inner = group.add_subparsers(title="verbs", metavar="VERB", required=True)
    listing = add_verb(inner, "list", list_runs, "List the runs of a tenant, newest first.")
    add_tenant(listing, "whose runs")
    listing.add_argument("--limit", type=count, metavar="N", default=50, help="how many at most (default: %(default)s)")
    show = add_verb(inner, "show", show_run, "Show a run: attempts, checkpoints, metrics, cost, execution.")
    logs = add_verb(inner, "logs", show_logs, "Print the log lines of a run's attempts, in order.")
    logs.add_argument("--follow", action="store_true", help="go on until the run is over")
    wait = add_verb(inner, "wait", wait_for_run, "Follow a run to its end, on from the last line seen here.")
    wait.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up waiting after this time")
    cancel = add_verb(inner, "cancel", cancel_run, "Stop a run; it saves a checkpoint first.")
    _branches.add_to(inner)
    _rollouts.add_to(inner)
    for parser in (show, logs, wait, cancel):
        add_run_id(parser)
    for parser in (listing, show, wait, cancel):
        add_json(parser)
    for parser in (listing, show, logs, wait, cancel):
        add_stage(parser)


def list_runs(arguments: argparse.Namespace) -> None:
    stage = connect(arguments.stage)
    runs = list(stage.runs.list_runs(arguments.tenant, arguments.limit))
    waits = any(run.status == RunStatus.QUEUED for run in runs)
    view = _views.runs_view(runs, stage.places(arguments.tenant) if waits else {})
    if arguments.json:
        return print_json(view)
    columns = ("run_id", "status", "place", "created_at", "cost_usd", "reason")
    rows = [
        row | {"created_at": f"{row['created_at'][:19]}Z", "cost_usd": usd(row["cost_usd"])} for row in view["runs"]
    ]
    return print_table(columns, [[row[column] for column in columns] for row in rows])


def show_run(arguments: argparse.Namespace) -> None:
    view = Run(arguments.run_id, arguments.stage).view()
    if arguments.json:
        return print_json(view)
    place = f" ({view['place']}. in the queue)" if view["place"] else ""
    print(f"{view['run_id']}  {view['status']}{place}" + (f": {view['reason']}" if view["reason"] else ""))
    columns = ("attempt", "instance_type", "spot", "outcome", "failure_class", "billed_s", "recoveries")
    rows = [[len(row[c]) if c == "recoveries" else row[c] for c in columns] for row in view["attempts"]]
    print_table(columns, rows)
    _print_recoveries(view["recoveries"])
    for name in ("first", "last"):
        print(f"metrics {name}: {_in_short(view['metrics'][name])}")
    print("checkpoints: " + (", ".join(map(_checkpoint_in_short, view["checkpoints"])) or "none"))
    if view["mirror_late_since"]:
        print(f"  nothing has reached S3 since {view['mirror_late_since']}: SageMaker's mirror may have stopped")
    print(_cost_in_short(view["cost"]))
    for event in view["events"]:
        if event["kind"] in _WARNINGS:
            print(f"! {event['at'][:19]}Z {event['message']}")
    print(f"execution: {view['execution_arn']}")
    return None


def _cost_in_short(cost: dict[str, Any]) -> str:
    at_most = f", at most {usd(cost['at_most_usd'])}" if cost["at_most_usd"] != cost["amount_usd"] else ""
    budget = f"; budget: {usd(cost['budget_usd'])} USD" if cost["budget_usd"] else ""
    return f"cost: {usd(cost['amount_usd'])} USD ({cost['state']}{at_most}){budget}"


def _print_recoveries(found: list[dict[str, Any]]) -> None:
    """Nothing to say of a run that was never disturbed."""
    if found:
        stages = [name for name in found[0] if name.endswith("_ms")]
        columns = ("recovered from", "at", *stages)
        print_table(columns, [[row["cause"], f"{row['at'][:19]}Z", *(row[name] for name in stages)] for row in found])


def _checkpoint_in_short(checkpoint: dict[str, Any]) -> str:
    """A lineage of its own begins with each rollback."""
    lineage = f" (lineage {checkpoint['lineage']})" if checkpoint["lineage"] > 1 else ""
    return f"step {checkpoint['step']}{lineage}"


def _in_short(metrics: dict[str, float | None]) -> str:
    shown = {name: value for name, value in metrics.items() if value is not None and name.endswith(_SHOWN)}
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items()) or "none"


def show_logs(arguments: argparse.Namespace) -> int:
    try:
        for line in Run(arguments.run_id, arguments.stage).logs(follow=arguments.follow):
            print(line, flush=arguments.follow)
    except KeyboardInterrupt:
        pass  # the reader has seen enough; the run is not touched
    return 0


def wait_for_run(arguments: argparse.Namespace) -> int:
    run = Run(arguments.run_id, arguments.stage)
    ended = run.wait(arguments.timeout, logs=not arguments.json)
    if arguments.json:
        print_json(run.view())
    return exit_status(ended)


def cancel_run(arguments: argparse.Namespace) -> None:
    run = Run(arguments.run_id, arguments.stage)
    status = run.status
    asked = run.cancel()
    if arguments.json:
        return print_json({"run_id": run.run_id, "status": status})
    if not asked:
        return print(f"{run.run_id} is {run.status} already; nothing was asked", file=sys.stderr)
    return print(f"asked to stop {run.run_id}; see it end with: microtuning runs wait {run.run_id}", file=sys.stderr)
