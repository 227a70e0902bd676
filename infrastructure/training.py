"""What a training job runs on: the role that SageMaker assumes for it, and the image built from this repository.

The role may read what tenants own and write only what a run produces. One role serves all tenants of a stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aws_cdk as cdk
from aws_cdk import aws_ecr_assets as ecr_assets
from aws_cdk import aws_iam as iam
from constructs import Construct

from infrastructure.grants import GRANTS, Grant, statement
from infrastructure.names import BUCKET_ARN, JOB_ROLE, KEY_ARN, TRAINING_LOGS_ARN, objects_arn, sub

if TYPE_CHECKING:
    from pathlib import Path

    from infrastructure.parameters import Parameters

DOCKERFILE = "training_container/Dockerfile"
# Everything but what the Dockerfile copies, so that a word in the README builds no image. In order, as .dockerignore.
IMAGE_EXCLUDES = [
    "*",
    "!pyproject.toml",
    "!constraints.txt",
    "!training_container",
    "!sdk",
    "sdk/*",
    "!sdk/microtuning_core",
    "**/__pycache__",
    "**/*.pyc",
    "**/*.md",
]

JOB_GRANTS = {
    "list-objects": Grant(("s3:ListBucket",), (BUCKET_ARN,), {"StringLike": {"s3:prefix": "tenants/*"}}),
    "read": Grant(("s3:GetObject",), objects_arn("*")),
    "write": Grant(("s3:PutObject", "s3:AbortMultipartUpload"), objects_arn("runs/*/checkpoints/*", "runs/*/output/*")),
    "tidy-checkpoints": Grant(("s3:DeleteObject",), objects_arn("runs/*/checkpoints/*")),
    "use-key": Grant(("kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"), (KEY_ARN,)),
    "encrypt-volumes": GRANTS["encrypt-volumes"],
    "write-logs": Grant(
        ("logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"),
        (TRAINING_LOGS_ARN, f"{TRAINING_LOGS_ARN}:*"),
    ),
    "write-metrics": Grant(  # has no resource to name
        ("cloudwatch:PutMetricData",), ("*",), {"StringEquals": {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}}
    ),
    "log-in-to-ecr": Grant(("ecr:GetAuthorizationToken",), ("*",)),  # has no resource to name
    "pull-images": Grant(  # any account's: TrainingImageUri may be one of AWS's own images
        ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"),
        ("arn:${AWS::Partition}:ecr:${AWS::Region}:*:repository/*",),
    ),
}
# `*` crosses `/` in an ARN: tenants/a/specs/runs/x/output/y would pass for output, and what lies in specs/ starts a run.
JOB_NEVER_WRITES = Grant(("s3:PutObject", "s3:DeleteObject"), objects_arn("specs/*", "commands/*"))


class Training(Construct):
    """`image_uri`: the parameter TrainingImageUri or, where that is empty, the image of this repository."""

    def __init__(self, scope: Construct, *, parameters: Parameters, root: Path, image_uri: str) -> None:
        super().__init__(scope, "Training")
        self._role()
        given = parameters.image_uri.value_as_string
        self.image_uri = given if image_uri else self._given_or_built(given, root)

    def _given_or_built(self, given: str, root: Path) -> str:
        image = ecr_assets.DockerImageAsset(
            self,
            "Image",
            directory=str(root),
            file=DOCKERFILE,
            exclude=IMAGE_EXCLUDES,
            ignore_mode=cdk.IgnoreMode.DOCKER,
            platform=ecr_assets.Platform.LINUX_AMD64,
        )
        is_given = cdk.CfnCondition(
            self, "ImageIsGiven", expression=cdk.Fn.condition_not(cdk.Fn.condition_equals(given, ""))
        )
        is_given.override_logical_id("IsTrainingImageGiven")
        return cdk.Token.as_string(cdk.Fn.condition_if(is_given.logical_id, given, image.image_uri))

    def _role(self) -> iam.Role:
        # IfExists: an emulator's SageMaker assumes the role without saying for which account.
        for_us = {"StringEqualsIfExists": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID}}
        never = statement("never-start-anything", JOB_NEVER_WRITES)
        never.effect = iam.Effect.DENY
        return iam.Role(
            self,
            "JobRole",
            role_name=sub(JOB_ROLE),
            assumed_by=iam.ServicePrincipal("sagemaker.amazonaws.com", conditions=for_us),
            description="What a training job may do",
            inline_policies={
                "grants": iam.PolicyDocument(
                    statements=[*(statement(name, grant) for name, grant in JOB_GRANTS.items()), never]
                )
            },
        )
