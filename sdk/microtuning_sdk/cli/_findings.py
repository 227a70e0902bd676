"""What `microtuning doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `next_step` is there when it is not well."""

    what: str
    found: str
    next_step: str = ""

    @property
    def is_well(self) -> bool:
        return not self.next_step
