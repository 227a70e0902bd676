"""What is trained on: rows of tokens, and what a loss sees of some of them.

Axes: N the trained tokens of a micro-batch, laid end to end, row after row · B its rows. How the rows reach the model is a
layout's business (layouts/); a loss never knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


_ONE_EACH = ("advantages", "sampled_logprobs", "old_logprobs", "reference_logprobs")
_FORMS = ("a list with one number a trained token", "a float, or a list with one number a trained token")


@dataclass(frozen=True)
class Example:
    """One row to train on: token ids, and which of them carry a loss.

    trained: one flag a token; the first token is never trained, for nothing stands before it.
    advantages: one for the row, or one a trained token, in order.
    sampled_logprobs, old_logprobs, reference_logprobs: one a trained token, in order: under the distribution it was drawn
        from, under the policy before this rollout's first update, under the reference.
    label: of the row, for losses that need one (kto: 1 good, 0 bad).
    group: consecutive rows of the same group begin with the same prompt; whoever computes it once may.

    Raises:
        ValueError: the lists do not fit each other; said here, where it is written, for no loss would notice.
    """

    tokens: Sequence[int]
    trained: Sequence[bool]
    advantages: float | Sequence[float] = 0.0
    sampled_logprobs: Sequence[float] = ()
    old_logprobs: Sequence[float] = ()
    reference_logprobs: Sequence[float] = ()
    label: float = 0.0
    group: int | None = None

    def __post_init__(self) -> None:
        if len(self.trained) != len(self.tokens) and (len(self.tokens) or any(self.trained)):
            raise ValueError(
                f"Example: trained has {len(self.trained)} flags for {len(self.tokens)} tokens; give one each"
            )
        if len(self.trained) and self.trained[0]:
            raise ValueError("Example: trained[0] is set, but nothing stands before the first token; give False")
        for name in _ONE_EACH:
            self._check_one_each(name)

    def _check_one_each(self, name: str) -> None:
        values = getattr(self, name)
        if name == "advantages" and isinstance(values, int | float):
            return
        if not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
            raise ValueError(f"Example: {name} is a {type(values).__name__}; give {_FORMS[name == 'advantages']}")
        if len(values) != self.trained_tokens and (len(values) or name == "advantages"):
            raise ValueError(f"Example: {name} has {len(values)} numbers for {self.trained_tokens} trained tokens")

    @cached_property
    def trained_at(self) -> IntArray:
        """Where the trained tokens are."""
        return np.flatnonzero(np.asarray(self.trained, dtype=bool))

    @property
    def trained_tokens(self) -> int:
        return len(self.trained_at)

    @property
    def first_trained(self) -> int:
        """Where the first trained token is; the row's length where none is."""
        return int(self.trained_at[0]) if len(self.trained_at) else len(self.tokens)

    @property
    def read_tokens(self) -> int:
        """How many tokens the model has to read: those before the last trained one. At least one."""
        return max(1, int(self.trained_at[-1])) if len(self.trained_at) else 1

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
    counts_B = torch.tensor([example.trained_tokens for example in examples])
    row_N = torch.arange(len(examples)).repeat_interleave(counts_B)

    def on_device(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(device)

    def laid_out(values: Iterable[Sequence[float]]) -> Tensor:
        return on_device(list(chain.from_iterable(values)))

    advantages = [example.advantages for example in examples]
    if all(isinstance(value, int | float) for value in advantages):
        advantages_N = on_device(advantages)[row_N.to(device)]  # type: ignore[arg-type]
    else:
        advantages_N = laid_out(example.token_advantages for example in examples)
    return MicroBatch(
        target_N=targets(examples).to(device),
        row_N=row_N.to(device),
        advantages_N=advantages_N,
        sampled_logprobs_N=laid_out(example.sampled_logprobs for example in examples),
        old_logprobs_N=laid_out(example.old_logprobs for example in examples),
        reference_logprobs_N=laid_out(example.reference_logprobs for example in examples),
        label_B=on_device([example.label for example in examples]),
        group_B=torch.tensor([-1 if example.group is None else example.group for example in examples]).to(device),
        totals=totals,
    )


def targets(examples: Sequence[Example]) -> Tensor:
    """Ids of the trained tokens, laid end to end, shape [N]."""
    found = [np.asarray(example.tokens, dtype=np.int64)[example.trained_at] for example in examples]
    return torch.from_numpy(np.concatenate(found))
