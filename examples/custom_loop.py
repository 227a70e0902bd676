"""A loop of one's own: supervised learning in ten lines on the engine's primitives.

python examples/custom_loop.py
"""

from __future__ import annotations

from typing import Any

from digits import problems

from microtuning_sdk import LoopTrainer


def train(engine: Any, run: Any) -> None:
    from training_container.api import render_supervised

    examples = render_supervised(run.rows["train"], engine.tokenizer, run.settings.max_length).examples
    for indices in run.steps(rows=len(examples), batch=run.settings.batch_size):
        chosen = [examples[index] for index in indices]
        metrics = engine.forward_backward(chosen, nll)
        engine.optim_step(run.learning_rate(3e-3), max_grad_norm=run.settings.options["clip"])
        run.end_step(metrics, tokens=sum(example.trained_tokens for example in chosen))


def nll(logprobs: Any, inputs: Any) -> Any:
    return -logprobs.sum() / inputs.totals.tokens, {}


def main() -> None:
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in problems(1_000, "loop")]
    trainer = LoopTrainer(train, model_arch="Transformer", options={"clip": 1.0}, name="custom loop")
    run = trainer.fit(rows, epochs=1, batch_size=64)
    print(f"{run.run_id}: {run.status}; losses {[round(each['loss'], 2) for each in run.metrics()]}")


if __name__ == "__main__":
    main()
