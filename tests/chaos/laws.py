"""What must hold after runs were struck, whatever struck them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from microtuning_core.domain.catalog import find
from microtuning_local.home import local_home
from microtuning_local.sagemaker.jobs import SPOT_BILLED_FRACTION
from tests.chaos.faults import Fault
from tests.chaos.mischief import STEP_S
from tests.chaos.world import EVERY_STEPS, STEPS, Struck, World, record_of
from tests.processes import every_process

# What a machine saves is on its way to S3 for a sweep, and for its upload beside others on two cores.
MIRROR_LAG_S = 1.5


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed."""

    weights_sha256: str
    losses: dict[int, float]


def check(world: World, runs: Sequence[Struck], faults: Sequence[Fault], references: dict[str, Reference]) -> None:
    """Everything; what was struck together is checked together, since the stage is one."""
    for run in runs:
        check_end(run, faults)
        check_result(world, run, faults, references[run.recipe])
        check_lost_steps(run, faults)
        check_ledger(run)
        check_recoveries(run)
    check_nothing_is_left(world, runs)


def check_end(run: Struck, faults: Sequence[Fault]) -> None:
    """A run with only survivable faults completed; any other ended as it must, with its cause."""
    record = run.record
    expected = next((fault for fault in faults if fault.ends != "completed"), None)
    if expected is None:
        assert record.status == "completed", run.story()
        return
    assert record.status == expected.ends, run.story()
    failure = record.attempts[-1].failure
    assert failure is not None and failure.failure_class == expected.failure_class, run.story()


def check_result(world: World, run: Struck, faults: Sequence[Fault], reference: Reference) -> None:
    """Bit for bit what an undisturbed run gives, where nothing had to change the arithmetic."""
    if run.record.status != "completed":
        return
    losses = run.losses()
    if all(fault.logs_kept for fault in faults):
        missing = set(range(1, STEPS + 1)) ^ set(losses)
        assert not missing, f"no line of, or one too many: {sorted(missing)}\n{run.story()}\n{run.timeline()}"
    if all(fault.same_bits for fault in faults):
        calm = {step: reference.losses[step] for step in losses}
        assert losses == calm, f"{run.name}: losses differ from those of an undisturbed run"
        assert run.weights_sha256(world.folder) == reference.weights_sha256, f"{run.name}: other weights"


def lost_steps(run: Struck) -> list[int]:
    """For each time that it went back: how many steps were done again."""
    done = [(event["step"], event["attempt"]) for event in run.events() if event["event"] == "metrics"]
    return [before - after + 1 for (before, _), (after, _) in pairwise(done) if after <= before]


def check_lost_steps(run: Struck, faults: Sequence[Fault]) -> None:
    """At most an interval and the step whose checkpoint was being written; of a lost machine, its mirror's lag more."""
    most = EVERY_STEPS + 1
    most += math.ceil(MIRROR_LAG_S / STEP_S) if any(fault.machine for fault in faults) else 0
    most += EVERY_STEPS * sum(fault.spoils_a_checkpoint for fault in faults)
    assert all(lost <= most for lost in lost_steps(run)), f"{run.name} lost {lost_steps(run)} steps; allowed are {most}"


def check_ledger(run: Struck) -> None:
    """The ledger against what the machines really ran, by the local SageMaker's own record of it."""
    owed = sum((machine_usd(each.job_name) for each in run.record.attempts if each.launched_at), Decimal(0))
    cost = run.run.cost()
    assert cost.state == "final", run.story()
    machines = sum((entry.amount_usd for entry in cost.lines if entry.line == "compute"), Decimal(0))
    assert abs(machines - owed) < Decimal("1e-8"), f"{run.name}: ledger {machines} USD, machines {owed} USD"
    assert cost.total_usd == sum((entry.amount_usd for entry in cost.lines), Decimal(0))


def machine_usd(job_name: str) -> Decimal:
    """Seconds with a machine, rounded up, at its price; of spot the part that the service bills."""
    record = record_of(job_name)
    held_s = math.ceil(sum(end - start for start, end in record["segments"]))
    billed_s = (
        math.ceil(held_s * SPOT_BILLED_FRACTION) if record["request"].get("EnableManagedSpotTraining") else held_s
    )
    resources = record["request"]["ResourceConfig"]
    return Decimal(billed_s * resources["InstanceCount"]) * find(resources["InstanceType"]).price_usd_per_hour / 3600


def check_recoveries(run: Struck) -> None:
    """Every attempt after one that trained and failed is a recovery with all its stages, once the run completed."""
    record = run.record
    if record.status != "completed":
        return
    if any(each.outcome == "failed" and each.checkpoint_step == STEPS for each in record.attempts):
        return  # every step was saved before the machine went, and so there was no new one
    # The last sign of a short run may come after its end.
    whole = "every stage of the recoveries of " + run.name
    run.world.until(
        lambda: all(each["total_ms"] is not None for each in run.run.view()["recoveries"]), whole, timeout_s=30
    )
    shown = run.run.view()["recoveries"]
    broke_off = [each for each in record.attempts if each.outcome == "failed" and each.started_at]
    assert len(shown) >= len(broke_off), run.story()


def check_nothing_is_left(world: World, runs: Sequence[Struck]) -> None:
    """No slot, no waiting run, no token, no job, no process and no temporary file outlives what made it."""
    slots = world.services.admissions.slots()
    assert not slots.held, slots
    jobs = world.client("sagemaker").list_training_jobs(StatusEquals="InProgress")["TrainingJobSummaries"]
    assert not jobs, [each["TrainingJobName"] for each in jobs]
    for run in runs:
        assert not world.services.runs.tokens(run.name), run.story()
        names = {each.job_name for each in run.record.attempts}
        left = [(pid, words) for pid, _, words in every_process() if names & {word.partition("=")[2] for word in words}]
        assert not left, [pid for pid, _ in left]
        kept = [each for each in run.record.attempts if (local_home().jobs / each.job_name / "ml").exists()]
        assert all(each.outcome == "failed" for each in kept), "the disk of a job that did not fail is still there"
    assert temporary_files() == set(), temporary_files()


def temporary_files() -> set[str]:
    """What jobs and functions left in the local cloud's folder for such things."""
    tmp = local_home().tmp
    names = [path.name for path in tmp.iterdir()] if tmp.exists() else []
    return {name for name in names if name.startswith(("microtuning", "rewards", "tmp"))}
