"""The /opt/ml tree of one host of a job, and what SageMaker writes into it before the container starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from microtuning_local.sagemaker.rules import CONTAINER_CHECKPOINTS

if TYPE_CHECKING:
    from microtuning_local.sagemaker.jobs import Job

FAILURE_CHARACTERS = 1024
CONTAINER_ROOT = "/opt/ml"


@dataclass(frozen=True)
class MlTree:
    """Folders of one host; `root` stands for /opt/ml."""

    root: Path

    @property
    def channels(self) -> Path:
        return self.root / "input" / "data"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def output_data(self) -> Path:
        return self.root / "output" / "data"

    def checkpoints(self, job: Job) -> Path:
        """Where the job keeps checkpoints: CheckpointConfig.LocalPath, which is a path below /opt/ml."""
        local = (job.request.get("CheckpointConfig") or {}).get("LocalPath") or CONTAINER_CHECKPOINTS
        return self.root / PurePosixPath(local).relative_to(CONTAINER_ROOT)

    def renew(self) -> None:
        """A new machine has an empty disk."""
        shutil.rmtree(self.root, ignore_errors=True)
        for folder in (self.root / "input" / "config", self.channels, self.model, self.output_data):
            folder.mkdir(parents=True)

    def failure_text(self) -> str:
        """The first 1,024 characters of /opt/ml/output/failure, or nothing."""
        try:
            return (self.root / "output" / "failure").read_text(errors="replace")[:FAILURE_CHARACTERS].strip()
        except FileNotFoundError:
            return ""


def write_config(tree: MlTree, job: Job, hosts: list[str], host: str) -> None:
    """input/config/*.json, as the container contract has them: every hyperparameter is a string."""
    files = {
        "hyperparameters": job.request.get("HyperParameters", {}),
        "resourceconfig": resource_config(job, hosts, host),
        "inputdataconfig": input_data_config(job),
        "checkpointconfig": job.request.get("CheckpointConfig", {}),
    }
    for name, content in files.items():
        (tree.root / "input" / "config" / f"{name}.json").write_text(json.dumps(content))


def resource_config(job: Job, hosts: list[str], host: str) -> dict[str, Any]:
    return {
        "current_host": host,
        "hosts": hosts,
        "network_interface_name": "lo",
        "current_instance_type": job.instance_type,
        "current_group_name": "homogeneousCluster",
        "instance_groups": [
            {"instance_group_name": "homogeneousCluster", "instance_type": job.instance_type, "hosts": hosts}
        ],
    }


def input_data_config(job: Job) -> dict[str, Any]:
    return {channel["ChannelName"]: channel_config(channel) for channel in job.request.get("InputDataConfig", [])}


def channel_config(channel: dict[str, Any]) -> dict[str, str]:
    """A FastFile channel shows as File: the container cannot tell them apart."""
    source = channel["DataSource"].get("S3DataSource", {})
    return {
        "ContentType": channel.get("ContentType", ""),
        "TrainingInputMode": "File",
        "S3DistributionType": source.get("S3DataDistributionType", "FullyReplicated"),
        "RecordWrapperType": channel.get("RecordWrapperType", "None"),
    }
