"""The ways to begin a run in Python. A trainer holds settings; fit() checks, uploads and starts.

    RLTrainer(model_arch="Transformer", reward_func=exact_match, group_size=16).fit("train.jsonl", epochs=3)
    SFTTrainer(model="HuggingFaceTB/SmolLM2-135M").fit("s3://bucket/tenants/default/datasets/chat/")
    DPOTrainer(model="./my-model", beta=0.2).fit("pairs.jsonl")
    LoopTrainer(train, model="./my-model", options={"tokens": 8}).fit("rows.jsonl")
    ScriptTrainer("train.py", model="./my-model", hyperparameters={"learning_rate": 2e-5}).fit("rows.jsonl")

Settings are those of the spec (docs/sdk.md); one that no spec knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from microtuning_sdk._code import Piece, package_all, package_script
from microtuning_sdk._fit import Trainer
from microtuning_sdk._rewards import TO_BE_PACKED, Reward, reward_document
from microtuning_sdk._settings import (
    REWARD_FIELDS,
    DistillationSettings,
    DPOSettings,
    KTOSettings,
    ModelSettings,
    ORPOSettings,
    RewardSettings,
    RLSettings,
    RunSettings,
    as_dict,
    environment_document,
    given_only,
    own_loss,
    spec_document,
    stage_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from microtuning_sdk._settings import Loss

    Rewards = Reward | list[Any] | tuple[Any, float] | Mapping[str, Any]


class _Learner(Trainer):
    """A trainer of a recipe: a model, settings, and perhaps a loss of the user's own."""

    _algorithm: str

    def __init__(
        self,
        model_arch: str | None,
        model: str | Path | None,
        given: dict[str, Any],
        pieces: Mapping[str, Piece] | None = None,
        *,
        loss: Loss | None = None,
        algorithm: str | None = None,
    ) -> None:
        stage = stage_of(given)
        base = spec_document(algorithm or self._algorithm, model_arch, model, given)
        loss_piece, base["algorithm"] = own_loss(loss, base["algorithm"])
        if loss_piece:
            base["loss"] = {"entry": TO_BE_PACKED}
        packed = {**(pieces or {}), **loss_piece}
        super().__init__(base, (lambda: package_all(packed)) if packed else None, stage)


class RLTrainer(_Learner):
    """Reinforcement learning on the user's own reward, over one turn or in an environment.

    Args:
        model_arch: a preset with random weights ("Transformer").
        model: a base model instead: a hub id, a local directory, or an S3 folder.
        reward_func: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, called with those of
            its parameters that it names, or a function of one completion; the name of one ("module:name"),
            "reasoning_gym:<task>", the ARN of a Lambda function, an http(s) address, "model:s3://…/", a Judge, or a
            finished Run of RewardTrainer. Several: a list, or a dict by name; each alone or with its weight,
            `(reward, 0.5)`.
        environment: a class, or its name "module:Class": episodes of several turns (multi_turn); then reward_func may
            be left out.
        env_config: {"max_steps": turns an episode, "time_limit_s": of one call}; other keys go to the environment.
        loss: "ppo", "importance_sampling", "cispo", "gspo" or "dro"; or your own `loss(logprobs, inputs)`.
        settings: of the algorithm (group_size, learning_rate, warm_start …) and of the run (compute, seed …).
    """

    def __init__(
        self,
        model_arch: str | None = None,
        *,
        model: str | Path | None = None,
        reward_func: Rewards | None = None,
        environment: Callable[..., Any] | str | None = None,
        env_config: Mapping[str, Any] | None = None,
        loss: Loss | None = None,
        **settings: Unpack[RLSettings],
    ) -> None:
        given = dict(settings)
        reward = {REWARD_FIELDS[name]: given.pop(name) for name in REWARD_FIELDS if name in given}
        pieces: dict[str, Piece] = {}
        if reward_func is not None:
            scored, pieces = reward_document(reward_func)
            reward = scored | reward
        if environment is not None:
            pieces["environment.entry"] = Piece(environment, "environment")
        algorithm = "grpo" if environment is None else "multi_turn"
        super().__init__(model_arch, model, given, pieces, loss=loss, algorithm=algorithm)
        self._base |= given_only(
            {"reward": reward or None, "environment": environment_document(environment, env_config)}
        )


class SFTTrainer(_Learner):
    """Supervised fine-tuning on prompt and completion, messages, or text.

    Args:
        model_arch, model: as for RLTrainer.
        loss: your own `loss(logprobs, inputs) -> loss, metrics`, or its name "module:name" (docs/custom.md).
        settings: of the algorithm (learning_rate, warmup_steps …) and of the run (compute, seed …).
    """

    _algorithm = "sft"

    def __init__(
        self,
        model_arch: str | None = None,
        *,
        model: str | Path | None = None,
        loss: Loss | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        super().__init__(model_arch, model, dict(settings), loss=loss)


class DPOTrainer(_Learner):
    """Direct preference optimisation on pairs of a chosen and a rejected completion.

    Args:
        model_arch, model: as for RLTrainer.
        loss: "sigmoid", "ipo" or "hinge"; or your own, as for SFTTrainer.
        settings: beta, label_smoothing, reference; and as for SFTTrainer.
    """

    _algorithm = "dpo"

    def __init__(
        self,
        model_arch: str | None = None,
        *,
        model: str | Path | None = None,
        loss: Loss | None = None,
        **settings: Unpack[DPOSettings],
    ) -> None:
        super().__init__(model_arch, model, dict(settings), loss=loss)


class KTOTrainer(_Learner):
    """Kahneman-Tversky optimisation on completions marked good or bad, or on pairs.

    Args:
        model_arch, model: as for RLTrainer.
        loss: your own, as for SFTTrainer.
        settings: beta, desirable_weight, undesirable_weight, reference; and as for SFTTrainer.
    """

    _algorithm = "kto"

    def __init__(
        self,
        model_arch: str | None = None,
        *,
        model: str | Path | None = None,
        loss: Loss | None = None,
        **settings: Unpack[KTOSettings],
    ) -> None:
        super().__init__(model_arch, model, dict(settings), loss=loss)


class ORPOTrainer(_Learner):
    """Odds-ratio preference optimisation on pairs; needs no reference.

    Args:
        model_arch, model: as for RLTrainer.
        loss: your own, as for SFTTrainer.
        settings: beta; and as for SFTTrainer.
    """

    _algorithm = "orpo"

    def __init__(
        self,
        model_arch: str | None = None,
        *,
        model: str | Path | None = None,
        loss: Loss | None = None,
        **settings: Unpack[ORPOSettings],
    ) -> None:
        super().__init__(model_arch, model, dict(settings), loss=loss)


class RewardTrainer(_Learner):
    """A Bradley-Terry reward model from pairs. The finished Run can be given to RLTrainer as reward_func.

    Args:
        model_arch, model: as for RLTrainer.
        settings: center_coef; and as for SFTTrainer.
    """

    _algorithm = "reward"

    def __init__(
        self, model_arch: str | None = None, *, model: str | Path | None = None, **settings: Unpack[RewardSettings]
    ) -> None:
        super().__init__(model_arch, model, dict(settings))


class DistillationTrainer(_Learner):
    """On-policy distillation: the model's own completions, graded token by token by a teacher of the same vocabulary.

    Args:
        model_arch, model: as for RLTrainer.
        teacher: a hub id, a local directory, or an S3 folder.
        teacher_revision: of a hub id.
        loss: your own, as for SFTTrainer.
        settings: group_size, max_completion_tokens, temperature; and as for SFTTrainer.
    """

    _algorithm = "distillation"

    def __init__(
        self,
        model_arch: str | None = None,
        *,
        model: str | Path | None = None,
        teacher: str | Path,
        teacher_revision: str | None = None,
        loss: Loss | None = None,
        **settings: Unpack[DistillationSettings],
    ) -> None:
        super().__init__(model_arch, model, dict(settings), loss=loss)
        self._base["algorithm"]["teacher"] = given_only({"base": teacher, "revision": teacher_revision})


class LoopTrainer(_Learner):
    """The user's own loop, `train(engine, run)`, on the engine's primitives (docs/custom.md).

    Args:
        train: the function, or its name "module:name".
        model_arch, model: as for RLTrainer.
        options: any JSON; the loop finds it as run.settings.options.
        settings: as for SFTTrainer.
    """

    _algorithm = "custom"

    def __init__(
        self,
        train: Callable[..., Any] | str,
        *,
        model_arch: str | None = None,
        model: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        pieces = {"algorithm.entry": Piece(train, "loop", called_with=("engine", "run"))}
        super().__init__(model_arch, model, dict(settings), pieces)
        self._base["algorithm"] |= {"entry": TO_BE_PACKED, "options": as_dict(options or {})}


class ScriptTrainer(Trainer):
    """The user's own training script, run as it is under SageMaker's container contract.

    Args:
        entry: the script's path; with `source_dir`, its path inside that folder.
        source_dir: a folder to ship whole; without it the script and the local modules that it imports are shipped.
        hyperparameters: any JSON; the script finds each value with its type in SM_HPS.
        model, model_arch: what the script trains, for choosing a machine; a local directory is uploaded, and the job
            finds it in the channel "model".
    """

    def __init__(
        self,
        entry: str | Path,
        *,
        source_dir: str | Path | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        model_arch: str | None = None,
        model: str | Path | None = None,
        **settings: Unpack[RunSettings],
    ) -> None:
        given: dict[str, Any] = dict(settings)
        stage = stage_of(given)
        arch = model_arch if model_arch or model else "Transformer"
        base = spec_document("script", arch, model, given)
        base["algorithm"] |= {"entry": "script.py", "hyperparameters": as_dict(hyperparameters or {})}
        super().__init__(base, lambda: package_script(entry, source_dir), stage)
