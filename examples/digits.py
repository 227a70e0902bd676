"""The task of the examples: sort six digits. Data are made here, from a seed, and put into the stage's bucket.

{"prompt": "382914>", "answer": "123489"}
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microtuning_sdk import Stage

RIGHT_SHARE = 0.3  # of the demonstrations; the others copy the digits as they are, or sort them backwards


def problems(count: int, seed: str) -> list[dict[str, str]]:
    """Prompts with their answers."""
    chance = random.Random(seed)
    drawn = ["".join(chance.choices("0123456789", k=6)) for _ in range(count)]
    return [{"prompt": f"{digits}>", "answer": "".join(sorted(digits))} for digits in drawn]


def demonstrations(count: int, seed: str) -> list[dict[str, str]]:
    """Prompts with completions of which 30 % are right."""
    chance = random.Random(seed)
    return [{"prompt": row["prompt"], "completion": _demonstrated(row, chance)} for row in problems(count, seed)]


def _demonstrated(row: dict[str, str], chance: random.Random) -> str:
    if chance.random() < RIGHT_SHARE:
        return row["answer"]
    return row["prompt"][:-1] if chance.random() < 0.5 else row["answer"][::-1]


def put(stage: Stage, file: str, rows: list[dict[str, str]]) -> str:
    """Writes the rows to the stage's bucket, as `aws s3 cp` would, and returns their address."""
    key = f"tenants/default/datasets/sort-digits/{file}"
    body = "".join(json.dumps(row) + "\n" for row in rows)
    stage.s3.put_object(Bucket=stage.bucket, Key=key, Body=body.encode())
    return f"s3://{stage.bucket}/{key}"
