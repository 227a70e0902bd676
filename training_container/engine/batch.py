"""What is trained on: rows of tokens, and what a loss sees of some of them.

Axes: N the trained tokens of a micro-batch, laid end to end, row after row · B its rows. How the rows reach the model is a
layout's business (layouts/); a loss never knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One row to train on: token ids, and which of them carry a loss.

    trained: one flag a token; the first token is never trained, for nothing stands before it.
    advantages: one for the row, or one a trained token, in order.
    sampled_logprobs, old_logprobs, reference_logprobs: one a trained token, in order: under the distribution it was drawn
        from, under the policy before this rollout's first update, under the reference.
    label: of the row, for losses that need one (kto: 1 good, 0 bad).
    group: consecutive rows of the same group begin with the same prompt; whoever computes it once may.
    """

    tokens: Sequence[int]
    trained: Sequence[bool]
    advantages: float | Sequence[float] = 0.0
    sampled_logprobs: Sequence[float] = ()
    old_logprobs: Sequence[float] = ()
    reference_logprobs: Sequence[float] = ()
    label: float = 0.0
    group: int | None = None

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained)

    @property
    def token_advantages(self) -> Sequence[float]:
        """One a trained token."""
        if isinstance(self.advantages, int | float):
            return [float(self.advantages)] * self.trained_tokens
        return self.advantages


@dataclass(frozen=True)
class Totals:
    """Trained tokens and rows of a whole optimizer step, over all its micro-batches and processes."""

    tokens: int
    rows: int

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Totals:
        return cls(sum(example.trained_tokens for example in examples), len(examples))


@dataclass(frozen=True)
class MicroBatch:
    """What a loss sees beside the log-probabilities [N], or scores [B]. Fields that no example has are empty."""

    target_N: Tensor  # the trained tokens' ids
    row_N: Tensor  # which row each belongs to
    advantages_N: Tensor
    sampled_logprobs_N: Tensor
    old_logprobs_N: Tensor
    reference_logprobs_N: Tensor
    label_B: Tensor
    group_B: Tensor  # -1 for rows without one
    totals: Totals

    @property
    def rows(self) -> int:
        return len(self.label_B)

    @property
    def tokens_B(self) -> Tensor:
        """Trained tokens of each row."""
        return torch.bincount(self.row_N, minlength=self.rows)

    def per_row(self, values_N: Tensor) -> Tensor:
        """The sum of each row's values, shape [B], with gradient."""
        return values_N.new_zeros(self.rows).index_add(0, self.row_N, values_N)


# (log-probabilities [N] or scores [B], their micro-batch) -> loss, metrics; each a share of the whole step's value, so that
# adding them up over micro-batches gives the full batch's, however it was cut.
Metrics = dict[str, Tensor]
LossFn = Callable[[Tensor, MicroBatch], tuple[Tensor, Any]]


def micro_batch(examples: Sequence[Example], totals: Totals, device: torch.device) -> MicroBatch:
    def laid_out(values: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([value for row in values for value in row], dtype=torch.float32).to(device)

    counts = [example.trained_tokens for example in examples]
    targets = [
        token for example in examples for token, trained in zip(example.tokens, example.trained, strict=True) if trained
    ]
    return MicroBatch(
        target_N=torch.tensor(targets, dtype=torch.long).to(device),
        row_N=torch.arange(len(examples)).repeat_interleave(torch.tensor(counts)).to(device),
        advantages_N=laid_out([example.token_advantages for example in examples]),
        sampled_logprobs_N=laid_out([example.sampled_logprobs for example in examples]),
        old_logprobs_N=laid_out([example.old_logprobs for example in examples]),
        reference_logprobs_N=laid_out([example.reference_logprobs for example in examples]),
        label_B=torch.tensor([example.label for example in examples], dtype=torch.float32).to(device),
        group_B=torch.tensor([-1 if example.group is None else example.group for example in examples]).to(device),
        totals=totals,
    )


def units(examples: Sequence[Example], *, whole_groups: bool) -> list[list[int]]:
    """Indices of rows that must not be parted: every row alone, or the consecutive rows of a group together."""
    if not whole_groups:
        return [[index] for index in range(len(examples))]
    keys = [(-index - 1 if example.group is None else example.group) for index, example in enumerate(examples)]
    return [[index for index, _ in members] for _, members in groupby(enumerate(keys), key=lambda pair: pair[1])]


def micro_batches(
    examples: Sequence[Example], parts: Sequence[list[int]], *, rows: int | None, max_tokens: int
) -> Iterator[list[int]]:
    """Cut units of rows into micro-batches of at most `rows` rows, or (None) of `max_tokens` tokens, padding included.

    Longest first, so that rows of like length share a micro-batch, and the one that needs most memory fails at once and
    not after half an epoch. A unit larger than the limit is a micro-batch of its own.
    """
    taken: list[int] = []
    longest = 0
    for unit in sorted(parts, key=lambda unit: -_longest(examples, unit)):
        after = len(taken) + len(unit)
        if taken and (after > rows if rows else after * longest > max_tokens):
            yield taken
            taken = []
        longest = longest if taken else _longest(examples, unit)
        taken = taken + unit
    if taken:
        yield taken


def _longest(examples: Sequence[Example], unit: Sequence[int]) -> int:
    return max(len(examples[index].tokens) for index in unit)
