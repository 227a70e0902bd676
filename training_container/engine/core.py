"""The engine: one policy with its tokenizer, optimizer and sampler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from microtuning_core.domain.spec import ModelSpec

from ..losses import Metrics
from .forward import Example, MicroBatch, collate, micro_batches, token_logprobs, undressed
from .models import build_policy, is_adapter, restore_policy, stop_token_ids
from .randomness import random_state, restore_random_state, seed_everything
from .sampler import Completion, Sampling, sample

# (log-probabilities of the trained tokens, their micro-batch, trained tokens of the whole step) -> loss, metrics
LossFn = Callable[[Tensor, MicroBatch, int], tuple[Tensor, Metrics]]

WEIGHTS, OPTIMIZER, RANDOM, RANDOM_JSON = "model", "optimizer.safetensors", "random.safetensors", "random.json"

# A micro-batch is cut so that one [N, V] array of float32 logits stays below 1 GiB, and at 16,384 tokens anyway.
_MAX_LOGITS, _MAX_TOKENS = 2**28, 16_384


@dataclass(frozen=True)
class OptimStep:
    """Result of `optim_step`: the gradient's norm before clipping, and whether the weights moved."""

    grad_norm: float
    applied: bool


class Engine:
    """A policy and what trains it. Build one with `Engine.build` or `Engine.restore`."""

    def __init__(self, model: Any, tokenizer: Any, *, spec: ModelSpec, source: str, seed: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.micro_batch_rows: int | None = None
        self._spec, self._source = spec, source
        self._sampler_generator = torch.Generator().manual_seed(seed)
        self.stop_tokens = stop_token_ids(undressed(model), tokenizer)
        self.new_optimizer()

    @classmethod
    def build(cls, spec: ModelSpec, *, source: str, texts: Iterable[str], seed: int, device: torch.device) -> Engine:
        """A fresh policy; every source of chance begins at `seed`."""
        model, tokenizer = build_policy(spec, source=source, texts=texts, seed=seed, device=device)
        seed_everything(seed)
        return cls(model, tokenizer, spec=spec, source=source, seed=seed)

    @classmethod
    def restore(cls, spec: ModelSpec, folder: Path, *, source: str, device: torch.device) -> Engine:
        """The engine whose `save_state` wrote `folder`: its next step gives the same bits."""
        model, tokenizer = restore_policy(spec, folder / WEIGHTS, source=source, device=device)
        engine = cls(model, tokenizer, spec=spec, source=source, seed=0)
        engine._load_trainer(folder)
        return engine

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    # --- primitives -----------------------------------------------------------------------------------------------------

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, group_size: int = 1
    ) -> list[list[Completion]]:
        """`group_size` completions of each prompt (token ids)."""
        self.model.eval()
        return sample(
            self.model,
            prompts,
            sampling,
            group_size=group_size,
            stop_tokens=self.stop_tokens,
            generator=self._sampler_generator,
        )

    @torch.no_grad()
    def forward(self, examples: Sequence[Example], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-probability of every trained token, one list an example."""
        self.model.eval()
        found: dict[int, list[float]] = {}
        for part in self._cut(examples):
            flat = token_logprobs(self.model, collate(part, self.device), temperature=temperature).tolist()
            for example in part:
                found[id(example)], flat = flat[: example.trained_tokens], flat[example.trained_tokens :]
        return [found[id(example)] for example in examples]

    def forward_backward(
        self,
        examples: Sequence[Example],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        total_tokens: int | None = None,
    ) -> dict[str, float]:
        """Add the gradient of the batch's loss, whatever the micro-batches are; gives the loss and its metrics.

        `total_tokens` (the trained tokens of these examples) is given by who left out examples without a gradient.
        """
        self.model.train()
        trained = sum(example.trained_tokens for example in examples)
        sums: dict[str, Tensor] = {}
        for part in self._cut(examples):
            batch = collate(part, self.device)
            logprobs_N = token_logprobs(self.model, batch, temperature=temperature)
            loss, metrics = loss_fn(logprobs_N, batch, total_tokens or trained)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in {"loss": loss.detach() * trained, **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value
        return {name: float(value) / trained for name, value in sums.items()}

    def optim_step(self, learning_rate: float, max_grad_norm: float, *, weight_decay: float = 0.0) -> OptimStep:
        """Clip, step and clear the gradient. A gradient that is not finite is dropped and leaves the weights alone."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights, max_grad_norm))
        applied = math.isfinite(norm)
        if applied:
            for group in self._optimizer.param_groups:
                group.update(lr=learning_rate, weight_decay=weight_decay)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return OptimStep(norm, applied)

    def new_optimizer(self) -> None:
        """Forget all moments, as at the start of a phase. Rate and decay come with every step."""
        self._weights = list(self.trainable.values())
        self._optimizer = torch.optim.AdamW(self._weights, lr=0.0, weight_decay=0.0, fused=True)

    def _cut(self, examples: Sequence[Example]) -> Iterable[list[Example]]:
        vocabulary = undressed(self.model).get_output_embeddings().weight.shape[0]
        max_tokens = max(1, min(_MAX_TOKENS, _MAX_LOGITS // vocabulary))
        return micro_batches(examples, rows=self.micro_batch_rows, max_tokens=max_tokens)

    # --- keeping --------------------------------------------------------------------------------------------------------

    def save_weights(self, folder: Path) -> None:
        """Weights (or the adapter) and tokenizer, as from_pretrained reads them."""
        # Without the flag peft asks the hub whether the vocabulary grew.
        self.model.save_pretrained(folder, **({"save_embedding_layers": False} if is_adapter(self.model) else {}))
        self.tokenizer.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """Weights, optimizer and every source of chance; safetensors and JSON only."""
        self.save_weights(folder / WEIGHTS)
        save_file(self._optimizer_tensors(), folder / OPTIMIZER)
        plain, tensors = random_state({"sampler": self._sampler_generator})
        save_file(tensors, folder / RANDOM)
        (folder / RANDOM_JSON).write_text(json.dumps(plain), encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """Become what `save_state` wrote."""
        self.model, self.tokenizer = restore_policy(
            self._spec, folder / WEIGHTS, source=self._source, device=self.device
        )
        self.new_optimizer()
        self._load_trainer(folder)

    def _load_trainer(self, folder: Path) -> None:
        self._load_optimizer_tensors(load_file(folder / OPTIMIZER))
        plain = json.loads((folder / RANDOM_JSON).read_text("utf-8"))
        restore_random_state(plain, load_file(folder / RANDOM), {"sampler": self._sampler_generator})

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}|{key}": value.contiguous()
            for name, weight in self.trainable.items()
            for key, value in self._optimizer.state.get(weight, {}).items()
        }

    def _load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        by_name = self.trainable
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition("|")
            weight = by_name[name]
            self._optimizer.state[weight][key] = value.to(weight.device)
