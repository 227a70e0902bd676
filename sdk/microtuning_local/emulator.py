"""The emulator of everything but SageMaker: ministack, as a process of its own, through its environment and public API.

Each setting below was tried; docs/local-cloud.md says what it is for and what still differs from AWS.
"""

from __future__ import annotations

import http.client
import os
import site
import sys
from typing import TYPE_CHECKING

from microtuning_local.gate import SAVED_MARK
from microtuning_local.processes import end_group, spawn, started_at, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from microtuning_local.home import Endpoint, Home

ARGV = [sys.executable, "-m", "microtuning_local.gate"]

# A save of the tables at exit takes longer than the exit itself once there are many runs.
EXIT_GRACE_S = 20.0


def start(home: Home, endpoint: Endpoint) -> int:
    """Start it; returns its pid, which is also its process group. `is_healthy` says when it answers."""
    return spawn(ARGV, env=environment(home, endpoint), log=home.logs / "emulator.log", cwd=home.tmp)


def stop(pid: int) -> None:
    """SIGTERM, then an end to every worker it left behind."""
    end_group(pid, grace_s=EXIT_GRACE_S)


def is_healthy(endpoint: Endpoint) -> bool:
    return answers(endpoint.port, "/_ministack/health")


def wait_healthy(endpoint: Endpoint, pid: int, *, timeout_s: float = 30) -> bool:
    """Wait for the first answer; False when it ended or stayed silent."""
    wait_until(lambda: is_healthy(endpoint) or started_at(pid) is None, timeout_s=timeout_s)
    return is_healthy(endpoint)


def environment(home: Home, endpoint: Endpoint) -> dict[str, str]:
    """The whole environment of the emulator: built, never inherited, because every Lambda worker gets a copy of it."""
    return base_environment(home) | {
        "GATEWAY_PORT": str(endpoint.port),
        "BIND_HOST": "127.0.0.1",
        "AUTH": "true",
        "PERSIST_STATE": "1",
        "STATE_DIR": str(home.state),
        SAVED_MARK: str(home.saved_mark),
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(home.s3),
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "LAMBDA_EXECUTOR": "local",
        # There is no Docker here to look for or to clean up after, whatever the machine runs beside us.
        "DOCKER_HOST": f"unix://{home.tmp}/no-docker.sock",
        "AWS_ENDPOINT_URL_SAGEMAKER": endpoint.sagemaker_url,
    }


def base_environment(home: Home) -> dict[str, str]:
    """What a Python process needs, and nothing of the user's shell: no proxies, profiles, tokens or AWS settings."""
    kept = inherited("PATH", "HOME", "PYTHONPATH")
    user_site = {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {}
    return (
        kept
        | user_site
        | {
            "LANG": "C.UTF-8",
            "TMPDIR": str(home.tmp),
            "PYTHONUNBUFFERED": "1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    )


def inherited(*names: str) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def answers(port: int, path: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = 2) -> bool:
    """Whether a local server answers 200; never through a proxy, which `http.client` does not know."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=dict(headers or {}))
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
