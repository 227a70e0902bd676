"""Reinforcement learning from a reward in plain Python, on the local cloud: a small Transformer learns to sort digits.

    python examples/sort_digits.py --seed 0

The model first copies demonstrations of which only 30 % are right, so it has seen what sorting is, among other things.
The reward then makes it do that every time: reinforcement elicits what the model can already do now and then; it does
not invent it.
"""

from __future__ import annotations

import argparse
import sys

from digits import demonstrations, problems, put

from microtuning_sdk import MicrotuningError, RLTrainer, Run, connect


def in_order(completions: list[str], answer: list[str]) -> list[float]:
    """The reward: 1 for the digits in order, 0 for anything else."""
    return [float(given == right) for given, right in zip(completions, answer, strict=True)]


def train(seed: int) -> Run:
    stage = connect()  # the local cloud; connect("dev") would be a stage in your AWS account
    trainer = RLTrainer(
        model_arch="Transformer",
        reward_func=in_order,
        env_config={"max_steps": 1},
        name="sort digits",
        group_size=16,
        max_completion_tokens=8,
        warm_start={"data": put(stage, f"warm-{seed}.jsonl", demonstrations(16_000, f"warm {seed}")), "steps": 250},
        checkpoint={"every_steps": 25},
        seed=seed,
    )
    return trainer.fit(
        train_data=put(stage, f"train-{seed}.jsonl", problems(1_600, f"train {seed}")),
        eval_data=put(stage, f"eval-{seed}.jsonl", problems(256, f"eval {seed}")),
        epochs=1,
        batch_size=256,
    )


def report(run: Run) -> None:
    """What came of it, and where to look further."""
    shown = run.view()
    metrics, cost = run.record.metrics, run.cost()
    print(f"\nrun         {run.run_id}: {shown['status']}")
    print(
        f"accuracy    {accuracy(metrics.eval_before)} before, {accuracy(metrics.eval_after)} after (greedy, held out)"
    )
    print(
        "            Before = after a warm start on demonstrations of which 30 % are right. Reinforcement elicits what"
    )
    print("            the model can already do now and then; it does not invent it.")
    print("attempts    " + ", ".join(f"{each['instance_type']} {each['outcome']}" for each in shown["attempts"]))
    print("checkpoints " + ", ".join(f"step {each['step']}" for each in shown["checkpoints"]))
    print(f"cost        {cost.total_usd:.4f} USD at list price ({cost.state}; on your own machine it is free)")
    print(f"execution   {shown['execution_arn']}")
    print('look at it  source .venv/bin/activate; eval "$(microtuning local env)"')
    print(f"            aws stepfunctions get-execution-history --execution-arn {shown['execution_arn']}")
    print(f"            microtuning runs show {run.run_id}")


def accuracy(metrics: dict[str, float | None]) -> str:
    value = metrics.get("eval_accuracy")
    return "unknown" if value is None else f"{value:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the data, the weights and the draws")
    try:
        run = train(parser.parse_args().seed)
    except MicrotuningError as error:
        print(error, file=sys.stderr)
        return 1
    if run.record.is_final:  # else Ctrl-C: the run goes on, and fit() has said so
        report(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
