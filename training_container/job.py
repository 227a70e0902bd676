"""What this job was asked to do: the spec and the plan from the `config` channel, and who it is from the environment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveInt

from microtuning_core.domain.record import Record, UsdAmount
from microtuning_core.domain.reliability import ON_DEMAND_MTBF_S
from microtuning_core.domain.spec import RunSpec

from .archives import check_sha256, unpack_zip
from .failures import PlatformFailure
from .paths import MlTree


class Plan(Record):
    """plan.json: where this attempt runs.

    micro_batch_size: in rows; None lets the engine choose by tokens. mtbf_s: mean time between failures there.
    """

    run_id: str
    attempt: PositiveInt
    lineage: PositiveInt
    instance_type: str
    count: PositiveInt
    spot: bool = False
    micro_batch_size: PositiveInt | None = None
    max_runtime_s: PositiveInt
    price_usd_per_hour: UsdAmount
    mtbf_s: PositiveInt = ON_DEMAND_MTBF_S


@dataclass(frozen=True)
class Job:
    """One attempt of a run, as the container sees it."""

    tree: MlTree
    spec: RunSpec
    plan: Plan
    torch_threads: int
    progress_every_s: float

    @property
    def run_id(self) -> str:
        return self.plan.run_id

    @property
    def algorithm(self) -> Any:
        return self.spec.algorithm

    @property
    def base_model(self) -> str:
        return self.spec.model.arch or self.spec.model.base or ""


def read_job(environment: Mapping[str, str]) -> Job:
    """The job under MICROTUNING_ML_ROOT.

    Raises:
        PlatformFailure: the config channel is not whole, which no user can correct.
    """
    tree = MlTree.from_environment(environment)
    config = tree.channel("config")
    try:
        spec = RunSpec.model_validate_json((config / "spec.json").read_bytes())
        plan = Plan.model_validate_json((config / "plan.json").read_bytes())
    except (OSError, ValueError) as error:
        raise PlatformFailure(f"The config channel cannot be read: {error}") from error
    return Job(
        tree=tree,
        spec=spec,
        plan=plan,
        torch_threads=int(environment.get("MICROTUNING_TORCH_THREADS") or os.cpu_count() or 1),
        progress_every_s=float(environment.get("MICROTUNING_PROGRESS_EVERY_S") or 10),
    )


def unpack_code(tree: MlTree, sha256: str | None = None) -> None:
    """Put the `code` channel (one code.zip, or a folder) into the code folder, replacing what an earlier start left.

    sha256: of the archive, as the spec has it; None does not look.
    """
    channel = tree.channel("code")
    if not channel.is_dir():
        return
    shutil.rmtree(tree.code, ignore_errors=True)
    archives = sorted(channel.glob("*.zip"))
    if archives:
        if sha256:
            check_sha256(archives[0], sha256)
        unpack_zip(archives[0], tree.code)
    else:
        shutil.copytree(channel, tree.code)


def script_hyperparameters(job: Job) -> dict[str, Any]:
    """What a user's script sees: SageMaker's strings, each read as JSON where it is JSON, overlaid with the exact values.

    SageMaker allows 100 keys of 2,500 characters and only strings; config/hyperparameters.json has no such limits.
    Paths under /opt/ml are where this machine keeps them, so that one call of fit() runs here and on AWS.
    """
    raw = _json_file(job.tree.input_config / "hyperparameters.json")
    exact = _json_file(job.tree.channel("config") / "hyperparameters.json")
    sagemakers = {key: _decoded(value) for key, value in raw.items()}
    values: dict[str, Any] = job.tree.located(sagemakers | getattr(job.algorithm, "hyperparameters", {}) | exact)
    return values


def _json_file(path: Any) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
