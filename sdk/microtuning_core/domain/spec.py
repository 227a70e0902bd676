"""What a user asks for: one run, from data and a reward to a model.

    name: sort-digits
    model: {arch: Transformer}
    algorithm: {type: grpo, group_size: 16, epochs: 4, batch_size: 256}
    reward: {entry: "rewards:exact_match"}
    data: {train: s3://bucket/tenants/default/datasets/…/train.jsonl, eval: s3://…/eval.jsonl}
    code: {uri: s3://bucket/tenants/default/code/…/code.zip, sha256: …, entry: rewards}

The same words in Python, YAML and JSON. Defaults are the vetted settings. Unknown fields are refused, and every problem is
reported at once, by field and (for a file) by line. To add an algorithm: a settings class here, its line in `Algorithm`, a
recipe of the same name in training_container/recipes/, a heading in docs/algorithms.md; a test compares the four.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.errors import InvalidName, Problem
from microtuning_core.domain.layout import belongs_to, parse_s3_uri
from microtuning_core.domain.names import check_run_name, check_tenant
from microtuning_core.domain.record import Record, UsdAmount, Value

Json = Any  # what json.loads returns

PRESETS = ("Transformer", "tiny-decoder")  # "Transformer" is the friendly name of tiny-decoder


def _as_value_error(check: Any) -> Any:
    """Names raise InvalidName; pydantic collects ValueError."""

    def checked(value: str) -> str:
        try:
            check(value)
        except InvalidName as error:
            raise ValueError(f"{error.message} {error.next_step}") from error
        return value

    return AfterValidator(checked)


_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

S3Location = Annotated[str, _as_value_error(parse_s3_uri)]
Probability = Annotated[float, Field(gt=0, le=1)]


class ModelSpec(Value):
    """What is trained. Exactly one of `arch` and `base`.

    arch: a preset with random weights and a character tokenizer made from the data ("Transformer" = tiny-decoder).
    base: a hub id, an own S3 prefix (s3://…/), or a local directory, which fit() uploads once by its hash.
    """

    arch: Literal["Transformer", "tiny-decoder"] | None = None
    base: str | None = None
    revision: str | None = None
    adapter: Literal["lora", "qlora", "none"] | None = None
    rank: int = Field(16, ge=1, le=512)
    alpha: float = Field(32, gt=0)
    target_modules: tuple[str, ...] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelSpec:
        if (self.arch is None) == (self.base is None):
            raise ValueError("give exactly one of arch (a preset) and base (a hub id or an s3:// prefix)")
        if self.base is not None and not (_HUB_ID.fullmatch(self.base) or self.base.startswith("s3://")):
            raise ValueError(
                "base is a hub id (name or owner/name) or an s3:// prefix; fit() uploads a local directory for you"
            )
        return self

    @property
    def effective_adapter(self) -> Literal["lora", "qlora", "none"]:
        """A preset trains all its weights, a base model an adapter, unless the user says otherwise."""
        return self.adapter or ("none" if self.arch else "lora")


class WarmStart(Value):
    """Supervised steps before reinforcement, on demonstrations that need not be all right."""

    data: S3Location
    steps: int = Field(ge=1)
    batch_size: int = Field(128, ge=1)
    learning_rate: float = Field(3e-3, gt=0)


class _Trained(Value):
    """Settings that every gradient recipe has. learning_rate None = the vetted one for the adapter (docs/algorithms.md)."""

    epochs: int = Field(1, ge=1)
    max_train_steps: int | None = Field(None, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    max_grad_norm: float | None = Field(None, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    max_length: int = Field(1024, ge=8, description="tokens of prompt and completion together")


class SftSettings(_Trained):
    """Supervised fine-tuning; `batch_size` rows an optimizer step."""

    type: Literal["sft"] = "sft"
    batch_size: int = Field(16, ge=1)


class GrpoSettings(_Trained):
    """Group-relative policy optimisation; `batch_size` completions an optimizer step, `group_size` of them a prompt."""

    type: Literal["grpo"] = "grpo"
    batch_size: int = Field(64, ge=2)
    group_size: int = Field(8, ge=2)
    max_completion_tokens: int = Field(64, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: Probability = 1.0
    advantage: Literal["group_std", "group_mean"] = "group_std"
    warm_start: WarmStart | None = None
    max_constant_steps: int = Field(
        50, ge=1, description="steps in a row without any spread of reward before giving up"
    )

    @model_validator(mode="after")
    def _whole_groups(self) -> GrpoSettings:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of group_size {self.group_size}")
        return self


class ScriptSettings(Value):
    """The user's own training script, run as it is under SageMaker's container contract."""

    type: Literal["script"] = "script"
    entry: str = Field(pattern=r"^[\w./-]+\.py$")
    hyperparameters: dict[str, Json] = {}


Algorithm = Annotated[SftSettings | GrpoSettings | ScriptSettings, Field(discriminator="type")]
ALGORITHMS = ("sft", "grpo", "script")


class RewardSpec(Value):
    """The user's reward: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`."""

    entry: str = Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_][\w.]*|pickle:[\w.-]+)$")
    time_limit_s: float = Field(60, gt=0, le=3600, description="seconds one call may take")
    success_at: float = Field(1.0, description="a completion counts as right from this reward on")


class EnvironmentSpec(Value):
    """The environment of an episode. `max_steps` is the number of turns; the recipes of today take one."""

    max_steps: int = Field(1, ge=1)


class DataSpec(Value):
    """JSONL files (also .gz), or folders of them; a folder ends in "/"."""

    train: S3Location
    eval: S3Location | None = None


class ComputeSpec(Value):
    """Where it runs. Everything has a default: the cheapest machine that fits."""

    instance: str = "auto"
    count: int = Field(1, ge=1, le=1, description="instances a job; one until data parallel comes")
    spot: Literal["auto"] | bool = "auto"
    recovery: Literal["fast", "cheap"] = "cheap"
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
    every_steps: int = Field(500, ge=1)
    every_epoch: bool = True
    keep: int = Field(2, ge=1, description="whole checkpoints kept of a lineage, beside the last of the run")


class CodeSpec(Value):
    """The user's sources, uploaded by their hash."""

    uri: S3Location
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    entry: str | None = None


class RunSpec(Record):
    """A run, as its user describes it."""

    name: Annotated[str, _as_value_error(check_run_name)]
    tenant: Annotated[str, _as_value_error(check_tenant)] = "default"
    model: ModelSpec
    algorithm: Algorithm
    reward: RewardSpec | None = None
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
        ("algorithm.warm_start.data", _warm_data(spec)),
    )
    return [(field, uri) for field, uri in named if uri]


def _warm_data(spec: RunSpec) -> str | None:
    return spec.algorithm.warm_start.data if spec.algorithm.type == "grpo" and spec.algorithm.warm_start else None


def foreign_locations(spec: RunSpec, bucket: str) -> list[Problem]:
    """An uploaded spec may read the own prefix only; fit() copies other data there with its caller's own rights."""
    return [
        Problem(field, f"{uri} is outside s3://{bucket}/tenants/{spec.tenant}/; fit() copies data there for you")
        for field, uri in locations(spec)
        if not belongs_to(parse_s3_uri(uri), bucket, spec.tenant)
    ]
