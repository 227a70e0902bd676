"""Every way we know to break a run, and what it may cost: the same bits, a number of steps, nothing else.

fault.before(world)             before anything has begun
fault.strike(world, runs)       in the middle of the runs
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from microtuning_local import cloud as local
from tests.chaos.mischief import FOR_GOOD
from tests.chaos.world import NAMES, Struck, World, endpoint_pids

Runs = Sequence[Struck]
CLOUD_TROUBLE_S = 4.0


def nothing(*_: Any) -> None:
    """For faults that are set before, or need no help in the middle."""


@dataclass(frozen=True)
class Fault:
    """One way to break runs.

    at_once: it strikes the stage, and so all runs. spot: needs a spot job. machine: the machine is lost, and with it what
    its mirror had not sent.
    spoils_a_checkpoint: the newest one does not do, and an older must.
    same_bits: weights and losses must end as if nothing had happened. logs_kept: so that this can be seen in the log.
    ends: how the runs must end, and of which failure class. mixes: may come in a schedule with others.
    """

    name: str
    strike: Callable[[World, Runs], None] = nothing
    before: Callable[[World], None] = nothing
    at_once: bool = False
    spot: bool = False
    machine: bool = False
    spoils_a_checkpoint: bool = False
    same_bits: bool = True
    logs_kept: bool = True
    ends: Literal["completed", "failed", "stopped"] = "completed"
    failure_class: str | None = None
    mixes: bool = True


# --- in the job ------------------------------------------------------------------------------------------------------


def each(strike: Callable[[Struck], None]) -> Callable[[World, Runs], None]:
    """A fault of every run by itself."""

    def strike_all(_: World, runs: Runs) -> None:
        for run in runs:
            strike(run)

    return strike_all


def kill(run: Struck, pid: Callable[[], int], number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, StopIteration):  # it ended between two looks: something else struck first
        os.kill(pid(), number)


def wish(name: str) -> Callable[[World, Runs], None]:
    return each(lambda run: run.wish(name))


def corrupt_on_machine(run: Struck) -> None:
    """The newest checkpoint of the machine is damaged, and then its worker dies: an older one must do."""
    folder = run.newest_on_machine()
    assert folder is not None
    weights = next(folder.rglob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 0xFF
    weights.write_bytes(content)
    kill(run, run.worker)


def corrupt_in_s3(run: Struck) -> None:
    """The newest checkpoint in S3 gets other bytes of the same length, and then the machine is lost."""
    _spoil(run, lambda s3, key, size: s3.put_object(Bucket=NAMES.bucket, Key=key, Body=b"\0" * size))


def delete_in_s3(run: Struck) -> None:
    """A file of the newest checkpoint vanishes from S3, and then the machine."""
    _spoil(run, lambda s3, key, _: s3.delete_object(Bucket=NAMES.bucket, Key=key))


def _spoil(run: Struck, spoil: Callable[[Any, str, int], Any]) -> None:
    s3 = run.world.client("s3")
    kill(run, run.supervisor, signal.SIGSTOP)  # the mirror must not send a newer one meanwhile
    found = s3.list_objects_v2(Bucket=NAMES.bucket, Prefix=run.newest_prefix())["Contents"]
    weights = next(each for each in found if each["Key"].endswith(".safetensors"))
    spoil(s3, weights["Key"], weights["Size"])
    run.kill_machine()


def reclaim(run: Struck) -> None:
    local.reclaim(run.job_name)


def stop_by_somebody(run: Struck) -> None:
    run.world.client("sagemaker").stop_training_job(TrainingJobName=run.job_name)


# --- SageMaker -------------------------------------------------------------------------------------------------------


def with_faults(spec: dict[str, Any]) -> Callable[..., None]:
    """Until the next `local.faults`, which every test ends with."""

    def set_faults(*_: Any) -> None:
        local.faults(spec)

    return set_faults


def end_jobs(how: str) -> Callable[[World, Runs], None]:
    """The jobs that train now end like that; the next attempts do not."""

    def strike(world: World, runs: Runs) -> None:
        jobs, names = world.services.jobs, [run.job_name for run in runs]
        local.faults({"end_jobs": dict.fromkeys(names, how)})
        world.until(lambda: all(job.is_terminal for name in names if (job := jobs.describe(name))), how)
        local.faults({})

    return strike


def no_machine_until_max_wait(world: World) -> None:
    """Spot jobs wait for a type that nobody has, until MaxWait ends them with nothing billed."""
    local.faults({"capacity": {"ml.m5.large": 0}, "end_jobs": {"*-a001": "max_wait"}})


# --- our own functions -----------------------------------------------------------------------------------------------


@contextmanager
def changed(world: World, function: str, **configuration: Any) -> Iterator[None]:
    """The function with another configuration for a while."""
    functions, name = world.client("lambda"), NAMES.function(function)
    before = functions.get_function_configuration(FunctionName=name)
    kept = {"Environment": {"Variables": before["Environment"]["Variables"]}, "Timeout": before["Timeout"]}
    functions.update_function_configuration(FunctionName=name, **configuration)
    try:
        yield
    finally:
        functions.update_function_configuration(FunctionName=name, **kept)


def functions_fail(world: World, runs: Runs) -> None:
    """Nobody hears of the lost machines: the handlers of events and checkpoints break at their first line."""
    bad = {"Environment": {"Variables": {"STATE_MACHINE_ARN": "no arn at all"}}}
    with changed(world, "on_training_event", **bad), changed(world, "on_checkpoint", **bad):
        for run in runs:
            run.kill_machine()
        time.sleep(CLOUD_TROUBLE_S)


def planning_fails(world: World, runs: Runs) -> None:
    """The functions that the machine calls itself break for a while, just when it needs them."""
    bad = {"Environment": {"Variables": {"STATE_MACHINE_ARN": "no arn at all"}}}
    with (
        changed(world, "plan_attempt", **bad),
        changed(world, "register_model", **bad),
        changed(world, "close_run", **bad),
    ):
        for run in runs:
            run.kill_machine()
        time.sleep(CLOUD_TROUBLE_S)


def functions_time_out(world: World, runs: Runs) -> None:
    """The handler of events waits for an endpoint that never answers, until its time is over."""
    variables = {"MICROTUNING_STAGE": "local", "AWS_ENDPOINT_URL": "http://10.255.255.1:9"}
    with changed(world, "on_training_event", Environment={"Variables": variables}, Timeout=1):
        for run in runs:
            run.kill_machine()
        time.sleep(CLOUD_TROUBLE_S)


# --- the local cloud itself ------------------------------------------------------------------------------------------


def restart(world: World, _: Runs) -> None:
    local.down()
    world.restarted(local.up())


def kill_emulator(world: World, _: Runs) -> None:
    """Tables, executions and logs are gone; objects and jobs stay."""
    os.kill(endpoint_pids()[0], signal.SIGKILL)
    world.restarted(local.up())


def kill_sagemaker(world: World, _: Runs) -> None:
    """Every machine at once, and whoever would say so."""
    os.kill(endpoint_pids()[1], signal.SIGKILL)
    world.restarted(local.up())


FAULTS = [
    Fault("worker killed", each(lambda run: kill(run, run.worker))),
    Fault("worker asked to leave", each(lambda run: kill(run, run.worker, signal.SIGTERM))),
    Fault("supervisor killed", each(lambda run: kill(run, run.supervisor)), machine=True),
    Fault("supervisor asked to leave", each(lambda run: kill(run, run.supervisor, signal.SIGTERM)), machine=True),
    Fault("machine lost", each(Struck.kill_machine), machine=True),
    Fault("spot reclaimed", each(reclaim), spot=True, machine=True),
    Fault("max wait, nothing billed", before=no_machine_until_max_wait, spot=True, mixes=False),
    Fault("max wait, seconds billed", end_jobs("max_wait"), spot=True),
    Fault("internal server error", end_jobs("internal_error"), machine=True),
    Fault("stopped by somebody", each(stop_by_somebody), ends="stopped", failure_class="stopped", mixes=False),
    Fault("hang", wish("hang")),
    Fault("out of memory", wish("oom"), same_bits=False),
    Fault("not a number, once", wish("nan"), same_bits=False),
    Fault(
        "not a number, for good", wish(FOR_GOOD), same_bits=False, ends="failed", failure_class="numerics", mixes=False
    ),
    Fault("disk full", wish("disk_full")),
    Fault("torn checkpoint", wish("torn"), spoils_a_checkpoint=True),
    Fault("newest checkpoint damaged on the machine", each(corrupt_on_machine), spoils_a_checkpoint=True),
    Fault("newest checkpoint damaged in S3", each(corrupt_in_s3), machine=True, spoils_a_checkpoint=True),
    Fault("newest checkpoint gone from S3", each(delete_in_s3), machine=True, spoils_a_checkpoint=True),
    Fault("capacity exhausted", before=with_faults({"capacity": {"ml.m5.large": 0}}), mixes=False),
    Fault(
        "quota exceeded",
        before=with_faults({"refuse_creates": {"code": "ResourceLimitExceeded", "count": 2}}),
        mixes=False,
    ),
    Fault(
        "throttled", before=with_faults({"refuse_creates": {"code": "ThrottlingException", "count": 4}}), mixes=False
    ),
    Fault(
        "creates fail", before=with_faults({"refuse_creates": {"code": "InternalServerError", "count": 4}}), mixes=False
    ),
    Fault("functions fail", functions_fail, at_once=True, machine=True),
    Fault("planning fails", planning_fails, at_once=True, machine=True),
    Fault("functions time out", functions_time_out, at_once=True, machine=True),
    *(
        Fault(
            f"events {how}", each(Struck.kill_machine), with_faults({"events": {"*": how}}), machine=True, mixes=False
        )
        for how in ("drop", "twice", "late", "mixed")
    ),
    Fault("local cloud restarted", restart, at_once=True, machine=True),
    Fault("emulator killed", kill_emulator, at_once=True, logs_kept=False),
    Fault("local SageMaker killed", kill_sagemaker, at_once=True, machine=True),
]
SINGLE = {fault.name: fault for fault in FAULTS}
MIXING = [fault for fault in FAULTS if fault.mixes and not fault.spot]
