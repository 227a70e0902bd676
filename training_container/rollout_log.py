"""The rollout log: what the model said and how it was scored, so that a person can see what a reward really pays for.

    checkpoints/rollouts/step-40.jsonl      one line a completion of step 40:
    {"step": 40, "index": 3, "row": "train.jsonl:12", "prompt": "4+4=", "completion": "8", "reward": 1.0,
     "components": {"exact": 1.0, "style": null}, "notes": {}, "advantage": 0.7, "truncated": false, "tokens": 2}

It lies with the checkpoints, for their folder is mirrored to S3 while the run trains; nothing there takes `rollouts` for a
checkpoint. A step's file is replaced as a whole: a resumed run that makes a step again says it again, and no line is lost
or doubled.

Everything that was ever mirrored is brought back at every restart, so the log is bounded. What is over the limit goes from
the oldest steps on; their files are emptied and not removed, since S3 keeps what is removed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microtuning_core.domain.layout import ROLLOUTS, rollout_file, step_of_rollout_file

from .metrics import json_safe
from .paths import write_durably

MAX_BYTES = 64 * 2**20
# A step's share of it at most, so that the last steps are always there.
_STEP_SHARE = 1 / 16


@dataclass(frozen=True)
class Said:
    """One completion as the log tells of it.

    row: "file:line" of its prompt in the data. prompt, completion: texts, or messages for chat rows. reward: NaN when not
    scored. components, notes: of its scores, by name. advantage: None where it is not known. tokens: of the completion.
    """

    row: str
    prompt: Any
    completion: Any
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    advantage: float | None = None
    truncated: bool = False
    tokens: int = 0


class RolloutLog:
    """Writes the log of one run.

    Args:
        checkpoints: the job's folder of checkpoints.
        share: of the completions that are written: which ones follows from the seed and the step.
    """

    def __init__(self, checkpoints: Path, *, seed: int, share: float = 1.0, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._seed, self._share, self._max_bytes = checkpoints / ROLLOUTS, seed, share, max_bytes

    def write(self, step: int, completions: Sequence[Said]) -> None:
        """Put down all completions that step `step` is made of, in place of what the log has of that step."""
        lines = [
            json.dumps(json_safe({"step": step, "index": index} | vars(said)), ensure_ascii=False) + "\n"
            for index, said in enumerate(completions)
            if is_chosen(self._seed, step, index, self._share)
        ]
        if not lines:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._folder / rollout_file(step), "".join(within(lines, int(_STEP_SHARE * self._max_bytes))))
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        found = {step: path for path in self._folder.iterdir() if (step := step_of_rollout_file(path.name)) is not None}
        sizes = {step: found[step].stat().st_size for step in sorted(found)}
        total = sum(sizes.values())
        for step, size in sizes.items():
            if total <= self._max_bytes:
                return
            if size:
                found[step].write_bytes(b"")
                total -= size


def is_chosen(seed: int, step: int, index: int, share: float) -> bool:
    """Whether completion `index` of a step is among the `share` that is written."""
    drawn = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()[:7], "big")
    return drawn < share * 2**56


def within(lines: Sequence[str], max_bytes: int) -> list[str]:
    """The first lines that fit."""
    kept, size = [], 0
    for line in lines:
        size += len(line.encode())
        if size > max_bytes:
            break
        kept.append(line)
    return kept
