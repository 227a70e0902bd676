"""What a user asks for: one run, from data and a reward to a model.

    name: sort-digits
    model: {arch: Transformer}
    algorithm: {type: grpo, group_size: 16, epochs: 4, batch_size: 256}
    reward: {entry: "rewards:exact_match"}
    data: {train: s3://bucket/tenants/default/datasets/…/train.jsonl, eval: s3://…/eval.jsonl}
    code: {uri: s3://bucket/tenants/default/code/…/code.zip, sha256: …, entry: rewards}

The same words in Python, YAML and JSON. Defaults are the vetted settings. Unknown fields are refused, and every problem is
reported at once, by field and (for a file) by line. What each algorithm can be asked is in `algorithms`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, model_validator

from microtuning_core.domain.algorithms import (
    Algorithm,
    EnvironmentSpec,
    GrpoSettings,
    LossSpec,
    MultiTurnSettings,
    RewardSpec,
)
from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.errors import Problem
from microtuning_core.domain.fields import ModelSource, S3Location, as_value_error
from microtuning_core.domain.layout import belongs_to, parse_s3_uri
from microtuning_core.domain.names import check_run_name, check_tenant
from microtuning_core.domain.record import Record, UsdAmount, Value

POLICIES = (GrpoSettings, MultiTurnSettings)
PRESETS = ("Transformer", "tiny-decoder")  # "Transformer" is the friendly name of tiny-decoder


class ModelSpec(Value):
    """What is trained. Exactly one of `arch` and `base`.

    arch: a preset with random weights and a character tokenizer made from the data ("Transformer" = tiny-decoder).
    base: a hub id, an own S3 prefix (s3://…/), or a local directory, which fit() uploads once by its hash.
    """

    arch: Literal["Transformer", "tiny-decoder"] | None = None
    base: ModelSource | None = None
    revision: str | None = None
    adapter: Literal["lora", "qlora", "none"] | None = None
    rank: int = Field(16, ge=1, le=512)
    alpha: float = Field(32, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1, description="of the adapter's inputs")
    target_modules: tuple[str, ...] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    merge: bool = Field(False, description="also leave the adapter merged into plain weights, in merged/")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, a third more time")

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelSpec:
        if (self.arch is None) == (self.base is None):
            raise ValueError("give exactly one of arch (a preset) and base (a hub id or an s3:// prefix)")
        return self

    @property
    def effective_adapter(self) -> Literal["lora", "qlora", "none"]:
        """A preset trains all its weights, a base model an adapter, unless the user says otherwise."""
        return self.adapter or ("none" if self.arch else "lora")


class DataSpec(Value):
    """JSONL files (also .gz), or folders of them; a folder ends in "/"."""

    train: S3Location
    eval: S3Location | None = None


class ComputeSpec(Value):
    """Where it runs. Everything has a default: the cheapest machine that fits."""

    instance: str = "auto"
    count: int = Field(1, ge=1, le=1, description="instances a job; one until several machines are tried on AWS")
    processes: int | None = Field(
        None, ge=1, le=16, description="training processes; one a GPU, or one, where not given"
    )
    gradient_compression: Literal["none", "float16", "bfloat16"] = Field(
        "none", description="of what processes send each other; half the bytes, and gradients rounded"
    )
    spot: Literal["auto"] | bool = "auto"
    recovery: Literal["fast", "cheap"] = Field(
        "cheap", description="fast: on-demand, and the machines are kept for a next attempt (a warm pool)"
    )
    hung_after_s: int | None = Field(
        None, ge=1, description="silence after which a worker counts as hung; by default 600, of a custom loop 3600"
    )
    deadline_s: int = Field(86_400, ge=600, description="how long a run may wait for capacity, in all")
    max_runtime_s: int = Field(86_400, ge=300, le=2_419_200, description="SageMaker's limit is 28 days")
    fallbacks: tuple[str, ...] = ()
    network_isolation: bool = False

    @model_validator(mode="after")
    def _known_types(self) -> ComputeSpec:
        unknown = [each for each in (self.instance, *self.fallbacks) if each != "auto" and each not in CATALOG]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not in the catalog; see docs/instances.md")
        return self


class CheckpointSpec(Value):
    """When a run saves, by whichever comes first, and what of it is kept."""

    every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="auto: as often as pays, by what a checkpoint costs and how often machines of its kind fail"
    )
    every_seconds: int | None = Field(None, ge=1, description="of training; instead of auto, or beside every_steps")
    every_epoch: bool = True
    keep: int = Field(2, ge=1, description="newest checkpoints kept of a lineage")
    best_metric: str | None = Field(None, description="the checkpoint that is best by this metric is kept as well")
    best_is: Literal["highest", "lowest"] = "highest"


class CodeSpec(Value):
    """The user's sources, uploaded by their hash."""

    uri: S3Location
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    entry: str | None = None


class RunSpec(Record):
    """A run, as its user describes it."""

    name: Annotated[str, as_value_error(check_run_name)]
    tenant: Annotated[str, as_value_error(check_tenant)] = "default"
    model: ModelSpec
    algorithm: Algorithm
    reward: RewardSpec | None = None
    loss: LossSpec | None = None
    environment: EnvironmentSpec = EnvironmentSpec()
    data: DataSpec
    compute: ComputeSpec = ComputeSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    budget_usd: UsdAmount | None = Field(None, gt=Decimal(0))
    seed: int = Field(0, ge=0, lt=2**31)
    code: CodeSpec | None = None
    environment_variables: dict[str, str] = {}

    @property
    def sha256(self) -> str:
        """Of the canonical JSON: two specs that mean the same have the same hash."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def locations(spec: RunSpec) -> list[tuple[str, str]]:
    """`(field, s3 uri)` of everything the job will read."""
    named: Sequence[tuple[str, str | None]] = (
        ("data.train", spec.data.train),
        ("data.eval", spec.data.eval),
        ("code.uri", spec.code.uri if spec.code else None),
        ("model.base", spec.model.base if (spec.model.base or "").startswith("s3://") else None),
        ("algorithm.warm_start.data", warm_data(spec)),
        ("algorithm.teacher.base", teacher_uri(spec)),
        *_reward_model_locations(spec),
    )
    return [(field, uri) for field, uri in named if uri]


def warm_data(spec: RunSpec) -> str | None:
    """Where the demonstrations of a warm start are."""
    algorithm = spec.algorithm
    return algorithm.warm_start.data if isinstance(algorithm, POLICIES) and algorithm.warm_start else None


def teacher_uri(spec: RunSpec) -> str | None:
    """Where a teacher of our own keeping is; one of the hub has none."""
    teacher = spec.algorithm.teacher.base if spec.algorithm.type == "distillation" else ""
    return teacher if teacher.startswith("s3://") else None


def reward_models(spec: RunSpec) -> dict[str, str]:
    """`part -> s3 uri` of every reward model among the rewards."""
    parts = spec.reward.named_parts if spec.reward else {}
    return {name: part.entry.removeprefix("model:") for name, part in parts.items() if part.entry.startswith("model:")}


def reward_model_channel(part: str) -> str:
    """Where the container finds the reward model of that part. SageMaker's names take letters, digits, `.`, `_`, `-`."""
    return f"reward_model_{part}"


def reward_bases(spec: RunSpec) -> dict[str, str]:
    """`part -> s3 uri` of every model that a reward model's adapter belongs to."""
    parts = spec.reward.named_parts if spec.reward else {}
    return {name: part.base for name, part in parts.items() if part.base}


def reward_base_channel(part: str) -> str:
    """Where the container finds what that part's adapter belongs to."""
    return f"reward_base_{part}"


def _reward_model_locations(spec: RunSpec) -> list[tuple[str, str]]:
    single = spec.reward is not None and spec.reward.entry is not None
    found = [("entry", reward_models(spec)), ("base", reward_bases(spec))]
    return [
        (f"reward.{field}" if single else f"reward.parts.{name}.{field}", uri)
        for field, uris in found
        for name, uri in uris.items()
    ]


def foreign_locations(spec: RunSpec, bucket: str) -> list[Problem]:
    """An uploaded spec may read the own prefix only; fit() copies other data there with its caller's own rights."""
    return [
        Problem(field, f"{uri} is outside s3://{bucket}/tenants/{spec.tenant}/; fit() copies data there for you")
        for field, uri in locations(spec)
        if not belongs_to(parse_s3_uri(uri), bucket, spec.tenant)
    ]
