"""The stage's bucket: specs, data, checkpoints and models of all tenants, each under tenants/<tenant>/; and beside it, on
AWS, the bucket of its access logs, which only S3 itself writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from constructs import Construct

from infrastructure.names import BUCKET, BUCKET_ARN, sub

if TYPE_CHECKING:
    from aws_cdk import aws_kms as kms

    from infrastructure.parameters import Parameters

ACCESS_LOGS_BUCKET = f"{BUCKET}-access"
# A pruned checkpoint and every older progress.json stay this long: time to undo a mistake, not an archive that costs.
OLD_VERSIONS_DAYS = 7
UNFINISHED_UPLOADS_DAYS = 7
ACCESS_LOGS_DAYS = 90


class Storage(Construct):
    """`bucket`: versioned, private, TLS only, encrypted with the stage's key; kept when the stack goes."""

    def __init__(self, scope: Construct, *, parameters: Parameters, key: kms.IKey) -> None:
        super().__init__(scope, "Storage")
        self.bucket = s3.Bucket(
            self,
            "Bucket",
            bucket_name=sub(BUCKET),
            versioned=True,
            enforce_ssl=True,
            encryption=s3.BucketEncryption.KMS,
            encryption_key=key,
            bucket_key_enabled=True,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            removal_policy=cdk.RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="old-versions",
                    noncurrent_version_expiration=cdk.Duration.days(OLD_VERSIONS_DAYS),
                    expired_object_delete_marker=True,
                ),
                s3.LifecycleRule(
                    id="unfinished-uploads",
                    abort_incomplete_multipart_upload_after=cdk.Duration.days(UNFINISHED_UPLOADS_DAYS),
                ),
            ],
        )
        # `event_bridge_enabled=True` would add a custom resource; CloudFormation has the property itself.
        cast("s3.CfnBucket", self.bucket.node.default_child).add_property_override(
            "NotificationConfiguration", {"EventBridgeConfiguration": {"EventBridgeEnabled": True}}
        )
        # The emulator speaks plain HTTP and would enforce the policy that refuses it.
        policy = cast("s3.BucketPolicy", self.bucket.policy).node.default_child
        cast("s3.CfnBucketPolicy", policy).cfn_options.condition = parameters.on_aws
        self._log_access(parameters)

    def _log_access(self, parameters: Parameters) -> None:
        """Who read and wrote what, for whoever has to find out. Under S3's own key: its log delivery takes no other."""
        access = s3.Bucket(
            self,
            "AccessLogs",
            bucket_name=sub(ACCESS_LOGS_BUCKET),
            enforce_ssl=True,
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            removal_policy=cdk.RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
            lifecycle_rules=[s3.LifecycleRule(id="expire", expiration=cdk.Duration.days(ACCESS_LOGS_DAYS))],
        )
        access.add_to_resource_policy(
            iam.PolicyStatement(
                sid="AccessLogsOfOurBucket",
                principals=[iam.ServicePrincipal("logging.s3.amazonaws.com")],
                actions=["s3:PutObject"],
                resources=[access.arn_for_objects("*")],
                conditions={
                    "StringEquals": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID},
                    "ArnLike": {"aws:SourceArn": sub(BUCKET_ARN)},
                },
            )
        )
        for made in (access.node.default_child, cast("s3.BucketPolicy", access.policy).node.default_child):
            cast("cdk.CfnResource", made).cfn_options.condition = parameters.on_aws
        logging = cdk.Fn.condition_if(
            parameters.on_aws.logical_id, {"DestinationBucketName": sub(ACCESS_LOGS_BUCKET)}, cdk.Aws.NO_VALUE
        )
        cast("s3.CfnBucket", self.bucket.node.default_child).logging_configuration = logging
