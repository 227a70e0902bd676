"""What can be asked of each algorithm. Defaults are the vetted settings; docs/algorithms.md says what each one means.

To add an algorithm: a settings class here, its line in `Algorithm` and in `ALGORITHMS`, a recipe of the same name in
training_container/recipes/, a heading in docs/algorithms.md; a test compares the four.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from microtuning_core.domain.fields import CodeEntry, Json, ModelSource, Probability, S3Location, Share
from microtuning_core.domain.record import Value


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


# --- learning from examples ------------------------------------------------------------------------------------------


class SftSettings(_Trained):
    """Supervised fine-tuning; `batch_size` rows an optimizer step."""

    type: Literal["sft"] = "sft"
    batch_size: int = Field(16, ge=1)


class DpoSettings(_Trained):
    """Direct preference optimisation; `batch_size` pairs an optimizer step.

    reference: whose log-probabilities the policy is held to: the model with its adapter switched off, or the starting
    model's, computed once before the first step (the only way without an adapter). "auto" takes the first where it can.
    """

    type: Literal["dpo"] = "dpo"
    batch_size: int = Field(16, ge=1)
    beta: float = Field(0.1, gt=0)
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    reference: Literal["auto", "adapter_off", "precomputed"] = "auto"

    @model_validator(mode="after")
    def _smoothing_is_of_the_sigmoid(self) -> DpoSettings:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError("label_smoothing is defined for loss: sigmoid alone")
        return self


class KtoSettings(_Trained):
    """Kahneman-Tversky optimisation, on single completions marked good or bad; `batch_size` rows an optimizer step."""

    type: Literal["kto"] = "kto"
    batch_size: int = Field(16, ge=1)
    beta: float = Field(0.1, gt=0)
    desirable_weight: float = Field(1.0, ge=0)
    undesirable_weight: float = Field(1.0, ge=0)
    reference: Literal["auto", "adapter_off", "precomputed"] = "auto"

    @model_validator(mode="after")
    def _something_counts(self) -> KtoSettings:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError("desirable_weight and undesirable_weight are both 0, so nothing is learned")
        return self


class OrpoSettings(_Trained):
    """Odds-ratio preference optimisation, without a reference; `batch_size` pairs an optimizer step."""

    type: Literal["orpo"] = "orpo"
    batch_size: int = Field(16, ge=1)
    beta: float = Field(0.1, gt=0, description="weight of the odds-ratio term beside the likelihood of the chosen")


class RewardModelSettings(_Trained):
    """A Bradley-Terry reward model from pairs; `batch_size` pairs an optimizer step. Usable as a reward afterwards."""

    type: Literal["reward"] = "reward"
    batch_size: int = Field(16, ge=1)
    center_coef: float = Field(0.0, ge=0, description="pulls the sum of a pair's scores to 0")


# --- learning from rewards -------------------------------------------------------------------------------------------


class _Policy(_Trained):
    """Settings of policy optimisation; `batch_size` completions an optimizer step, `group_size` of them a prompt."""

    batch_size: int = Field(64, ge=2)
    group_size: int = Field(8, ge=2)
    max_completion_tokens: int = Field(64, ge=1, description="of one turn")
    temperature: float = Field(1.0, gt=0)
    top_p: Probability = 1.0
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std"] = "group_std"
    loss: Literal["ppo", "importance_sampling", "cispo", "gspo", "dro"] = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dro_beta: float = Field(0.05, gt=0)
    normalise: Literal["token", "sequence", "constant"] = "token"
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    mask_truncated: bool = False
    overlong_penalty_tokens: int = Field(0, ge=0)
    sampling_rounds: int = Field(1, ge=1, le=100)
    minibatches: int = Field(1, ge=1, description="optimizer steps that one pass over a rollout makes")
    passes: int = Field(1, ge=1, description="passes over a rollout")
    sampler: Literal["auto", "engine", "vllm"] = "auto"
    off_policy_cap: float = Field(2.0, gt=0)
    warm_start: WarmStart | None = None
    max_constant_steps: int = Field(
        50, ge=1, description="steps in a row without any spread of reward before giving up"
    )

    @model_validator(mode="after")
    def _whole_groups(self) -> _Policy:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of group_size {self.group_size}")
        return self

    @model_validator(mode="after")
    def _room(self) -> _Policy:
        if self.max_completion_tokens >= self.max_length:
            raise ValueError(
                f"max_completion_tokens {self.max_completion_tokens} leave no room for a prompt in max_length"
            )
        if self.overlong_penalty_tokens > self.max_completion_tokens:
            raise ValueError("overlong_penalty_tokens are the last of max_completion_tokens, so they cannot be more")
        return self


class GrpoSettings(_Policy):
    """Group-relative policy optimisation and its family: one turn an episode."""

    type: Literal["grpo"] = "grpo"


class MultiTurnSettings(_Policy):
    """The same over episodes of several turns in the user's environment; a completion is an episode."""

    type: Literal["multi_turn"] = "multi_turn"


class TeacherSpec(Value):
    """The model to learn from; it must have the student's vocabulary."""

    base: ModelSource
    revision: str | None = None


class DistillationSettings(_Trained):
    """On-policy distillation: the student's own completions, graded token by token by the teacher (reverse KL)."""

    type: Literal["distillation"] = "distillation"
    teacher: TeacherSpec
    batch_size: int = Field(64, ge=1)
    group_size: int = Field(1, ge=1)
    max_completion_tokens: int = Field(64, ge=1, description="of one turn")
    temperature: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _whole_groups(self) -> DistillationSettings:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of group_size {self.group_size}")
        return self


# --- the user's own --------------------------------------------------------------------------------------------------


class CustomSettings(_Trained):
    """The user's own loop, `def train(engine, run)`, on the engine's primitives; `options` are the loop's own."""

    type: Literal["custom"] = "custom"
    entry: CodeEntry
    batch_size: int = Field(16, ge=1)
    options: dict[str, Json] = {}


class ScriptSettings(Value):
    """The user's own training script, run as it is under SageMaker's container contract."""

    type: Literal["script"] = "script"
    entry: str = Field(pattern=r"^[\w./-]+\.py$")
    hyperparameters: dict[str, Json] = {}


Algorithm = Annotated[
    SftSettings
    | DpoSettings
    | KtoSettings
    | OrpoSettings
    | RewardModelSettings
    | GrpoSettings
    | MultiTurnSettings
    | DistillationSettings
    | CustomSettings
    | ScriptSettings,
    Field(discriminator="type"),
]
ALGORITHMS = ("sft", "dpo", "kto", "orpo", "reward", "grpo", "multi_turn", "distillation", "custom", "script")
# Those that draw completions and have them scored; and those that a user's own loss can be given to.
POLICY_ALGORITHMS = ("grpo", "multi_turn")
LOSS_ALGORITHMS = ("sft", "dpo", "kto", "orpo", "grpo", "multi_turn", "distillation")


# --- rewards, losses and environments --------------------------------------------------------------------------------

REWARD_ENTRY = (
    r"^([A-Za-z_][\w.]*:[A-Za-z_][\w.]*"  # module:name in the code; reasoning_gym:<task>
    r"|pickle:[\w.-]+"
    r"|arn:aws[\w-]*:lambda:[\w-]+:\d{12}:function:[\w-]+(:[\w$-]+)?"
    r"|https?://\S+"
    r"|judge"
    r"|model:s3://\S+)$"
)


class JudgeSpec(Value):
    """A language model as judge, behind any OpenAI-compatible endpoint.

    prompt: with {prompt}, {completion} and any column in braces. The last number of the answer is the score, over `scale`.
    key_name: the name under which the key is kept (a Secrets Manager secret on AWS, an environment variable locally).
    """

    base_url: str = Field(pattern=r"^https?://\S+$")
    model: str
    prompt: str
    key_name: str | None = None
    scale: float = Field(10.0, gt=0)
    max_requests_per_minute: int = Field(600, ge=1)
    max_requests: int | None = Field(None, ge=1, description="of the whole run; then it ends")
    retries: int = Field(3, ge=0, le=10)


# Part of a metric's name, and of the channel that a reward model comes by.
PartName = Annotated[str, Field(pattern=r"^[A-Za-z]\w{0,39}$")]


class RewardPart(Value):
    """One of several rewards. A weight of 0 only observes: a held-out reward.

    base: what a reward model's adapter belongs to, where that is a folder in S3.
    """

    entry: str = Field(pattern=REWARD_ENTRY)
    base: S3Location | None = None
    weight: float = Field(1.0, allow_inf_nan=False)
    judge: JudgeSpec | None = None


class RewardSpec(Value):
    """How completions are scored: by one `entry`, or by several named `parts`, whose weighted sum is the reward.

    entry: "module:name" of `f(prompts, completions, completion_ids, **columns) -> list[float | None]` or of a function of
    one completion; "reasoning_gym:<task>"; the ARN of a Lambda function; an http(s) address; "judge"; "model:s3://…/" of
    a reward model, with its `base` where it is an adapter on a model in S3.
    """

    entry: str | None = Field(None, pattern=REWARD_ENTRY)
    base: S3Location | None = None
    parts: dict[PartName, RewardPart] = {}
    judge: JudgeSpec | None = None
    time_limit_s: float = Field(60, gt=0, le=3600, description="seconds one call may take")
    success_at: float = Field(1.0, description="a completion counts as right from this reward on")
    log_share: Share = Field(1.0, description="share of the completions that go to the rollout log")

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardSpec:
        if (self.entry is None) == (not self.parts):
            raise ValueError("give exactly one of entry (one reward) and parts (several, by name)")
        for name, part in self.named_parts.items():
            if (part.entry == "judge") != (part.judge is not None):
                raise ValueError(f"{name}: the entry `judge` and the settings `judge` go together")
            if part.base and not part.entry.startswith("model:"):
                raise ValueError(f"{name}: `base` is of a reward model's adapter, and {part.entry} is none")
        if self.parts and (self.judge or self.base):
            raise ValueError("`judge` and `base` belong to a part, each to its own")
        return self

    @property
    def named_parts(self) -> dict[str, RewardPart]:
        """Every part by name; a single reward is the part "reward"."""
        if self.entry is None:
            return self.parts
        return {"reward": RewardPart(entry=self.entry, base=self.base, judge=self.judge)}


class LossSpec(Value):
    """The user's own loss in place of the recipe's: `def loss(logprobs, inputs) -> loss, metrics`."""

    entry: CodeEntry


class EnvironmentSpec(Value):
    """The environment of an episode: `max_steps` turns at most, in the class or factory that `entry` names.

    options: keyword arguments of the class. time_limit_s: of one reset or step.
    """

    entry: CodeEntry | None = None
    max_steps: int = Field(1, ge=1)
    time_limit_s: float = Field(60, gt=0, le=3600)
    options: dict[str, Json] = {}
