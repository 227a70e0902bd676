"""The engine: one policy with its tokenizer, optimizer and sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from microtuning_core.domain.spec import ModelSpec

from .batch import Example, LossFn, Totals, micro_batch
from .forward import undressed
from .layouts import BY_NAME
from .models import build_policy, restore_policy, stop_token_ids
from .optimizer_state import load_optimizer_tensors, optimizer_tensors
from .parallel import World
from .probe import costs_of, sampling_ways, sharing_layouts, usable
from .randomness import random_state, read_random_state, seed_everything
from .rows import Limits, micro_batches, units
from .sampler import Completion, Sampling, Ways, check_prompts, draw_uniforms, sample
from .scores import row_scores
from .sharding import whole, whole_state
from .snapshot import OPTIMIZER, WEIGHTS, Snapshot, copied, copied_weights, write_weights
from .vllm_sampler import Sampler

Head = Literal["policy", "score"]

# A micro-batch is cut so that one [N, V] array of logits has at most so many numbers (1 GiB), and at so many tokens anyway.
# A CPU is no faster with more than 4,096, and needs less memory with fewer.
_MAX_LOGITS, _MAX_TOKENS, _MAX_TOKENS_CPU = 2**28, 16_384, 4_096


def _nothing() -> None:
    """Nobody watches."""


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
        self.halvings = 0  # of micro-batches and of what is drawn at once, after memory ran out
        self.beat: Callable[[], None] = _nothing  # called between pieces of work
        self._spec, self._source, self._head = spec, source, head
        self._sampler_generator = torch.Generator().manual_seed(seed)
        self._trusted: tuple[str, ...] | None = None
        self._ways: Ways | None = None
        self._costs = costs_of(model)
        self.stop_tokens = stop_token_ids(undressed(model), tokenizer)
        self.use_sampler(None)
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
        world = world or World()
        model, tokenizer = build_policy(
            spec, source=source, texts=texts, seed=seed, device=device, head=head, world=world
        )
        seed_everything(seed, rank=world.rank)
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
        world = world or World()
        model, tokenizer = restore_policy(spec, folder / WEIGHTS, source=source, device=device, head=head, world=world)
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
        return self._sampler.name if self._sampler else "engine"

    @property
    def samples_exactly(self) -> bool:
        """Whether a completion's log-probabilities are the trainer's own, so that nobody has to compute them again."""
        return self._sampler is None

    def use_sampler(self, sampler: Sampler | None) -> None:
        """Let another program draw; None lets the engine do it. Training is the engine's in any case."""
        self._sampler, self._sampler_is_behind = sampler, True

    # --- primitives -----------------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        group_size: int = 1,
        generator: torch.Generator | None = None,
    ) -> list[list[Completion]]:
        """`group_size` completions of each prompt (token ids).

        generator: of the chance; the engine's own, which checkpoints keep, where not given.

        Raises:
            ValueError: a prompt has no token, or a group no completion.
        """
        check_prompts(prompts, group_size)
        self.model.eval()
        chance = generator or self._sampler_generator
        if self._sampler is not None:
            return self._sample_beside(self._sampler, prompts, sampling, group_size, chance)
        # Drawn for all prompts on every process: what a completion becomes depends on nothing but its own numbers.
        uniforms_P_G_T = draw_uniforms(len(prompts), group_size, sampling, chance)
        mine = self.world.share([len(prompt) + sampling.max_new_tokens for prompt in prompts])
        with whole(self.model):
            self._ways = self._ways or sampling_ways(self.model, self.device)
            drawn = [
                group
                for part in self._drawn_at_once(mine)
                for group in sample(
                    self.model,
                    [prompts[index] for index in part],
                    sampling,
                    group_size=group_size,
                    stop_tokens=self.stop_tokens,
                    uniforms_P_G_T=uniforms_P_G_T[part],
                    ways=self._ways,
                    beat=self.beat,
                )
            ]
        return self._everyones(mine, drawn)

    def _drawn_at_once(self, indices: list[int]) -> list[list[int]]:
        """All prompts together, or in as many parts as memory that ran out has taught."""
        size = max(1, -(-len(indices) // 2**self.halvings))
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    def _sample_beside(
        self,
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        group_size: int,
        chance: torch.Generator,
    ) -> list[list[Completion]]:
        """The same by another program, which gets the weights first if they have changed."""
        if self._sampler_is_behind:
            sampler.take_weights(self.model)
            self._sampler_is_behind = False
        seeds = torch.randint(2**31, (len(prompts),), generator=chance).tolist()
        mine = self.world.share([len(prompt) + sampling.max_new_tokens for prompt in prompts])
        drawn = sampler.sample(
            [prompts[index] for index in mine],
            sampling,
            group_size=group_size,
            stop_tokens=self.stop_tokens,
            seeds=[seeds[index] for index in mine],
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
        with whole(self.model), self.model.disable_adapter() if reference else nullcontext():
            for layout, part in self._cut(examples):
                taken = [examples[index] for index in part]
                flat = self._outputs(taken, temperature, layout).tolist()
                self.beat()
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
        parts = list(self._cut(examples, whole_groups=whole_groups))
        spare = self.world.rounds(len(parts)) - len(parts)  # agreed on before anybody begins
        for layout, part in parts:
            taken = [examples[index] for index in part]
            loss, metrics = loss_fn(self._outputs(taken, temperature, layout), micro_batch(taken, totals, self.device))
            loss.backward()  # type: ignore[no-untyped-call]
            self.beat()
            for name, value in {"loss": loss, **metrics}.items():
                share = torch.as_tensor(value, dtype=torch.float32).detach()
                sums[name] = sums[name] + share if name in sums else share
        for _ in range(spare):
            self._accompany(examples)
        return self.world.sum(sums)

    def _accompany(self, examples: Sequence[Example]) -> None:
        """A forward and backward for nothing, so that others can gather the weights that are spread over us all."""
        example = next(example for example in examples if example.trained_tokens)
        (0.0 * self._outputs([example], 1.0, "plain").sum()).backward()  # type: ignore[no-untyped-call]

    def _outputs(self, examples: Sequence[Example], temperature: float, layout: str) -> Tensor:
        """Log-probabilities of the trained tokens [N], or the rows' scores [B]."""
        if self._head == "score":
            return row_scores(self.model, examples, device=self.device)
        return BY_NAME[layout](self.model, examples, device=self.device, temperature=temperature)

    def _everyones(self, mine: Sequence[int], results: Sequence[Any]) -> list[Any]:
        """Every process's results, in the order of the work's indices."""
        pairs = [pair for part in self.world.gather(list(zip(mine, results, strict=True))) for pair in part]
        return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]

    def optim_step(self, learning_rate: float, max_grad_norm: float, *, weight_decay: float = 0.0) -> OptimStep:
        """Clip, step and clear the gradient. A gradient that is not finite is dropped and leaves the weights alone."""
        # Here and not after every backward: what several calls of forward_backward add up crosses the wire once.
        self.bytes_sent = self.world.add_gradients(self._weights)
        norm = self.world.clip_gradients(self._weights, max_grad_norm)
        applied = not self.world.most(int(not math.isfinite(norm)))
        if applied:
            for group in self._optimizer.param_groups:
                group.update(lr=learning_rate, weight_decay=weight_decay)
            self._optimizer.step()
            self._sampler_is_behind = True
        self._optimizer.zero_grad(set_to_none=True)
        return OptimStep(norm, applied)

    def new_optimizer(self) -> None:
        """Forget all moments, as at the start of a phase. Rate and decay come with every step."""
        self._weights = list(self.trainable.values())
        self.bytes_sent = 0
        self._optimizer = torch.optim.AdamW(self._weights, lr=0.0, weight_decay=0.0, fused=True)

    def _cut(self, examples: Sequence[Example], *, whole_groups: bool = False) -> Iterable[tuple[str, list[int]]]:
        """This process's micro-batches: a layout, and indices of examples."""
        most = _MAX_TOKENS_CPU if self.device.type == "cpu" else _MAX_TOKENS
        part = 2**self.halvings
        limits = Limits(
            max(1, most // part),
            max(1, self._max_trained // part),
            max(1, self.micro_batch_rows // part) if self.micro_batch_rows else None,
            self._costs.call(self.device.type),
        )
        sharing = self._sharing() if any(example.group is not None for example in examples) else ()
        found = units(examples, limits=limits, costs=self._costs, sharing=sharing, whole_groups=whole_groups)
        mine = [found[index] for index in self.world.share([unit.tokens for unit in found])]
        for taken in micro_batches(mine, limits):
            yield taken[0].layout, [row for unit in taken for row in unit.rows]

    def _sharing(self) -> tuple[str, ...]:
        """Layouts that may be used now. Found at the first need: most runs of sft have no groups."""
        if self._head == "score" or self.world.forwards_together:
            return ()
        if self._trusted is None:
            self._trusted = sharing_layouts(self.model, self.device)
        return usable(self.model, self._trusted)

    @property
    def _max_trained(self) -> int:
        if self._head == "score":
            return _MAX_TOKENS
        vocabulary = int(undressed(self.model).get_output_embeddings().weight.shape[0])
        return max(1, _MAX_LOGITS // vocabulary)

    # --- keeping --------------------------------------------------------------------------------------------------------

    def save_weights(self, folder: Path) -> None:
        """Weights (or the adapter) and tokenizer, as from_pretrained reads them. Every process calls, the main writes."""
        state = whole_state(self.model, keep=self.world.is_main)
        if self.world.is_main:
            write_weights(self.model, self.tokenizer, state, folder)

    def save_state(self, folder: Path) -> None:
        """Weights, optimizer and every source of chance. Every process calls, as above."""
        snapshot = self.snapshot(copies=False)
        if snapshot is not None:
            snapshot.write(folder)

    def snapshot(self, *, copies: bool = True) -> Snapshot | None:
        """The state as it is now, on the main process; None on the others, which take part.

        copies: in memory of their own, so that training may go on before it is written.
        """
        weights = whole_state(self.model, keep=self.world.is_main)
        moments = optimizer_tensors(self.trainable, self._optimizer)
        chances = self.world.gather(random_state({"sampler": self._sampler_generator}))
        if not self.world.is_main:
            return None
        if copies:
            weights = copied_weights(self.model) if weights is None else weights
            moments = {name: copied(tensor) for name, tensor in moments.items()}
        return Snapshot(self.model, self.tokenizer, weights, moments, chances)

    def load_state(self, folder: Path) -> None:
        """Become what `save_state` wrote."""
        self.model, self.tokenizer = restore_policy(
            self._spec, folder / WEIGHTS, source=self._source, device=self.device, head=self._head, world=self.world
        )
        self.new_optimizer()
        self._load_trainer(folder)
        self._sampler_is_behind = True

    def _load_trainer(self, folder: Path) -> None:
        load_optimizer_tensors(self.trainable, self._optimizer, load_file(folder / OPTIMIZER))
        read_random_state(folder, self.world.rank, {"sampler": self._sampler_generator})
