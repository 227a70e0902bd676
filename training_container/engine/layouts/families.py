"""Rows that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ..batch import Example, IntArray


@dataclass(frozen=True)
class Family:
    """Consecutive examples (their indices), of which the first `prefix` tokens are the same: at least one.

    Nothing in the prefix is trained, so what predicts a trained token is its last token or stands behind it.
    """

    rows: list[int]
    prefix: int


def families(examples: Sequence[Example]) -> list[Family]:
    """Each group as a family; a row without one, or with another beginning than its group, as one of its own."""
    found = []
    for rows in consecutive_groups(examples):
        shared = shared_prefix([examples[row] for row in rows])
        if shared:
            found.append(Family(rows, shared))
        else:
            found += [Family([row], examples[row].first_trained) for row in rows]
    return found


def consecutive_groups(examples: Sequence[Example]) -> list[list[int]]:
    """Indices of consecutive rows of the same group; a row without a group is alone."""
    keys = [(-index - 1 if example.group is None else example.group) for index, example in enumerate(examples)]
    return [[index for index, _ in members] for _, members in groupby(enumerate(keys), key=lambda pair: pair[1])]


def shared_prefix(examples: Sequence[Example]) -> int:
    """Length of the longest beginning that all share, found from the tokens; it ends where any one's training begins."""
    limit = min(min(example.first_trained, len(example.tokens)) for example in examples)
    first, *others = (list(example.tokens[:limit]) for example in examples)
    if all(other == first for other in others):
        return limit
    # Of sorted lists the least and the greatest differ first.
    least, greatest = min([first, *others]), max([first, *others])
    return next(index for index, (one, other) in enumerate(zip(least, greatest, strict=True)) if one != other)


def pad(rows: Sequence[Sequence[int] | IntArray], *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids, and which of them are real, both of shape [rows, longest]. Padding is token 0."""
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max())
    column = np.arange(longest)
    real = column >= longest - lengths[:, None] if left else column < lengths[:, None]
    ids = np.zeros(real.shape, dtype=np.int64)
    ids[real] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return torch.from_numpy(ids), torch.from_numpy(real)


def positions(real_B_L: Tensor) -> Tensor:
    """Positions that begin at a row's first real token: learned positions would otherwise depend on the padding."""
    return (real_B_L.long().cumsum(1) - 1).clamp(min=0)
