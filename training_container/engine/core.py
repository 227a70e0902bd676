"""The engine: one policy with its tokenizer, optimizer and sampler."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from microtuning_core.domain.spec import ModelSpec

from .batch import Example, LossFn, Totals, micro_batch, micro_batches, units
from .forward import undressed
from .layouts import plain
from .models import build_policy, is_adapter, restore_policy, stop_token_ids
from .parallel import World
from .randomness import random_state, restore_random_state, seed_everything
from .sampler import Completion, Sampling, draw_uniforms, sample
from .scores import row_scores

Head = Literal["policy", "score"]

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

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        spec: ModelSpec,
        source: str,
        seed: int,
        head: Head = "policy",
        world: World | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.world = world or World()
        self.micro_batch_rows: int | None = None
        self._spec, self._source, self._head = spec, source, head
        self._sampler_generator = torch.Generator().manual_seed(seed)
        self.stop_tokens = stop_token_ids(undressed(model), tokenizer)
        self.new_optimizer()

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        *,
        source: str,
        texts: Iterable[str],
        seed: int,
        device: torch.device,
        head: Head = "policy",
        world: World | None = None,
    ) -> Engine:
        """A fresh model; every source of chance begins at `seed`. head="score" gives a row one number (scores.py)."""
        model, tokenizer = build_policy(spec, source=source, texts=texts, seed=seed, device=device, head=head)
        seed_everything(seed)
        return cls(model, tokenizer, spec=spec, source=source, seed=seed, head=head, world=world)

    @classmethod
    def restore(
        cls,
        spec: ModelSpec,
        folder: Path,
        *,
        source: str,
        device: torch.device,
        head: Head = "policy",
        world: World | None = None,
    ) -> Engine:
        """The engine whose `save_state` wrote `folder`: its next step gives the same bits."""
        model, tokenizer = restore_policy(spec, folder / WEIGHTS, source=source, device=device, head=head)
        engine = cls(model, tokenizer, spec=spec, source=source, seed=0, head=head, world=world)
        engine._load_trainer(folder)
        return engine

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    @property
    def sampler_name(self) -> str:
        """Which sampler drew: our own, on the trainer's model, or an optional one beside it."""
        return "engine"

    @property
    def samples_exactly(self) -> bool:
        """Whether a completion's log-probabilities are the trainer's own, so that nobody has to compute them again."""
        return True

    # --- primitives -----------------------------------------------------------------------------------------------------

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, group_size: int = 1
    ) -> list[list[Completion]]:
        """`group_size` completions of each prompt (token ids)."""
        self.model.eval()
        # Drawn for all prompts on every process: what a completion becomes depends on nothing but its own numbers.
        uniforms_P_G_T = draw_uniforms(len(prompts), group_size, sampling, self._sampler_generator)
        mine = self.world.share([len(prompt) + sampling.max_new_tokens for prompt in prompts])
        drawn = sample(
            self.model,
            [prompts[index] for index in mine],
            sampling,
            group_size=group_size,
            stop_tokens=self.stop_tokens,
            uniforms_P_G_T=uniforms_P_G_T[mine],
        )
        return self._everyones(mine, drawn)

    @torch.no_grad()
    def forward(
        self, examples: Sequence[Example], *, temperature: float = 1.0, reference: bool = False
    ) -> list[list[float]]:
        """Log-probability of every trained token, one list an example (or its one score).

        reference: with the adapter switched off.
        """
        self.model.eval()
        indices: list[int] = []
        found: list[list[float]] = []
        with self.model.disable_adapter() if reference else nullcontext():
            for part in self._cut(examples):
                taken = [examples[index] for index in part]
                flat = self._outputs(taken, temperature).tolist()
                indices += part
                for example in taken:
                    count = 1 if self._head == "score" else example.trained_tokens
                    found.append(flat[:count])
                    flat = flat[count:]
        return self._everyones(indices, found)

    def forward_backward(
        self,
        examples: Sequence[Example],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        totals: Totals | None = None,
        whole_groups: bool = False,
    ) -> dict[str, float]:
        """Add the gradient of the batch's loss, whatever the micro-batches are; gives the loss and its metrics.

        totals: of these examples, given by who left out some that have no gradient.
        whole_groups: rows of a group stay in one micro-batch, as a loss over pairs needs.
        """
        self.model.train()
        totals = totals or Totals.of(examples)
        sums: dict[str, Tensor] = {}
        for part in self._cut(examples, whole_groups=whole_groups):
            taken = [examples[index] for index in part]
            loss, metrics = loss_fn(self._outputs(taken, temperature), micro_batch(taken, totals, self.device))
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in {"loss": loss, **metrics}.items():
                share = torch.as_tensor(value, dtype=torch.float32).detach()
                sums[name] = sums[name] + share if name in sums else share
        return self.world.sum(sums)

    def _outputs(self, examples: Sequence[Example], temperature: float) -> Tensor:
        """Log-probabilities of the trained tokens [N], or the rows' scores [B]."""
        if self._head == "score":
            return row_scores(self.model, examples, device=self.device)
        return plain.logprobs(self.model, examples, device=self.device, temperature=temperature)

    def _everyones(self, mine: Sequence[int], results: Sequence[Any]) -> list[Any]:
        """Every process's results, in the order of the work's indices."""
        pairs = [pair for part in self.world.gather(list(zip(mine, results, strict=True))) for pair in part]
        return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]

    def optim_step(self, learning_rate: float, max_grad_norm: float, *, weight_decay: float = 0.0) -> OptimStep:
        """Clip, step and clear the gradient. A gradient that is not finite is dropped and leaves the weights alone."""
        # Here and not after every backward: what several calls of forward_backward add up crosses the wire once.
        self.bytes_sent = self.world.add_gradients(self._weights)
        norm = self.world.clip_gradients(self._weights, max_grad_norm)
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
        self.bytes_sent = 0
        self._optimizer = torch.optim.AdamW(self._weights, lr=0.0, weight_decay=0.0, fused=True)

    def _cut(self, examples: Sequence[Example], *, whole_groups: bool = False) -> Iterable[list[int]]:
        """This process's micro-batches, as indices of examples."""
        found = units(examples, whole_groups=whole_groups)
        mine = self.world.share([sum(len(examples[index].tokens) for index in unit) for unit in found])
        return micro_batches(
            examples, [found[index] for index in mine], rows=self.micro_batch_rows, max_tokens=self._max_tokens
        )

    @property
    def _max_tokens(self) -> int:
        if self._head == "score":
            return _MAX_TOKENS
        vocabulary = int(undressed(self.model).get_output_embeddings().weight.shape[0])
        return max(1, min(_MAX_TOKENS, _MAX_LOGITS // vocabulary))

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
            self._spec, folder / WEIGHTS, source=self._source, device=self.device, head=self._head
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
