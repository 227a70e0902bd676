"""Many runs at once: 500 specs of three tenants put into the bucket together, 20 slots on the local cloud.

    make bench-load         RUNS=500 SLOTS=20; a table, and build/bench-load.json

It must hold, or the command fails: every run completes; no more runs than slots ever trained at once; the tenants get on
in fair order; the ledger's compute lines equal an independent sum over what the machines really ran, to the cent and
beyond. Printed: runs a minute, and what the control plane takes of memory while the queue grows and shrinks.

The jobs do nothing but keep the container contract, so the time is the orchestration's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from microtuning_core.domain.layout import spec_key
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.run import Run
from microtuning_core.usecases.services import Services, StageSettings
from microtuning_local import cloud as local
from microtuning_local import deploy
from microtuning_local.processes import group_members
from tests.benchmarks.report import show
from tests.chaos.laws import machine_usd

RUNS, SLOTS = int(os.environ.get("RUNS", "500")), int(os.environ.get("SLOTS", "20"))
# Who submits how many of ten; with one queue for all, the smallest would wait behind the others.
PARTS = {"large": 6, "middle": 3, "small": 1}
# From a slot to its job: a run that has just been given one may still look as if it waited, and hold nothing.
IN_BETWEEN, HANDED_OVER = timedelta(seconds=5), 3
CONTAINER = Path(__file__).parents[1] / "integration" / "fast_container.py"
IMAGE = "local/fast:1"
NAMES = StackNames("local", "000000000000", "us-east-1")
PATIENCE_S = 3600
MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """One look at the stage while it works."""

    at_s: float
    ended: int
    held: int
    emulator_mib: float
    sagemaker_mib: float


def main() -> int:
    with a_cloud() as cloud:
        services = Services(cloud, StageSettings(NAMES, IMAGE, SLOTS))  # type: ignore[arg-type]
        began = time.monotonic()
        submit(cloud)
        submitted_s = time.monotonic() - began
        samples = watch(cloud, services, began)
        took_s = samples[-1].at_s
        wait_for_bills(services)
        faults = list(broken_laws(services, all_runs(services), samples))
    rows = [vars(sample) for sample in thinned(samples)]
    facts = {"runs": RUNS, "slots": SLOTS, "submitted_s": round(submitted_s, 1), "all_ended_s": round(took_s, 1)}
    show("bench-load", rows, **facts, runs_per_minute=round(RUNS / took_s * 60, 1), broken_laws=faults)
    print("\n".join(faults) or "every law held")
    return 1 if faults else 0


@contextmanager
def a_cloud() -> Iterator[local.LocalCloud]:
    """A local cloud of its own with that many slots and machines; nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="microtuning-load-") as home:
        os.environ["MICROTUNING_HOME"] = home
        os.environ["MICROTUNING_LOCAL_IMAGES"] = json.dumps({IMAGE: [sys.executable, str(CONTAINER)]})
        os.environ["MICROTUNING_LOCAL_MACHINES"] = str(SLOTS)
        deploy.PARAMETERS |= {"MaxRunningRuns": str(SLOTS), "TrainingImageUri": IMAGE}
        try:
            yield local.up()
        finally:
            local.reset()


def submit(cloud: local.LocalCloud) -> None:
    """All specs, one after the other and as fast as S3 takes them, the tenants interleaved."""
    s3 = cloud.client("s3")
    for tenant in PARTS:
        s3.put_object(Bucket=NAMES.bucket, Key=data_key(tenant), Body=b'{"prompt": "1>", "completion": "1"}\n' * 16)
    for number in range(RUNS):
        tenant = tenant_of(number)
        body = json.dumps(spec(tenant, number)).encode()
        s3.put_object(Bucket=NAMES.bucket, Key=spec_key(tenant, f"load{number:04d}.yaml"), Body=body)


def tenant_of(number: int) -> str:
    order = [tenant for tenant, part in PARTS.items() for _ in range(part)]
    return order[number % len(order)]


def data_key(tenant: str) -> str:
    return f"tenants/{tenant}/datasets/load/rows.jsonl"


def spec(tenant: str, number: int) -> dict[str, Any]:
    return {
        "name": f"load {number}",
        "model": {"arch": "Transformer"},
        "algorithm": {"type": "sft", "epochs": 1},
        "data": {"train": f"s3://{NAMES.bucket}/{data_key(tenant)}"},
        "compute": {"instance": "ml.m5.large", "spot": False},
    }


def watch(cloud: local.LocalCloud, services: Services, began: float) -> list[Sample]:
    """Looks every two seconds until every run has ended."""
    samples: list[Sample] = []
    while not samples or samples[-1].ended < RUNS:
        assert time.monotonic() - began < PATIENCE_S, f"not all runs ended in {PATIENCE_S} s: {samples[-1]}"
        time.sleep(2)
        samples.append(look(cloud, services, began))
    return samples


def look(cloud: local.LocalCloud, services: Services, began: float) -> Sample:
    still_open = sum(len(services.runs.open_run_ids(tenant)) for tenant in PARTS)
    known = sum(1 for tenant in PARTS for _ in services.objects.walk(f"tenants/{tenant}/receipts/"))
    endpoint = cloud.endpoint
    return Sample(
        at_s=round(time.monotonic() - began, 1),
        ended=known - still_open,
        held=len(services.admissions.slots().held),
        emulator_mib=resident_mib(endpoint.emulator_pid),
        sagemaker_mib=resident_mib(endpoint.sagemaker_pid, alone=True),
    )


def resident_mib(group: int | None, *, alone: bool = False) -> float:
    """What a process has in memory; with all of its group (the emulator's functions), unless `alone`."""
    assert group is not None
    total = 0
    for pid in [group] if alone else group_members(group):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue  # a function's worker that ended between two looks
    return round(total / MIB, 1)


def all_runs(services: Services) -> list[Run]:
    return [run for tenant in PARTS for run in services.runs.list_runs(tenant)]


def wait_for_bills(services: Services) -> None:
    """Costs are final when SageMaker has said the seconds; what no event told, a tick of the reconciler does."""
    deadline = time.monotonic() + 120
    while not all(run.costs_are_final for run in all_runs(services)):
        assert time.monotonic() < deadline, "some costs did not become final"
        local.tick()


# --- laws ------------------------------------------------------------------------------------------------------------


def broken_laws(services: Services, runs: Sequence[Run], samples: Sequence[Sample]) -> Iterator[str]:
    outcomes = Counter(str(run.status) for run in runs)
    if outcomes != {"completed": RUNS}:
        yield f"of {RUNS} runs: {dict(outcomes)}"
    if (most := most_at_once(runs)) > SLOTS:
        yield f"{most} runs held {SLOTS} slots"
    if held := services.admissions.slots().held:
        yield f"{len(held)} slots are held by nobody that runs"
    yield from unfair(runs)
    yield from wrong_ledger(services, runs)
    yield from growth(samples)


def most_at_once(runs: Sequence[Run]) -> int:
    """The largest number of jobs that were there at one moment."""
    changes = [(each.launched_at, 1) for run in runs for each in run.attempts if each.launched_at]
    changes += [(each.ended_at, -1) for run in runs for each in run.attempts if each.launched_at and each.ended_at]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def unfair(runs: Sequence[Run]) -> Iterator[str]:
    """A slot goes to nobody who holds more of them already than one who waits.

    Specs are read in the order of their upload, so how many of each tenant's runs are through says nothing: only what
    waited can have been passed over.
    """
    tried = 0
    for at, tenant in sorted((at, run.tenant) for run in runs if (at := first_launch(run))):
        holding = holding_at(runs, at)
        others = waiting_at(runs, at) - {tenant}
        tried += len(others)
        if passed := [other for other in sorted(others) if holding[tenant] > holding[other] + HANDED_OVER]:
            yield f"at {at:%H:%M:%S} {tenant} got a slot and {passed[0]} waited, of slots held so: {dict(holding)}"
            return
    if not tried:
        yield "no two tenants ever waited at the same time: fairness was not tried"


def waiting_at(runs: Sequence[Run], at: datetime) -> set[str]:
    """Tenants with a run that has waited for a while and goes on waiting for one."""
    early, late = at - IN_BETWEEN, at + IN_BETWEEN
    return {run.tenant for run in runs if run.created_at < early and (first_launch(run) or late) > late}


def holding_at(runs: Sequence[Run], at: datetime) -> Counter[str]:
    return Counter(run.tenant for run in runs if (first := first_launch(run)) and first <= at < (run.ended_at or at))


def first_launch(run: Run) -> datetime | None:
    return next((each.launched_at for each in run.attempts if each.launched_at), None)


def wrong_ledger(services: Services, runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        day = run.created_at.date()
        entries = services.ledger.entries(run.tenant, run.run_id, day, datetime.now(UTC).date())
        written = sum((each.amount_usd for each in entries if each.line == "compute"), Decimal(0))
        owed = sum((machine_usd(each.job_name) for each in run.attempts if each.launched_at), Decimal(0))
        if abs(written - owed) > Decimal("1e-8"):
            yield f"{run.run_id}: ledger {written} USD, machines {owed} USD"


def growth(samples: Sequence[Sample]) -> Iterator[str]:
    """Memory after a quarter of the runs against the end: what belongs to a run must go with it."""
    warm = next(sample for sample in samples if sample.ended >= RUNS / 4)
    grown = samples[-1].sagemaker_mib - warm.sagemaker_mib
    if grown > 0.5 * warm.sagemaker_mib:
        yield f"the local SageMaker grew by {grown:.0f} MiB from {warm.sagemaker_mib:.0f}"


def thinned(samples: Sequence[Sample], most: int = 12) -> list[Sample]:
    step = max(1, len(samples) // most)
    return [*samples[::step], samples[-1]] if (len(samples) - 1) % step else list(samples[::step])


if __name__ == "__main__":
    sys.exit(main())
