"""What steering a run costs, by a real run with one recovery: `make bench-orchestration`.

A run loses its machine once, on the local cloud. Its ledger says what steering it cost; the functions' own logs (REPORT
lines, as Lambda writes them) say how long each took and how often, to hold the rules of core.domain.orchestration against.
The local cloud has two processors and no distance between a function and its tables: times on AWS are others.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.orchestration import HANDLER_MS, invocations, path_of
from tests.benchmarks.bench_recovery import own_cloud
from tests.benchmarks.report import show

if TYPE_CHECKING:
    from tests.chaos.world import Struck, World

GOAL_USD = Decimal("0.005")
_REPORT = re.compile(r"REPORT RequestId: \S+\s+Duration: ([\d.]+) ms")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="microtuning-bench-") as folder, own_cloud(Path(folder)) as world:
        run = recovered_run(world)
        entries = [each for each in run.run.cost().lines if each.execution]
        expected = counted(world, run)
        rows = [row(name, durations_ms(world, name), expected.get(name, 0)) for name in HANDLER_MS]
    steered = next(each for each in entries if each.line == "orchestration")
    charges = {each.name: f"{each.quantity:f} {each.unit} = {each.amount_usd} USD" for each in steered.charges}
    reached = steered.amount_usd <= GOAL_USD
    show("bench-orchestration", rows, usd=steered.amount_usd, goal_usd=GOAL_USD, reached=reached, charges=charges)
    return 0 if reached else 1


def recovered_run(world: World) -> Struck:
    run = world.begin("sft", rows=8 * 60)
    assert run.comes_to(1), run.story()
    run.kill_machine()
    world.until(lambda: run.is_over, "the run's end", ticks=True, timeout_s=300)
    assert len(run.record.attempts) > 1, run.story()
    return run


def counted(world: World, run: Struck) -> dict[str, int]:
    """How often the rules say each function was woken."""
    record = run.record
    path = path_of(world.services.executions.history(record.execution))
    assert path is not None
    return invocations(record, path, record.attempts)


def durations_ms(world: World, function: str) -> list[float]:
    """Of every invocation of a function, from its log; a function that was never woken has none."""
    logs = world.client("logs")
    group = f"/microtuning/local/{function}"
    pages = logs.get_paginator("filter_log_events").paginate(logGroupName=group)
    try:
        lines = [event["message"] for page in pages for event in page["events"]]
    except logs.exceptions.ResourceNotFoundException:
        return []
    return [float(match[1]) for line in lines if (match := _REPORT.search(line))]


def row(name: str, found_ms: list[float], expected: int) -> dict[str, Any]:
    middle, mean = (statistics.median(found_ms), statistics.mean(found_ms)) if found_ms else (0.0, 0.0)
    times = {"woken": len(found_ms), "by rule": expected, "median ms": middle, "mean ms": mean}
    return {"function": name, **times, "HANDLER_MS": HANDLER_MS[name]}


if __name__ == "__main__":
    sys.exit(main())
