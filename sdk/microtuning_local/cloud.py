"""The local cloud: an AWS endpoint on 127.0.0.1 with Microtuning deployed to it.

from microtuning_local import cloud
cloud.up()             # from nothing to deployed in a few seconds; nothing to do when it runs
cloud.environment()    # what boto3 or the aws CLI need to talk to it
cloud.down()           # saved, and gone: no process, no temporary file
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import LocalCloudError, LocalRequestRefused
from microtuning_local import deploy, emulator
from microtuning_local.clients import root_client
from microtuning_local.home import (
    ROOT_SECRET,
    STAGE,
    Endpoint,
    Home,
    local_home,
    read_endpoint,
    write_endpoint,
)
from microtuning_local.processes import free_port, is_same_process, kill_group, port_is_free, reap, started_at
from microtuning_local.sagemaker import process as sagemaker

if TYPE_CHECKING:
    from pathlib import Path

# What a run meets between its upload and its first step, in that order.
FIRST_NEEDED = ("on_spec_uploaded", "admit_run", "plan_attempt", "launch_training")

START_FIRST = "Run `microtuning local up` first."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalCloud:
    """A running local cloud."""

    endpoint: Endpoint
    home: Home

    def client(self, service: str) -> Any:
        """A boto3 client of it, with the rights of the account's root user."""
        return root_client(self.endpoint, service)

    @property
    def environment(self) -> dict[str, str]:
        return environment_of(self.endpoint)


@dataclass(frozen=True)
class CloudStatus:
    """What `status` saw. `stack` is CloudFormation's word, or None when nothing is deployed or running."""

    running: bool
    endpoint: Endpoint | None
    stack: str | None
    jobs_running: int
    home: Path


def up(*, template: dict[str, Any] | None = None, functions: Path | None = None) -> LocalCloud:
    """Start what does not run, deploy what has changed, and return the cloud.

    `template` and `functions` replace the kept template and the handlers' folder; tests use them.
    """
    home = local_home()
    with home.locked():
        home.prepare()
        before = read_endpoint(home)
        is_saved = home.saved_mark.exists()
        endpoint = start(home, before)
        has_lost = not is_saved and before is not None and not is_same_emulator(before, endpoint)
        wanted = template or deploy.kept_template()
        stamp = "" if template else deploy.sources_stamp()
        changed = wanted is not None and deploy.deploy(endpoint, wanted, functions)
        endpoint = replace(endpoint, deployed=stamp)
        write_endpoint(home, endpoint)
    cloud = LocalCloud(endpoint, home)
    if changed or before is None or not is_same_run(before, endpoint):
        wake(cloud, take_up_runs=before is not None, has_lost=has_lost)
    return cloud


def ensure_up() -> LocalCloud:
    """The running cloud, or a new one. Quick when it runs and no source has changed since it was deployed."""
    home = local_home()
    endpoint = read_endpoint(home)
    if endpoint and is_running(endpoint) and endpoint.deployed in ("", deploy.sources_stamp()):
        return LocalCloud(endpoint, home)
    return up()


def down() -> None:
    """Stop both processes and everything they started. State is kept; nothing else is left."""
    home = local_home()
    if not home.root.exists():
        return
    with home.locked():
        endpoint = read_endpoint(home)
        if endpoint:
            stop(home, endpoint)


def reset() -> None:
    """Stop, and forget everything: objects, tables, jobs, logs, ports."""
    down()
    shutil.rmtree(local_home().root, ignore_errors=True)


def status() -> CloudStatus:
    """What runs; starts nothing."""
    home = local_home()
    endpoint = read_endpoint(home)
    running = bool(endpoint) and is_running(endpoint)  # type: ignore[arg-type]
    if not endpoint or not running:
        return CloudStatus(False, endpoint, None, 0, home.root)
    stack = deploy.describe_stack(root_client(endpoint, "cloudformation"))
    jobs = sagemaker.ask(endpoint, "GET", "/_local/health")["jobs_running"]
    return CloudStatus(True, endpoint, stack["StackStatus"] if stack else None, jobs, home.root)


def environment() -> dict[str, str]:
    """Environment variables that point boto3, the AWS CLI and the SDK at the local cloud."""
    return environment_of(known_endpoint())


def environment_of(endpoint: Endpoint) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint.endpoint_url,
        "AWS_ENDPOINT_URL_SAGEMAKER": endpoint.sagemaker_url,
        "AWS_ACCESS_KEY_ID": endpoint.account,
        "AWS_SECRET_ACCESS_KEY": ROOT_SECRET,
        "AWS_DEFAULT_REGION": endpoint.region,
        "AWS_REGION": endpoint.region,
    }


def tick() -> dict[str, Any]:
    """Run the reconciler now instead of at its next minute; returns what it returned."""
    return invoke(running_endpoint(), "reconcile", {"source": "microtuning.local", "detail-type": "Tick"})


def reclaim(job_name: str) -> None:
    """Take a spot job's machine away, as AWS may at any moment: no signal, no grace.

    Raises:
        LocalRequestRefused: there is no such job, or it is no spot job that runs.
    """
    try:
        sagemaker.ask(running_endpoint(), "POST", "/_local/reclaim", {"job": job_name})
    except LocalRequestRefused as refused:
        raise LocalRequestRefused(
            f"The machine of {job_name} was not taken away: {refused.message}",
            next_step="See which attempts a run has with `microtuning runs show RUN`.",
        ) from refused


def faults(spec: dict[str, Any]) -> dict[str, Any]:
    """Make the local SageMaker misbehave on purpose; `{}` ends it. See microtuning_local.sagemaker.faults."""
    return sagemaker.ask(running_endpoint(), "POST", "/_local/faults", spec)


# Below: how the above is done.


def start(home: Home, before: Endpoint | None) -> Endpoint:
    """Start each process that does not run; both start at once, so their start-up times do not add up."""
    endpoint = start_missing(home, with_ports(before))
    silent = first_silent(endpoint)
    if silent and not has_both(endpoint):  # killed a moment ago, it still counted as running
        endpoint = start_missing(home, endpoint)
        silent = first_silent(endpoint)
    if silent:
        stop(home, endpoint)
        raise LocalCloudError(f"The {silent} process did not start.", log_path=str(home.logs / f"{silent}.log"))
    return endpoint


def start_missing(home: Home, endpoint: Endpoint) -> Endpoint:
    if not emulator_runs(endpoint):
        bury(endpoint.emulator_pid)
        pid = emulator.start(home, endpoint)
        endpoint = replace(endpoint, emulator_pid=pid, emulator_started=started_at(pid))
        write_endpoint(home, endpoint)
    if not sagemaker_runs(endpoint):
        bury(endpoint.sagemaker_pid)
        sagemaker.kill_left_jobs(home)
        pid = sagemaker.start(home, endpoint)
        endpoint = replace(endpoint, sagemaker_pid=pid, sagemaker_started=started_at(pid))
        write_endpoint(home, endpoint)
    return endpoint


def first_silent(endpoint: Endpoint) -> str | None:
    """Which of the two ended, or stayed silent until nobody would wait longer."""
    for name, waits, pid in (
        ("emulator", emulator.wait_healthy, endpoint.emulator_pid),
        ("sagemaker", sagemaker.wait_healthy, endpoint.sagemaker_pid),
    ):
        if pid is None or not waits(endpoint, pid):
            return name
    return None


def with_ports(before: Endpoint | None) -> Endpoint:
    """The addresses of last time, as long as nobody else took a port; else new ones."""
    if before and (is_running(before) or all(map(port_is_free, (before.port, before.sagemaker_port)))):
        return before
    if before and (emulator_runs(before) or sagemaker_runs(before)):
        return before
    fresh = Endpoint(
        endpoint_url=f"http://127.0.0.1:{free_port()}",
        sagemaker_url=f"http://127.0.0.1:{free_port()}",
        token=secrets.token_urlsafe(24),
    )
    return fresh


def stop(home: Home, endpoint: Endpoint) -> None:
    """First SageMaker, whose jobs still want to store their last checkpoint; then the emulator that stores it."""
    if sagemaker_runs(endpoint) and endpoint.sagemaker_pid:
        sagemaker.stop(endpoint.sagemaker_pid)
    bury(endpoint.sagemaker_pid)
    if emulator_runs(endpoint) and endpoint.emulator_pid:
        emulator.stop(endpoint.emulator_pid)
    bury(endpoint.emulator_pid)
    sagemaker.kill_left_jobs(home)
    shutil.rmtree(home.tmp, ignore_errors=True)
    write_endpoint(home, endpoint.stopped())


def bury(group: int | None) -> None:
    """End what a dead process left in its group; a group whose leader is another process by now is not ours."""
    if group is not None and started_at(group) is None:
        kill_group(group)
        reap(group)


def is_running(endpoint: Endpoint) -> bool:
    return has_both(endpoint) and emulator.is_healthy(endpoint) and sagemaker.is_healthy(endpoint)


def is_same_run(before: Endpoint, endpoint: Endpoint) -> bool:
    """Whether neither process was started anew."""
    return replace(before, deployed="") == replace(endpoint, deployed="")


def is_same_emulator(before: Endpoint, endpoint: Endpoint) -> bool:
    return (before.emulator_pid, before.emulator_started) == (endpoint.emulator_pid, endpoint.emulator_started)


def has_both(endpoint: Endpoint) -> bool:
    return emulator_runs(endpoint) and sagemaker_runs(endpoint)


def emulator_runs(endpoint: Endpoint) -> bool:
    return is_same_process(endpoint.emulator_pid, endpoint.emulator_started)


def sagemaker_runs(endpoint: Endpoint) -> bool:
    return is_same_process(endpoint.sagemaker_pid, endpoint.sagemaker_started)


def known_endpoint() -> Endpoint:
    endpoint = read_endpoint(local_home())
    if endpoint is None:
        raise LocalCloudError("The local cloud was never started here.", next_step=START_FIRST)
    return endpoint


def running_endpoint() -> Endpoint:
    endpoint = known_endpoint()
    if not is_running(endpoint):
        raise LocalCloudError("The local cloud is not running.", next_step=START_FIRST)
    return endpoint


def invoke(endpoint: Endpoint, function: str, event: dict[str, Any]) -> dict[str, Any]:
    """Invoke one of the stage's functions and wait for its answer."""
    from botocore.exceptions import BotoCoreError, ClientError

    name = f"microtuning-{STAGE}-{function.replace('_', '-')}"
    try:
        reply = root_client(endpoint, "lambda").invoke(FunctionName=name, Payload=json.dumps(event).encode())
    except (BotoCoreError, ClientError) as error:
        raise LocalCloudError(
            f"The function {function} could not be invoked: {error}",
            next_step="Run `microtuning local up`, which starts and deploys what is missing.",
        ) from error
    payload = json.loads(reply["Payload"].read() or b"null")
    if reply.get("FunctionError"):
        raise LocalCloudError(f"The function {function} failed: {payload}.", log_path=str(local_home().logs))
    return payload if isinstance(payload, dict) else {"result": payload}


def wake(cloud: LocalCloud, *, take_up_runs: bool, has_lost: bool) -> None:
    """After a start: take up runs whose executions died with the last process, and warm the workers meanwhile.

    `has_lost`: the tables are those of the last clean stop, or none; what was written since then is read from the bucket.
    """
    names = function_names(cloud.endpoint)
    if take_up_runs and "reconcile" in names:
        from microtuning_local.rebuild import read_tables_back

        try:
            if has_lost:
                read_tables_back(cloud)
            tick()
        except LocalCloudError as error:  # the cloud itself is up, and the schedule ticks again within a minute
            log.warning("the first tick failed: %s", error)
    on_the_way = [name for name in FIRST_NEEDED if name in names]
    threading.Thread(target=warm, args=(cloud.endpoint, on_the_way), daemon=True, name="warm-functions").start()


def function_names(endpoint: Endpoint) -> list[str]:
    prefix = f"microtuning-{STAGE}-"
    pages = root_client(endpoint, "lambda").get_paginator("list_functions").paginate()
    named = [function["FunctionName"] for page in pages for function in page["Functions"]]
    return [name.removeprefix(prefix).replace("-", "_") for name in named if name.startswith(prefix)]


def warm(endpoint: Endpoint, functions: list[str]) -> None:
    """Start one worker a function, one after another: a run's own work comes first on a small machine."""
    for name in functions:
        try:
            invoke(endpoint, name, {"microtuning": "warm"})
        except LocalCloudError as error:  # only a chance is lost: the first real event starts the worker
            log.debug("%s was not warmed: %s", name, error)
