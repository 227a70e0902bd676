"""What a trainer may be given by keyword, and which part of the spec each setting belongs to.

    RLTrainer(model_arch="Transformer", rank=8, group_size=16, seed=3)
        rank        ->  model.rank              MODEL_FIELDS
        seed        ->  seed                    RUN_FIELDS
        group_size  ->  algorithm.group_size    whatever is neither

The classes say the types to an editor; that they agree with the spec's own fields is a test (tests/unit/test_sdk_draft.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from microtuning_sdk._code import Piece
from microtuning_sdk._connection import DEFAULT_TENANT, Stage
from microtuning_sdk._rewards import TO_BE_PACKED

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal
    from pathlib import Path

    from microtuning_sdk._draft import Document

    Loss = Callable[..., Any] | str


class RunSettings(TypedDict, total=False):
    """What every run may be given, whatever trains it."""

    name: str
    tenant: str
    stage: Stage | str | None
    seed: int
    budget_usd: Decimal | float | str | None
    compute: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    environment_variables: Mapping[str, str]


class ModelSettings(RunSettings, total=False):
    """How the model is trained: which of its weights, in which type, and at which rate."""

    revision: str
    adapter: Literal["lora", "qlora", "none"]
    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]
    dtype: Literal["auto", "float32", "bfloat16"]
    merge: bool
    gradient_checkpointing: bool
    learning_rate: float
    max_grad_norm: float
    weight_decay: float
    warmup_steps: int
    max_length: int


class DPOSettings(ModelSettings, total=False):
    """Settings of direct preference optimisation."""

    beta: float
    label_smoothing: float
    reference: Literal["auto", "adapter_off", "precomputed"]


class KTOSettings(ModelSettings, total=False):
    """Settings of Kahneman-Tversky optimisation."""

    beta: float
    desirable_weight: float
    undesirable_weight: float
    reference: Literal["auto", "adapter_off", "precomputed"]


class ORPOSettings(ModelSettings, total=False):
    """Settings of odds-ratio preference optimisation."""

    beta: float


class RewardSettings(ModelSettings, total=False):
    """Settings of a reward model."""

    center_coef: float


class RLSettings(ModelSettings, total=False):
    """Settings of policy optimisation, and of the reward."""

    group_size: int
    max_completion_tokens: int
    temperature: float
    top_p: float
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std"]
    clip_low: float
    clip_high: float
    dro_beta: float
    normalise: Literal["token", "sequence", "constant"]
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]
    mask_truncated: bool
    overlong_penalty_tokens: int
    sampling_rounds: int
    minibatches: int
    passes: int
    sampler: Literal["auto", "engine", "vllm"]
    off_policy_cap: float
    warm_start: Mapping[str, Any]
    max_constant_steps: int
    reward_time_limit_s: float
    success_at: float
    log_share: float


class DistillationSettings(ModelSettings, total=False):
    """Settings of on-policy distillation."""

    group_size: int
    max_completion_tokens: int
    temperature: float


RUN_FIELDS = frozenset({"name", "tenant", "seed", "budget_usd", "compute", "checkpoint", "environment_variables"})
MODEL_FIELDS = frozenset(
    {
        "revision",
        "adapter",
        "rank",
        "alpha",
        "dropout",
        "target_modules",
        "dtype",
        "merge",
        "gradient_checkpointing",
    }
)
REWARD_FIELDS = {"reward_time_limit_s": "time_limit_s", "success_at": "success_at", "log_share": "log_share"}
ENVIRONMENT_FIELDS = frozenset({"max_steps", "time_limit_s"})


def stage_of(given: dict[str, Any]) -> Stage | str | None:
    stage: Stage | str | None = given.pop("stage", None)
    return stage


def spec_document(algorithm: str, arch: str | None, model: str | Path | None, given: dict[str, Any]) -> Document:
    """The spec of these settings, without data. What is neither the run's nor the model's is the algorithm's."""
    run = {name: given[name] for name in RUN_FIELDS & given.keys()}
    about_model = {name: given[name] for name in MODEL_FIELDS & given.keys()}
    rest = {name: value for name, value in given.items() if name not in RUN_FIELDS | MODEL_FIELDS}
    return {
        "name": algorithm,
        "tenant": DEFAULT_TENANT,
        **run,
        "model": given_only({"arch": arch, "base": model}) | about_model,
        "algorithm": {"type": algorithm, **rest},
    }


def own_loss(loss: Loss | None, algorithm: Document) -> tuple[dict[str, Piece], Document]:
    """A loss by its name is a setting of the algorithm; a function, or "module:name", is the user's own."""
    if loss is None:
        return {}, algorithm
    if isinstance(loss, str) and ":" not in loss:
        return {}, algorithm | {"loss": loss}
    return {"loss.entry": Piece(loss, "loss", called_with=("logprobs", "inputs"))}, algorithm


def environment_document(environment: Any, config: Any) -> Any:
    """The spec's environment: what it does not know itself are options of the user's class."""
    if not isinstance(config, Mapping):
        return config if environment is None or config is not None else {"entry": TO_BE_PACKED}
    if environment is None:
        return dict(config)
    known = {name: config[name] for name in ENVIRONMENT_FIELDS & config.keys()}
    options = {name: value for name, value in config.items() if name not in ENVIRONMENT_FIELDS and name != "options"}
    options |= config.get("options") or {}
    return {"entry": TO_BE_PACKED, **known, "options": options}


def as_dict(value: Any) -> Any:
    """A mapping of any kind as a dict; anything else is left for the spec's rules to refuse."""
    return dict(value) if isinstance(value, Mapping) else value


def given_only(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
