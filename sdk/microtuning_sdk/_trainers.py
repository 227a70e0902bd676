"""The ways to begin a run in Python. A trainer holds settings; fit() checks, uploads and starts.

    RLTrainer(model_arch="Transformer", reward_func=exact_match, group_size=16).fit("train.jsonl", epochs=3)
    SFTTrainer(model="HuggingFaceTB/SmolLM2-135M").fit("s3://bucket/tenants/default/datasets/chat/")
    DPOTrainer(model="./my-model", beta=0.2).fit("pairs.jsonl")
    LoopTrainer(train, model="./my-model", options={"tokens": 8}).fit("rows.jsonl")
    ScriptTrainer("train.py", model="./my-model", hyperparameters={"learning_rate": 2e-5}).fit("rows.jsonl")

Settings are those of the spec (docs/sdk.md); one that no spec knows is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from microtuning_core.domain.errors import InvalidData
from microtuning_sdk._code import CodePackage, Piece, package_all, package_script
from microtuning_sdk._connection import DEFAULT_TENANT, Stage, connect
from microtuning_sdk._display import detached
from microtuning_sdk._draft import Document, Draft, draft
from microtuning_sdk._gym import DEFAULT_ROWS, gym_rows
from microtuning_sdk._interrupts import one_interrupt
from microtuning_sdk._preflight import preflight, shown
from microtuning_sdk._rewards import TO_BE_PACKED, Reward, gym_task, reward_document
from microtuning_sdk._run import Run
from microtuning_sdk._submit import submit

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal
    from pathlib import Path

    from microtuning_core.domain.spec import RunSpec
    from microtuning_sdk._inputs import Data

    Loss = Callable[..., Any] | str
    Rewards = Reward | list[Any] | tuple[Any, float] | Mapping[str, Any]


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


_RUN = frozenset({"name", "tenant", "seed", "budget_usd", "compute", "checkpoint", "environment_variables"})
_MODEL = frozenset(
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
_REWARD = {"reward_time_limit_s": "time_limit_s", "success_at": "success_at", "log_share": "log_share"}
_ENVIRONMENT = frozenset({"max_steps", "time_limit_s"})


class _Trainer:
    """What the trainers share: from settings to a draft, from a draft to a run."""

    def __init__(self, base: Document, code: Callable[[], CodePackage] | None, stage: Stage | str | None) -> None:
        self._base = base
        self._code = code
        self._stage = stage

    def fit(
        self,
        train_data: Data | int | None = None,
        eval_data: Data | int | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
        wait: bool = True,
        logs: bool = True,
        preflight: bool = True,
    ) -> Run:
        """Checks everything, uploads data and code, starts the run, and (with `wait`) shows it until it is over.

        Args:
            train_data: rows, a local file or folder, or an S3 address (a folder's ends in "/"). With a reward of
                reasoning-gym also the number of rows to make, 1,000 by default.
            eval_data: held-out rows, likewise; the model is evaluated on them before and after.
            epochs: passes over the data.
            batch_size: rows (RL: completions) an optimizer step.
            max_steps: optimizer steps at most.
            wait: return when the run is over; False returns at once (and then `logs` has no effect).
            logs: show log lines and progress while waiting.
            preflight: say beforehand what would go wrong or waste money (docs/sdk.md); the reward is tried on a few rows.

        Returns:
            The run. After Ctrl-C too: the run goes on, and a message says how to come back to it.

        Raises:
            InvalidSpec, InvalidData, InvalidCode, SubmitRefused: nothing was started; the message says what to correct.
            RunFailed, RunStopped: the run ended like that while it was waited for.
        """
        stage = self._connected()
        ready = self._draft(stage, train_data, eval_data, epochs, batch_size, max_steps)
        with one_interrupt():
            if preflight:
                _looked_at(ready)
            started = submit(stage, ready, _say)
            run = Run(started.run_id, stage)
            if started.interrupted:
                _say(detached(run.run_id))
                return run
            _say(f"run {run.run_id} is submitted")
            if wait and run.wait(logs=logs).is_final:
                run.raise_if_unsuccessful()
            return run

    def check(
        self,
        train_data: Data | int | None = None,
        eval_data: Data | int | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
    ) -> RunSpec:
        """What fit() would submit, checked in the same way; nothing is uploaded and nothing starts."""
        return self._draft(self._connected(), train_data, eval_data, epochs, batch_size, max_steps).spec

    def spec(
        self,
        train_data: Data | int | None = None,
        eval_data: Data | int | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
    ) -> str:
        """The same as the text of a spec file. Uploading it starts a run once its data and code are in the bucket."""
        return self._draft(self._connected(), train_data, eval_data, epochs, batch_size, max_steps).text

    def _connected(self) -> Stage:
        return self._stage if isinstance(self._stage, Stage) else connect(self._stage)

    def _draft(
        self,
        stage: Stage,
        train_data: Data | int | None,
        eval_data: Data | int | None,
        epochs: int | None,
        batch_size: int | None,
        max_steps: int | None,
    ) -> Draft:
        length = _given({"epochs": epochs, "batch_size": batch_size, "max_train_steps": max_steps})
        document = self._base | {
            "algorithm": self._base["algorithm"] | length,
            "data": _given({"train": self._train_rows(train_data), "eval": self._eval_rows(eval_data)}),
        }
        return draft(stage, document, code=self._code() if self._code else None)

    def _train_rows(self, given: Data | int | None) -> Data | None:
        """Rows as they were given, or made where a number of them was asked for."""
        task = gym_task(self._base.get("reward", {}))
        if task is not None and given is None:
            given = DEFAULT_ROWS
        return self._made(task, given, held_out=False) if isinstance(given, int) else given

    def _eval_rows(self, given: Data | int | None) -> Data | None:
        task = gym_task(self._base.get("reward", {}))
        return self._made(task, given, held_out=True) if isinstance(given, int) else given

    def _made(self, task: str | None, count: int, *, held_out: bool) -> Data:
        if task is None or count < 1:
            raise InvalidData(
                f"{count} rows",
                "rows are made only for a reward 'reasoning_gym:<task>', and at least one",
                next_step="Give rows, a file or an S3 address.",
            )
        return gym_rows(task, count, seed=int(self._base.get("seed", 0)), held_out=held_out)


class _Learner(_Trainer):
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
        stage = _stage_of(given)
        base = _document(algorithm or self._algorithm, model_arch, model, given)
        own_loss, base["algorithm"] = _loss(loss, base["algorithm"])
        if own_loss:
            base["loss"] = {"entry": TO_BE_PACKED}
        packed = {**(pieces or {}), **own_loss}
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
        reward = {_REWARD[name]: given.pop(name) for name in _REWARD if name in given}
        pieces: dict[str, Piece] = {}
        if reward_func is not None:
            scored, pieces = reward_document(reward_func)
            reward = scored | reward
        if environment is not None:
            pieces["environment.entry"] = Piece(environment, "environment")
        algorithm = "grpo" if environment is None else "multi_turn"
        super().__init__(model_arch, model, given, pieces, loss=loss, algorithm=algorithm)
        self._base |= _given({"reward": reward or None, "environment": _environment(environment, env_config)})


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
        self._base["algorithm"]["teacher"] = _given({"base": teacher, "revision": teacher_revision})


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
        self._base["algorithm"] |= {"entry": TO_BE_PACKED, "options": _plain(options or {})}


class ScriptTrainer(_Trainer):
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
        stage = _stage_of(given)
        arch = model_arch if model_arch or model else "Transformer"
        base = _document("script", arch, model, given)
        base["algorithm"] |= {"entry": "script.py", "hyperparameters": _plain(hyperparameters or {})}
        super().__init__(base, lambda: package_script(entry, source_dir), stage)


def _stage_of(given: dict[str, Any]) -> Stage | str | None:
    stage: Stage | str | None = given.pop("stage", None)
    return stage


def _document(algorithm: str, arch: str | None, model: str | Path | None, given: dict[str, Any]) -> Document:
    """The spec of these settings, without data. What is neither the run's nor the model's is the algorithm's."""
    run = {name: given[name] for name in _RUN & given.keys()}
    about_model = {name: given[name] for name in _MODEL & given.keys()}
    rest = {name: value for name, value in given.items() if name not in _RUN | _MODEL}
    return {
        "name": algorithm,
        "tenant": DEFAULT_TENANT,
        **run,
        "model": _given({"arch": arch, "base": model}) | about_model,
        "algorithm": {"type": algorithm, **rest},
    }


def _loss(loss: Loss | None, algorithm: Document) -> tuple[dict[str, Piece], Document]:
    """A loss by its name is a setting of the algorithm; a function, or "module:name", is the user's own."""
    if loss is None:
        return {}, algorithm
    if isinstance(loss, str) and ":" not in loss:
        return {}, algorithm | {"loss": loss}
    return {"loss.entry": Piece(loss, "loss", called_with=("logprobs", "inputs"))}, algorithm


def _environment(environment: Any, config: Any) -> Any:
    """The spec's environment: what it does not know itself are options of the user's class."""
    if not isinstance(config, Mapping):
        return config if environment is None or config is not None else {"entry": TO_BE_PACKED}
    if environment is None:
        return dict(config)
    known = {name: config[name] for name in _ENVIRONMENT & config.keys()}
    options = {name: value for name, value in config.items() if name not in _ENVIRONMENT and name != "options"}
    options |= config.get("options") or {}
    return {"entry": TO_BE_PACKED, **known, "options": options}


def _looked_at(ready: Draft) -> None:
    """Says what preflight found; an error of the user's own code is raised."""
    found = preflight(ready)
    for line in shown(found):
        _say(line)
    found.raise_if_broken()


def _plain(value: Any) -> Any:
    """A mapping of any kind as a dict; anything else is left for the spec's rules to refuse."""
    return dict(value) if isinstance(value, Mapping) else value


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _say(text: str) -> None:
    print(text, file=sys.stderr)
