"""AWS as a job sees it: clients with the credentials of the job's role, from the emulator's STS."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from microtuning_local.clients import local_client
from microtuning_local.sagemaker.rules import Refusal, role_not_assumable

if TYPE_CHECKING:
    from microtuning_local.home import Endpoint

log = logging.getLogger(__name__)

SESSION_S = 3600
MAX_SESSION_NAME = 64

# What an emulator that was started anew answers to the keys it gave before, and how long a job waits for it.
_KEYS_UNKNOWN = frozenset({"InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException", "ExpiredToken"})
_RESTART_PATIENCE_S, _RETRY_AFTER_S = 60.0, 0.5


class RoleSession:
    """Assumes a role when a client needs credentials, and again before they expire. Clients are made once."""

    def __init__(self, endpoint: Endpoint, sts: Any, role_arn: str, session_name: str) -> None:
        self.endpoint, self.sts = endpoint, sts
        self.role_arn, self.session_name = role_arn, session_name
        self.clients: dict[str, Any] = {}
        self._keys_lost_at_s: float | None = None

    def credentials(self) -> dict[str, str]:
        """Fresh credentials in the shape botocore refreshes from; a Refusal when the role cannot be assumed."""
        from botocore.exceptions import ClientError

        try:
            given = self.sts.assume_role(
                RoleArn=self.role_arn, RoleSessionName=self.session_name, DurationSeconds=SESSION_S
            )["Credentials"]
        except ClientError as error:
            raise role_not_assumable(self.role_arn) from error
        return {
            "access_key": given["AccessKeyId"],
            "secret_key": given["SecretAccessKey"],
            "token": given["SessionToken"],
            "expiry_time": given["Expiration"].isoformat(),
        }

    def client(self, service: str) -> Any:
        """A client with the role's rights. For one thread at a time to ask for; the client itself serves many."""
        if service not in self.clients:
            client = local_client(self._session, self.endpoint, service)
            client.meta.events.register(f"needs-retry.{service}", self._wait_for_the_emulator)
            self.clients[service] = client
        return self.clients[service]

    def _wait_for_the_emulator(self, response: tuple[Any, dict[str, Any]] | None, **_: Any) -> float | None:
        """Seconds after which botocore asks again; None where nothing is to be waited for.

        After a crash the emulator knows neither the keys nor, for a few seconds, the role and the bucket. A job on AWS
        would notice nothing, so ours does not either.
        """
        code = response[1].get("Error", {}).get("Code") if response else None
        now_s = time.monotonic()
        if code in _KEYS_UNKNOWN:
            self._keys_lost_at_s = self._keys_lost_at_s or now_s
            self._renew()
        elif self._keys_lost_at_s is None or code != "NoSuchBucket":
            return None
        if now_s - self._keys_lost_at_s < _RESTART_PATIENCE_S:
            return _RETRY_AFTER_S
        self._keys_lost_at_s = None
        return None

    def _renew(self) -> None:
        from botocore.exceptions import BotoCoreError

        try:
            self.credentials()
        except (Refusal, BotoCoreError) as error:  # the stack, and the role with it, is not there again yet
            log.info("%s cannot be assumed yet: %s", self.role_arn, error)
            return
        # They are refreshed by whoever signs the next request; botocore offers no public way to say that it is time.
        self._session.get_credentials()._expiry_time = datetime.now(UTC)

    @cached_property
    def _session(self) -> Any:
        import boto3
        from botocore.credentials import RefreshableCredentials

        session = quick_session()
        # botocore offers no public way to set credentials that refresh; its own assume-role code does the same.
        session._credentials = RefreshableCredentials.create_from_metadata(
            self.credentials(), refresh_using=self.credentials, method="sts-assume-role"
        )
        return boto3.Session(botocore_session=session, region_name=self.endpoint.region)


def quick_session() -> Any:
    """A botocore session that shares its service models with all others: a job's first client takes 20 ms, not 300."""
    from botocore.session import get_session

    session = get_session()
    session.register_component("data_loader", shared_loader())
    return session


@cache
def shared_loader() -> Any:
    from botocore.loaders import create_loader

    return create_loader()


def warm_models(endpoint: Endpoint) -> None:
    """Read the models of the services a job needs before the first job needs them."""
    import boto3

    session = boto3.Session("warm", "warm", botocore_session=quick_session(), region_name=endpoint.region)
    for service in ("s3", "logs"):
        local_client(session, endpoint, service)


def role_session(endpoint: Endpoint, sts: Any, role_arn: str, job_name: str) -> RoleSession:
    return RoleSession(endpoint, sts, role_arn, f"SageMaker-{job_name}"[:MAX_SESSION_NAME])
