"""Rewards and rows by a name of reasoning-gym (pip install 'microtuning[rewards]'); a preset learns next to nothing here.

python examples/leg_counting.py
"""

from __future__ import annotations

from microtuning_sdk import RLTrainer


def main() -> None:
    trainer = RLTrainer("Transformer", reward_func="reasoning_gym:leg_counting", max_completion_tokens=8, group_size=8)
    run = trainer.fit(64, batch_size=64, max_steps=4)
    print(f"{run.run_id}: {run.status}; rewards {[round(each.get('reward', 0.0), 2) for each in run.metrics()]}")


if __name__ == "__main__":
    main()
