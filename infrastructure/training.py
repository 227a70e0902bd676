"""What a training job runs: the image that is given by parameter, or the one built from this repository."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aws_cdk as cdk
from aws_cdk import aws_ecr_assets as ecr_assets
from constructs import Construct

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


class Training(Construct):
    """`image_uri`: the parameter TrainingImageUri or, where that is empty, the image of this repository."""

    def __init__(self, scope: Construct, *, parameters: Parameters, root: Path, image_uri: str) -> None:
        super().__init__(scope, "Training")
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
