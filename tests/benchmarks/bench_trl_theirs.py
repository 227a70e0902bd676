"""TRL's side of bench_trl: trainer.train() of TRL 1.16 on a model of its own, with a clock in a callback.

Switched off in TRL's favour, as our side does none of it: the entropy and the other figures of its fused head that only its
log shows, logging, saving, progress bars, and gradient checkpointing, which it has on by default.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import torch
import transformers
import trl
from trl.trainer import dpo_trainer, grpo_trainer, sft_trainer

from training_container.engine.sampler import Sampling, draw_uniforms

from . import bench_trl_rewards
from .bench_trl_ours import Measured, now, since
from .bench_trl_work import (
    GROUP,
    MAX_GRAD_NORM,
    NEW_TOKENS,
    SEED,
    TEMPERATURE,
    WEIGHT_DECAY,
    Work,
    device,
    policy,
)

MODULES = {"grpo": grpo_trainer, "sft": sft_trainer, "dpo": dpo_trainer}


class Clock(transformers.TrainerCallback):
    """From the end of a step to the end of the next, data loading included."""

    def __init__(self, measured: Measured, until: Callable[[list[float]], bool]) -> None:
        self.measured, self._until = measured, until
        self.trainer: Any = None
        self._began: tuple[float, float] | None = None

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._began = self._began or now()

    def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        wall_s, cpu_s = since(self._began)
        self.measured.seconds.append(wall_s)
        self.measured.cpu_seconds.append(cpu_s)
        self.measured.rewards += self.trainer._metrics["train"].get("reward", [])[-1:]
        control.should_training_stop = self._until(self.measured.rewards)
        self._began = now()


def theirs(
    work: Work,
    model: Path,
    rows: list[dict[str, str]],
    folder: Path,
    *,
    seed: int = SEED,
    look: bool = False,
    until: Callable[[list[float]], bool] = lambda _: False,
) -> Measured:
    """As `ours`. look: completions are drawn by our side's random numbers, so that both sides have the same."""
    measured = Measured()
    clock = Clock(measured, until)
    with quiet(), heads_without_figures(work):
        clock.trainer = a_trainer(work, model, rows, folder, seed, clock)
        watch_tokens(clock.trainer, work, measured)
        if look:
            keep_first_step(clock.trainer, measured)
        with our_numbers(work, seed) if look and work.kind == "grpo" else contextlib.nullcontext():
            clock.trainer.train()
    shutil.rmtree(folder, ignore_errors=True)
    return measured


def a_trainer(
    work: Work, model: Path, rows: list[dict[str, str]], folder: Path, seed: int, clock: Clock
) -> transformers.Trainer:
    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": work.steps, "learning_rate": work.learning_rate, "seed": seed,
        "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM, "bf16": False, "use_cpu": device().type == "cpu", "gradient_checkpointing": False,
        "report_to": [], "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    policy_, tokenizer = policy(work, model)
    parts: dict[str, Any] = {"model": policy_, "processing_class": tokenizer, "callbacks": [clock]}
    match work.kind:
        case "grpo":
            columns = [{key: row[key] for key in ("prompt", "answer")} for row in rows]
            arguments = trl.GRPOConfig(
                **common, per_device_train_batch_size=work.batch * GROUP, num_generations=GROUP,
                max_completion_length=NEW_TOKENS, temperature=TEMPERATURE, top_p=1.0, top_k=0, beta=0.0,
                loss_type="dapo", scale_rewards="group", shuffle_dataset=False,
            )  # fmt: skip
            reward = getattr(bench_trl_rewards, work.reward)
            return trl.GRPOTrainer(**parts, args=arguments, train_dataset=dataset(columns), reward_funcs=reward)
        case "sft":
            arguments = trl.SFTConfig(
                **common, per_device_train_batch_size=work.batch, max_length=1024, completion_only_loss=True,
                train_sampling_strategy="sequential",
            )  # fmt: skip
            return trl.SFTTrainer(**parts, args=arguments, train_dataset=dataset(rows))
        case "dpo":
            arguments = trl.DPOConfig(
                **common, per_device_train_batch_size=work.batch, max_length=1024, beta=0.1,
                train_sampling_strategy="sequential",
            )  # fmt: skip
            reference = policy(work, model)[0] if work.adapter == "none" else None
            return trl.DPOTrainer(**parts, args=arguments, train_dataset=dataset(rows), ref_model=reference)


def dataset(rows: list[dict[str, str]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def heads_without_figures(work: Work) -> Iterator[None]:
    """TRL's fused head computes log-probabilities alone; where its trainers read more, they find zeros."""
    add = MODULES[work.kind].add_fused_lm_head

    def add_plain(model: Any, *arguments: Any, outputs: Any = (), **options: Any) -> None:
        add(model, *arguments, outputs=("log_probs",), **options)
        fused = model.forward

        def forward(*given: Any, **named: Any) -> Any:
            output = fused(*given, **named)
            if named.get("fused_lm_head"):
                zeros = torch.zeros_like(output.log_probs)
                output.entropy = output.mean_logits = zeros
                output.is_top1 = zeros.bool()
            return output

        forward.__signature__ = inspect.signature(fused)  # type: ignore[attr-defined]  # `generate` reads it
        model.forward = forward

    with patch.object(MODULES[work.kind], "add_fused_lm_head", add_plain):
        yield


@contextlib.contextmanager
def our_numbers(work: Work, seed: int) -> Iterator[None]:
    """The draws of `generate` from the numbers our engine draws with, by the same inverse of the distribution."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(0)
    step = NEW_TOKENS

    def draw(probabilities: torch.Tensor, num_samples: int = 1, **_: Any) -> torch.Tensor:
        nonlocal numbers, step
        if step == NEW_TOKENS:
            sampling = Sampling(NEW_TOKENS, temperature=TEMPERATURE)
            numbers, step = draw_uniforms(work.batch, GROUP, sampling, generator).flatten(0, 1), 0
        cumulative = probabilities.float().cumsum(-1)
        threshold = numbers[:, step, None].to(cumulative) * cumulative[:, -1:]
        step += 1
        return torch.searchsorted(cumulative, threshold, right=True).clamp(max=probabilities.shape[-1] - 1)

    with patch.object(torch, "multinomial", draw):
        yield


# --- looking -------------------------------------------------------------------------------------------------------------


def watch_tokens(trainer: Any, work: Work, measured: Measured) -> None:
    compute = trainer.compute_loss

    def counted(model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        measured.tokens.append(int(trained_mask(inputs, work).sum()))
        return compute(model, inputs, *arguments, **options)

    trainer.compute_loss = counted


def trained_mask(inputs: dict[str, Any], work: Work) -> torch.Tensor:
    match work.kind:
        case "grpo":
            return inputs["completion_mask"]
        case "sft":
            return inputs["labels"][:, 1:] != -100
        case "dpo":
            return inputs["completion_mask"][:, 1:]


def keep_first_step(trainer: Any, measured: Measured) -> None:
    compute, backward = trainer.compute_loss, trainer.accelerator.backward
    weights = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}

    def computed(model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        if "rows" not in measured.first:
            ids = inputs.get("completion_ids", inputs.get("labels", inputs.get("input_ids")))
            mask = inputs["completion_mask"] if "completion_mask" in inputs else inputs["labels"] != -100
            measured.first["rows"] = sorted(row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True))
        return compute(model, inputs, *arguments, **options)

    def after_backward(loss: Any, *arguments: Any, **options: Any) -> Any:
        result = backward(loss, *arguments, **options)
        measured.first.setdefault("loss", float(loss.detach()))
        measured.first.setdefault("gradient", {name: weight.grad.clone() for name, weight in weights.items()})
        return result

    class AfterStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            measured.first.setdefault("weights", {name: weight.detach().clone() for name, weight in weights.items()})

    trainer.compute_loss, trainer.accelerator.backward = computed, after_backward
    trainer.add_callback(AfterStep())
