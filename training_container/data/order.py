"""Which row comes when: an order for each epoch, and a place in it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cursor:
    """Where in the data a run stands: rows before `position` of this epoch's order are done.

    The end of an epoch is written as the start of the next, never as (epoch, all rows): so a run resumed exactly there
    cannot take the coming epoch for done.
    """

    epoch: int = 0
    position: int = 0

    def take(self, rows: int, batch: int, seed: int) -> tuple[list[int], Cursor]:
        """Indices of the next batch, and the cursor after it. An epoch's last batch may be smaller."""
        indices = epoch_order(seed, self.epoch, rows)[self.position : self.position + batch]
        end = self.position + len(indices)
        return indices, Cursor(self.epoch + 1, 0) if end >= rows else Cursor(self.epoch, end)

    def steps_left(self, rows: int, batch: int, epochs: int) -> int:
        """Batches from here to the end of the last epoch."""
        if self.epoch >= epochs:
            return 0
        return math.ceil((rows - self.position) / batch) + (epochs - self.epoch - 1) * math.ceil(rows / batch)


def epoch_order(seed: int, epoch: int, rows: int) -> list[int]:
    """The order of one epoch: a permutation that follows from seed and epoch alone, so a cursor is all there is to save."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(rows, generator=generator).tolist()
