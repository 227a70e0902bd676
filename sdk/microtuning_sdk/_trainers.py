"""The three ways to begin a run in Python. A trainer holds settings; fit() checks, uploads and starts.

    RLTrainer(model_arch="Transformer", reward_func=exact_match, group_size=16).fit("train.jsonl", epochs=3)
    SFTTrainer(model="HuggingFaceTB/SmolLM2-135M").fit("s3://bucket/tenants/default/datasets/chat/")
    ScriptTrainer("train.py", model="./my-model", hyperparameters={"learning_rate": 2e-5}).fit("rows.jsonl")

Settings are those of the spec (docs/sdk.md); one that no spec knows is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from microtuning_sdk._code import CodePackage, package_reward, package_script
from microtuning_sdk._connection import DEFAULT_TENANT, Stage, connect
from microtuning_sdk._display import detached
from microtuning_sdk._draft import Document, Draft, draft
from microtuning_sdk._interrupts import one_interrupt
from microtuning_sdk._run import Run
from microtuning_sdk._submit import submit

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal
    from pathlib import Path

    from microtuning_core.domain.spec import RunSpec
    from microtuning_sdk._inputs import Data


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
    """How the model is trained: which of its weights, and in which type."""

    revision: str
    adapter: Literal["lora", "qlora", "none"]
    rank: int
    alpha: float
    target_modules: list[str]
    dtype: Literal["auto", "float32", "bfloat16"]
    learning_rate: float
    max_grad_norm: float
    weight_decay: float
    warmup_steps: int
    max_length: int


class RLSettings(ModelSettings, total=False):
    """Settings of group-relative policy optimisation, and of the reward."""

    group_size: int
    max_completion_tokens: int
    temperature: float
    top_p: float
    advantage: Literal["group_std", "group_mean"]
    warm_start: Mapping[str, Any]
    max_constant_steps: int
    reward_time_limit_s: float
    success_at: float


_RUN = frozenset({"name", "tenant", "seed", "budget_usd", "compute", "checkpoint", "environment_variables"})
_MODEL = frozenset({"revision", "adapter", "rank", "alpha", "target_modules", "dtype"})
_REWARD = {"reward_time_limit_s": "time_limit_s", "success_at": "success_at"}


class _Trainer:
    """What the trainers share: from settings to a draft, from a draft to a run."""

    def __init__(self, base: Document, code: Callable[[], CodePackage] | None, stage: Stage | str | None) -> None:
        self._base = base
        self._code = code
        self._stage = stage

    def fit(
        self,
        train_data: Data,
        eval_data: Data | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
        wait: bool = True,
        logs: bool = True,
    ) -> Run:
        """Checks everything, uploads data and code, starts the run, and (with `wait`) shows it until it is over.

        Args:
            train_data: rows, a local file or folder, or an S3 address (a folder's ends in "/").
            eval_data: held-out rows, likewise; the model is evaluated on them before and after.
            epochs: passes over the data.
            batch_size: rows (RL: completions) an optimizer step.
            max_steps: optimizer steps at most.
            wait: return when the run is over; False returns at once (and then `logs` has no effect).
            logs: show log lines and progress while waiting.

        Returns:
            The run. After Ctrl-C too: the run goes on, and a message says how to come back to it.

        Raises:
            InvalidSpec, InvalidData, InvalidCode, SubmitRefused: nothing was started; the message says what to correct.
            RunFailed, RunStopped: the run ended like that while it was waited for.
        """
        stage = self._connected()
        ready = self._draft(stage, train_data, eval_data, epochs, batch_size, max_steps)
        with one_interrupt():
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
        train_data: Data,
        eval_data: Data | None = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_steps: int | None = None,
    ) -> RunSpec:
        """What fit() would submit, checked in the same way; nothing is uploaded and nothing starts."""
        return self._draft(self._connected(), train_data, eval_data, epochs, batch_size, max_steps).spec

    def spec(
        self,
        train_data: Data,
        eval_data: Data | None = None,
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
        train_data: Data,
        eval_data: Data | None,
        epochs: int | None,
        batch_size: int | None,
        max_steps: int | None,
    ) -> Draft:
        length = _given({"epochs": epochs, "batch_size": batch_size, "max_train_steps": max_steps})
        document = self._base | {
            "algorithm": self._base["algorithm"] | length,
            "data": _given({"train": train_data, "eval": eval_data}),
        }
        return draft(stage, document, code=self._code() if self._code else None)


class RLTrainer(_Trainer):
    """Reinforcement learning on the user's own reward.

    Args:
        model_arch: a preset with random weights ("Transformer").
        model: a base model instead: a hub id, a local directory, or an S3 folder.
        reward_func: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, called with those of
            its parameters that it names; or its name, "module:name".
        env_config: {"max_steps": turns an episode}.
        settings: of the algorithm (group_size, learning_rate, warm_start …) and of the run (compute, seed …).
    """

    def __init__(
        self,
        model_arch: str | None = None,
        *,
        model: str | Path | None = None,
        reward_func: Callable[..., Any] | str,
        env_config: Mapping[str, Any] | None = None,
        **settings: Unpack[RLSettings],
    ) -> None:
        given = dict(settings)
        stage = _stage_of(given)
        reward = {_REWARD[name]: given.pop(name) for name in _REWARD if name in given}
        base = _document("grpo", model_arch, model, given)
        base |= _given({"environment": _plain(env_config)})
        # The entry is known once the code is packed; until then a stand-in of the same form.
        base["reward"] = {"entry": "reward:function", **reward}
        super().__init__(base, lambda: package_reward(reward_func), stage)


class SFTTrainer(_Trainer):
    """Supervised fine-tuning on prompt and completion, messages, or text.

    Args:
        model_arch, model: as for RLTrainer.
        settings: of the algorithm (learning_rate, warmup_steps …) and of the run (compute, seed …).
    """

    def __init__(
        self, model_arch: str | None = None, *, model: str | Path | None = None, **settings: Unpack[ModelSettings]
    ) -> None:
        given = dict(settings)
        stage = _stage_of(given)
        super().__init__(_document("sft", model_arch, model, given), None, stage)


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


def _plain(value: Any) -> Any:
    """A mapping of any kind as a dict; anything else is left for the spec's rules to refuse."""
    return dict(value) if isinstance(value, Mapping) else value


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _say(text: str) -> None:
    print(text, file=sys.stderr)
