"""Every SM_* variable that SageMaker's own training toolkit would set.

The platform sets only TRAINING_JOB_NAME, TRAINING_JOB_ARN and the request's Environment; SM_* come from a toolkit inside
AWS's images. An image of our own derives them itself, so that a user's script finds what it would find there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .paths import MlTree


def derive(
    tree: MlTree, hyperparameters: Mapping[str, Any], *, entry: str = "", arguments: list[str]
) -> dict[str, str]:
    """The variables, by name; `entry` is the user's script, `arguments` its command line."""
    resources = _json_or_empty(tree.input_config / "resourceconfig.json")
    inputs = _json_or_empty(tree.input_config / "inputdataconfig.json")
    gpus = count_gpus()
    variables = {
        **_places(tree),
        **_channels(tree),
        **_hyperparameters(hyperparameters),
        **_machines(resources),
        "SM_NUM_CPUS": str(os.cpu_count() or 1),
        "SM_NUM_GPUS": str(gpus),
        "SM_NUM_NEURONS": "0",
        "SM_LOG_LEVEL": "20",
        "SM_RESOURCE_CONFIG": json.dumps(resources),
        "SM_INPUT_DATA_CONFIG": json.dumps(inputs),
        "SM_USER_ARGS": json.dumps(arguments),
        "SM_USER_ENTRY_POINT": entry,
        "SM_ENTRY_SCRIPT": entry,
        "SM_MODULE_NAME": entry.removesuffix(".py"),
        "SM_FRAMEWORK_PARAMS": "{}",
        "SM_DISTRIBUTED_CONFIG": "{}",
    }
    return variables | {
        "SM_TRAINING_ENV": json.dumps(_training_environment(variables, hyperparameters, resources, inputs))
    }


def _places(tree: MlTree) -> dict[str, str]:
    output = tree.output_data.parent
    return {
        "SM_MODEL_DIR": str(tree.model),
        "SM_CHECKPOINT_DIR": str(tree.checkpoints),  # the toolkit has none, so its scripts name /opt/ml/checkpoints
        "SM_INPUT_DIR": str(tree.root / "input"),
        "SM_INPUT_DATA_DIR": str(tree.root / "input" / "data"),
        "SM_INPUT_CONFIG_DIR": str(tree.input_config),
        "SM_OUTPUT_DIR": str(output),
        "SM_OUTPUT_DATA_DIR": str(tree.output_data),
        "SM_OUTPUT_INTERMEDIATE_DIR": str(output / "intermediate"),
        "SM_OUTPUT_FAILURE": str(tree.failure),
        "SM_SOURCE_DIR": str(tree.code),
        "SM_MODULE_DIR": str(tree.code),
    }


def _channels(tree: MlTree) -> dict[str, str]:
    named = {f"SM_CHANNEL_{_upper(name)}": str(tree.channel(name)) for name in tree.channels}
    return named | {"SM_CHANNELS": json.dumps(tree.channels)}


def _hyperparameters(values: Mapping[str, Any]) -> dict[str, str]:
    named = {f"SM_HP_{_upper(name)}": as_text(value) for name, value in values.items()}
    return named | {"SM_HPS": json.dumps(values)}


def _machines(resources: Mapping[str, Any]) -> dict[str, str]:
    hosts = resources.get("hosts") or ["algo-1"]
    current = resources.get("current_host") or hosts[0]
    groups = resources.get("instance_groups") or []
    group = resources.get("current_group_name") or "homogeneousCluster"
    mine: list[str] = next((each["hosts"] for each in groups if each["instance_group_name"] == group), hosts)
    return {
        "SM_HOSTS": json.dumps(hosts),
        "SM_CURRENT_HOST": current,
        "SM_HOST_COUNT": str(len(hosts)),
        "SM_CURRENT_HOST_RANK": str(sorted(hosts).index(current)),
        "SM_MASTER_ADDR": sorted(hosts)[0],
        "SM_MASTER_PORT": "7777",
        "SM_NETWORK_INTERFACE_NAME": resources.get("network_interface_name") or "eth0",
        "SM_CURRENT_INSTANCE_TYPE": resources.get("current_instance_type") or "local",
        "SM_CURRENT_INSTANCE_GROUP": group,
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": json.dumps(mine),
        "SM_INSTANCE_GROUPS": json.dumps([each["instance_group_name"] for each in groups] or [group]),
        "SM_INSTANCE_GROUPS_DICT": json.dumps({each["instance_group_name"]: each for each in groups}),
        "SM_DISTRIBUTION_INSTANCE_GROUPS": "[]",
        "SM_IS_HETERO": json.dumps(len(groups) > 1),
    }


def _training_environment(
    variables: Mapping[str, str], hyperparameters: Mapping[str, Any], resources: Any, inputs: Any
) -> dict[str, Any]:
    """The same once more, as one JSON object with the toolkit's keys."""
    prefix = "SM_CHANNEL_"
    return {
        "channel_input_dirs": {
            key.removeprefix(prefix).lower(): path for key, path in variables.items() if key.startswith(prefix)
        },
        "current_host": variables["SM_CURRENT_HOST"],
        "hosts": json.loads(variables["SM_HOSTS"]),
        "hyperparameters": dict(hyperparameters),
        "input_data_config": inputs,
        "input_dir": variables["SM_INPUT_DIR"],
        "input_config_dir": variables["SM_INPUT_CONFIG_DIR"],
        "is_master": variables["SM_CURRENT_HOST"] == variables["SM_MASTER_ADDR"],
        "job_name": os.environ.get("TRAINING_JOB_NAME", ""),
        "model_dir": variables["SM_MODEL_DIR"],
        "module_dir": variables["SM_MODULE_DIR"],
        "module_name": variables["SM_MODULE_NAME"],
        "network_interface_name": variables["SM_NETWORK_INTERFACE_NAME"],
        "num_cpus": int(variables["SM_NUM_CPUS"]),
        "num_gpus": int(variables["SM_NUM_GPUS"]),
        "output_data_dir": variables["SM_OUTPUT_DATA_DIR"],
        "output_dir": variables["SM_OUTPUT_DIR"],
        "resource_config": resources,
        "user_entry_point": variables["SM_USER_ENTRY_POINT"],
    }


def command_line(hyperparameters: Mapping[str, Any]) -> list[str]:
    """`--key value` pairs by key, as the toolkit gives them: True is "True", None is empty, one letter gets one dash.

    Lists and objects are JSON, which the toolkit writes in Python's own notation that nothing else can read.
    """
    pairs = [(f"--{key}" if len(key) > 1 else f"-{key}", hyperparameters[key]) for key in sorted(hyperparameters)]
    return [part for flag, value in pairs for part in (flag, as_text(value))]


def as_text(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def count_gpus() -> int:
    """By device files: asking CUDA in this process would make it unable to fork workers that use CUDA."""
    devices = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir()) if devices.is_dir() else 0


def _upper(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _json_or_empty(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
