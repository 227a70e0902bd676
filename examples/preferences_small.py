"""Preferences in twenty lines: a small Transformer comes to prefer sorted digits to digits as they were given.

python examples/preferences_small.py
"""

from __future__ import annotations

from digits import problems

from microtuning_sdk import DPOTrainer


def pairs(count: int, seed: str) -> list[dict[str, str]]:
    rows = [row for row in problems(count, seed) if row["prompt"][:-1] != row["answer"]]
    return [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["prompt"][:-1]} for row in rows]


def main() -> None:
    trainer = DPOTrainer("Transformer", name="preferences small", beta=0.1)
    run = trainer.fit(pairs(1_000, "train"), pairs(100, "eval"), epochs=1, batch_size=32)
    metrics = run.record.metrics
    print(f"held-out accuracy {metrics.eval_before.get('eval_accuracy')} -> {metrics.eval_after.get('eval_accuracy')}")


if __name__ == "__main__":
    main()
