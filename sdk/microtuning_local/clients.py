"""boto3 clients of the local cloud. Addresses and credentials are given; the user's own AWS settings play no part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtuning_local.home import ROOT_SECRET

if TYPE_CHECKING:
    from microtuning_local.home import Endpoint


def root_client(endpoint: Endpoint, service: str, *, timeout_s: float = 60) -> Any:
    """A client with the rights of the account's root user."""
    import boto3

    session = boto3.Session(
        aws_access_key_id=endpoint.account, aws_secret_access_key=ROOT_SECRET, region_name=endpoint.region
    )
    return local_client(session, endpoint, service, timeout_s=timeout_s)


def local_client(session: Any, endpoint: Endpoint, service: str, *, timeout_s: float = 60) -> Any:
    """A client of `session` that talks to the local cloud, with no proxy between."""
    from botocore.config import Config

    config = Config(
        retries={"max_attempts": 4, "mode": "standard"},
        proxies={},
        read_timeout=timeout_s,
        s3={"addressing_style": "path"},
    )
    url = endpoint.sagemaker_url if service == "sagemaker" else endpoint.endpoint_url
    return session.client(service, endpoint_url=url, config=config)
