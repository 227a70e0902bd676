"""The launcher's role in a session that is tagged with a tenant, where tenants are told apart by session tags.

What the session makes carries its tag on: SageMaker takes it when it assumes the role of the job
(CreateTrainingJob's SessionChainingConfig), and both roles reach what belongs to `${aws:PrincipalTag/tenant}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import boto3
    from mypy_boto3_sagemaker import SageMakerClient

TAG = "tenant"
SESSION_S = 900  # the least that STS gives; one call is made in it


def sagemaker_for(session: boto3.Session, role_arn: str, tenant: str) -> SageMakerClient:
    """A client whose jobs are the tenant's; its credentials last for minutes and are not kept."""
    import boto3

    given = session.client("sts").assume_role(
        RoleArn=role_arn,
        RoleSessionName=f"launch-{tenant}",
        DurationSeconds=SESSION_S,
        Tags=[{"Key": TAG, "Value": tenant}],
    )["Credentials"]
    tagged = boto3.Session(
        aws_access_key_id=given["AccessKeyId"],
        aws_secret_access_key=given["SecretAccessKey"],
        aws_session_token=given["SessionToken"],
        region_name=session.region_name,
    )
    return tagged.client("sagemaker")
