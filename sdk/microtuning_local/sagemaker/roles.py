"""AWS as a job sees it: clients with the credentials of the job's role, from the emulator's STS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from microtuning_local.clients import local_client
from microtuning_local.sagemaker.rules import role_not_assumable

if TYPE_CHECKING:
    from microtuning_local.home import Endpoint

SESSION_S = 3600
MAX_SESSION_NAME = 64


@dataclass(frozen=True)
class RoleSession:
    """Assumes the role when a client needs credentials, and again before they expire."""

    endpoint: Endpoint
    sts: Any
    role_arn: str
    session_name: str

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
        import boto3
        from botocore.credentials import RefreshableCredentials
        from botocore.session import get_session

        session = get_session()
        # botocore offers no public way to set refreshing credentials on a session; its own assume-role code does this.
        fresh = RefreshableCredentials.create_from_metadata(
            self.credentials(), refresh_using=self.credentials, method="sts-assume-role"
        )
        session._credentials = fresh  # type: ignore[attr-defined]
        own = boto3.Session(botocore_session=session, region_name=self.endpoint.region)
        return local_client(own, self.endpoint, service)


def role_session(endpoint: Endpoint, sts: Any, role_arn: str, job_name: str) -> RoleSession:
    return RoleSession(endpoint, sts, role_arn, f"SageMaker-{job_name}"[:MAX_SESSION_NAME])
