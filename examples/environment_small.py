"""An environment in twenty lines: guess a digit, told higher or lower.

python examples/environment_small.py
"""

from __future__ import annotations

import random

from microtuning_sdk import RLTrainer


class Guess:
    """Guess a digit from 1 to `highest`."""

    def __init__(self, highest: int = 9) -> None:
        self.highest, self.secret = highest, 0

    def reset(self, prompt: str) -> str:
        self.secret = random.randint(1, self.highest)
        return "?"

    def step(self, action: str) -> tuple[str, float, bool]:
        if action[:1] == str(self.secret):
            return "=", 1.0, True
        return ("+" if action[:1] < str(self.secret) else "-"), 0.0, False


def main() -> None:
    trainer = RLTrainer(
        "Transformer", environment=Guess, env_config={"max_steps": 3, "highest": 5}, max_completion_tokens=1,
        max_length=64, group_size=8, name="guess",
    )  # fmt: skip
    run = trainer.fit([{"prompt": f"{low}12345+-=?"} for low in "abcdefgh" * 8], epochs=1, batch_size=64)
    print(f"{run.run_id}: {run.status}; rewards {[round(each.get('reward', 0.0), 2) for each in run.metrics()]}")


if __name__ == "__main__":
    main()
