"""`make chaos N=200`: every fault by itself, then N random schedules; a table, and build/chaos.json.

make chaos N=1 SEED=17        one schedule again; SINGLE=0 leaves out the faults by themselves
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.report import show

HERE = Path(__file__).parent


class Table:
    """Collects what became of each test."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            what = report.nodeid.partition("[")[2].rstrip("]") or report.nodeid.rpartition("::")[2]
            row = {"what": _in_words(what), "outcome": report.outcome, "s": round(report.duration, 1)}
            self.rows.append(row)


def _in_words(what: str) -> str:
    if not what.isdigit():
        return what
    from tests.chaos.test_schedules import schedule  # it reads how many there are when it is imported

    recipe, faults, steps = schedule(int(what))
    return f"seed {what}: {recipe}, " + ", ".join(f"{f.name} at {step}" for f, step in zip(faults, steps, strict=True))


def main() -> int:
    os.environ["CHAOS"] = "all"
    os.environ.setdefault("CHAOS_N", os.environ.get("N", "5"))
    os.environ.setdefault("CHAOS_SEED", os.environ.get("SEED", "0"))
    files = ["test_schedules.py"] if os.environ.get("SINGLE") == "0" else ["test_single_faults.py", "test_schedules.py"]
    table = Table()
    status = pytest.main([*(str(HERE / file) for file in files), "-q", *sys.argv[1:]], plugins=[table])
    if table.rows:
        failed = sum(row["outcome"] != "passed" for row in table.rows)
        show("chaos", table.rows, survived=len(table.rows) - failed, failed=failed)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
