"""Starting, stopping and asking the local SageMaker's server process."""

from __future__ import annotations

import http.client
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import LocalCloudError, LocalRequestRefused
from microtuning_local.emulator import answers, base_environment, inherited
from microtuning_local.home import ROOT_SECRET, local_home
from microtuning_local.processes import end_group, is_same_process, kill_group, spawn, started_at, wait_until

if TYPE_CHECKING:
    from microtuning_local.home import Endpoint, Home

ARGV = [sys.executable, "-m", "microtuning_local.sagemaker.server"]

# Facts about this machine that a job may need as well: its accelerators, threads and model cache. No secrets.
MACHINE_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE")

# On SIGTERM it ends its jobs and stores what they left; a machine of AWS would give no time at all.
EXIT_GRACE_S = 15.0


def start(home: Home, endpoint: Endpoint) -> int:
    return spawn(ARGV, env=environment(home, endpoint), log=home.logs / "sagemaker.log", cwd=home.tmp)


def environment(home: Home, endpoint: Endpoint) -> dict[str, str]:
    """Its whole environment. Root credentials are for its own events; a job gets those of its role."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("MICROTUNING_LOCAL_")}
    return (
        base_environment(home)
        | inherited(*MACHINE_VARIABLES)
        | settings
        | {
            "MICROTUNING_LOCAL_ROOT": str(home.root),
            "AWS_ENDPOINT_URL": endpoint.endpoint_url,
            "AWS_ACCESS_KEY_ID": endpoint.account,
            "AWS_SECRET_ACCESS_KEY": ROOT_SECRET,
            "AWS_DEFAULT_REGION": endpoint.region,
        }
    )


def stop(pid: int) -> None:
    end_group(pid, grace_s=EXIT_GRACE_S)


def is_healthy(endpoint: Endpoint) -> bool:
    return answers(endpoint.sagemaker_port, "/_local/health", bearer(endpoint))


def wait_healthy(endpoint: Endpoint, pid: int, *, timeout_s: float = 30) -> bool:
    wait_until(lambda: is_healthy(endpoint) or started_at(pid) is None, timeout_s=timeout_s)
    return is_healthy(endpoint)


def bearer(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}"}


def ask(endpoint: Endpoint, verb: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One question to the admin endpoint; a refusal is raised with the server's own words.

    Raises:
        LocalRequestRefused: it cannot do what was asked. LocalCloudError: it does not answer, or not as it should.
    """
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.sagemaker_port, timeout=10)
    try:
        connection.request(verb, path, json.dumps(body or {}), bearer(endpoint) | {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer: dict[str, Any] = json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LocalCloudError(
            f"The local SageMaker does not answer ({error}).", next_step="Run `microtuning local up` and try again."
        ) from error
    finally:
        connection.close()
    if reply.status == 400:
        raise LocalRequestRefused(str(answer.get("message", answer)), next_step="Correct the request and ask again.")
    if reply.status != 200:
        raise LocalCloudError(
            f"The local SageMaker answered with an error: {answer.get('message', answer)}",
            log_path=str(local_home().logs / "sagemaker.log"),
        )
    return answer


def kill_left_jobs(home: Home) -> None:
    """End job processes whose server died before them: each job folder names its processes."""
    for record in home.jobs.glob("*/processes.json"):
        for pid, started in json.loads(record.read_text()):
            if is_same_process(pid, started):
                kill_group(pid)
        record.unlink()
