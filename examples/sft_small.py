"""Supervised fine-tuning in ten lines: rows from Python, a small Transformer, the model on your disk.

python examples/sft_small.py
"""

from __future__ import annotations

from digits import problems

from microtuning_sdk import SFTTrainer


def rows(count: int, seed: str) -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in problems(count, seed)]


def main() -> None:
    trainer = SFTTrainer("Transformer", name="sft small", learning_rate=3e-3)
    run = trainer.fit(rows(4_000, "train"), rows(200, "eval"), epochs=2, batch_size=64)
    metrics = run.record.metrics
    print(f"held-out loss {metrics.eval_before.get('eval_loss')} before, {metrics.eval_after.get('eval_loss')} after")
    print(f"the model is in {run.model.download('build/sft-small')}")


if __name__ == "__main__":
    main()
