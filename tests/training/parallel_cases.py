"""What is done once by one process and once by two, and must come out alike. Run as a script it is one of the two:

python parallel_cases.py FOLDER, with torchrun's variables; the main process leaves FOLDER/results.json.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microtuning_core.domain.spec import ModelSpec
from training_container.engine import Engine, Example, Sampling
from training_container.engine.batch import MicroBatch, Totals
from training_container.engine.parallel import World, join

CPU = torch.device("cpu")
# Rows of 3 to 17 tokens, so that processes get unlike numbers of them; the pairs are neighbours.
LENGTHS = (3, 17, 5, 4, 9, 3, 12, 6)
ROWS = [
    Example(
        tokens=[3 + (7 * row + 3 * place) % 11 for place in range(length)],
        trained=[place > 0 and (place + row) % 3 != 0 for place in range(length)],
        advantages=(-1.0) ** row,
        group=row // 2,
    )
    for row, length in enumerate(LENGTHS)
]
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [5, 5], [12, 3]]


def cross_entropy(logprobs_N: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_N.sum() / batch.totals.tokens, {"rows": torch.tensor(batch.rows / batch.totals.rows)}


def preference(logprobs_N: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Of each pair the first is better: a loss of two rows that must have stayed together."""
    sums_B = batch.per_row(logprobs_N) if len(logprobs_N) != batch.rows else logprobs_N
    margins = torch.stack([sums_B[batch.group_B == group].diff()[0] for group in batch.group_B.unique()])
    return torch.nn.functional.softplus(margins).sum() * 2 / batch.totals.rows, {}


def policy(logprobs_N: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    ratio_N = (logprobs_N - batch.sampled_logprobs_N).exp()
    return -(ratio_N * batch.advantages_N).sum() / batch.totals.tokens, {"ratio": ratio_N.sum() / batch.totals.tokens}


def an_engine(kind: str, world: World, base: Path, head: str = "policy", *, recomputes: bool = False) -> Engine:
    """kind: full, lora, or sharded (full weights that are spread where there are several processes)."""
    spec = a_spec(kind, world).model_copy(update={"gradient_checkpointing": recomputes})
    return Engine.build(
        spec, source=str(base), texts=["0123456789>"], seed=3, device=CPU, world=world, head=head  # type: ignore[arg-type]
    )  # fmt: skip


def a_spec(kind: str, world: World) -> ModelSpec:
    world.shards = kind == "sharded"
    world._sharded_bytes = 0  # type: ignore[attr-defined]  # of the engine before, in the same world
    return ModelSpec(base="tests/tiny", rank=4, alpha=8) if kind == "lora" else ModelSpec(arch="Transformer")


def trained(engine: Engine, loss_fn: Any, rows: list[Example], *, steps: int = 3, **options: Any) -> dict[str, Any]:
    """Losses, metrics, norms and what was sent, of some steps on the same rows."""
    found = []
    for _ in range(steps):
        metrics = engine.forward_backward(rows, loss_fn, **options)
        taken = engine.optim_step(1e-3, 1.0)
        found.append(metrics | {"grad_norm": taken.grad_norm})
    return {"steps": found, "bytes": engine.bytes_sent}


def cases(world: World, base: Path, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("full", "lora", "sharded"):
        engine = an_engine(kind, world, base)
        engine.micro_batch_rows = 2
        found[f"sft {kind}"] = trained(engine, cross_entropy, ROWS)
        found[f"pairs {kind}"] = trained(engine, preference, ROWS, whole_groups=True)
        found[f"one row {kind}"] = trained(engine, cross_entropy, ROWS[:1], steps=1)
        found[f"logprobs {kind}"] = engine.forward(ROWS)
        found[f"grpo {kind}"] = sampled_and_trained(engine)
        engine.save_state(made(out / f"state {kind}", world))
        found[f"after {kind}"] = trained(engine, cross_entropy, ROWS)
    found["scores"] = trained(an_engine("full", world, base, "score"), preference, ROWS, whole_groups=True)
    found["scores sharded"] = trained(an_engine("sharded", world, base, "score"), preference, ROWS, whole_groups=True)
    found["recomputed"] = trained(an_engine("sharded", world, base, recomputes=True), cross_entropy, ROWS)
    found["accumulated"] = accumulated(an_engine("lora", world, base))
    return found


def sampled_and_trained(engine: Engine) -> dict[str, Any]:
    groups = engine.sample(PROMPTS, Sampling(8), group_size=3)
    rows = [
        Example(
            tokens=[*prompt, *completion.tokens],
            trained=[False] * len(prompt) + [True] * len(completion.tokens),
            advantages=len(completion.tokens) - 4.0,
            sampled_logprobs=completion.logprobs,
            group=index,
        )
        for index, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True))
        for completion in group
    ]
    tokens = [completion.tokens for group in groups for completion in group]
    return {"tokens": tokens, **trained(engine, policy, rows, steps=1)}


def accumulated(engine: Engine) -> dict[str, Any]:
    """Two calls of forward_backward before one step: the first one's gradient must not be added up twice."""
    totals = Totals.of(ROWS)
    losses = [engine.forward_backward(part, cross_entropy, totals=totals)["loss"] for part in (ROWS[:3], ROWS[3:])]
    return {"steps": [{"loss": sum(losses), "grad_norm": engine.optim_step(1e-3, 1.0).grad_norm}]}


def made(folder: Path, world: World) -> Path:
    if world.is_main:
        folder.mkdir(parents=True)
    return folder


# --- of two processes alone ----------------------------------------------------------------------------------------------


def of_two(world: Any, base: Path, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "shares": world.gather(world.share([9, 1, 1, 8, 1])),
        "once": world.gather(world.once(lambda: f"rank {world.rank}")),
        "sum": world.sum({"both": torch.tensor(1.5), f"rank {world.rank}": torch.tensor(2.0)}),
        "most": world.most(3 + world.rank),
        "ddp": difference_to_ddp(an_engine("lora", world, base)),
        "dropout": world.gather(torch.rand(1).item()),
        "absent": absent_gradients(world),
    }
    for kind in ("full", "lora", "sharded"):
        state = out / "one" / f"state {kind}"
        engine = Engine.restore(a_spec(kind, world), state, source=str(base), device=CPU, world=world)
        engine.micro_batch_rows = 2
        found[f"restored {kind}"] = trained(engine, cross_entropy, ROWS)
        found[f"chance {kind}"] = world.gather(torch.rand(1).item())
    for compression in ("float16", "bfloat16"):
        world._wire = getattr(torch, compression)
        engine = an_engine("full", world, base)
        found[f"sft in {compression}"] = trained(engine, cross_entropy, ROWS)
    world._wire = None
    return found


def difference_to_ddp(engine: Engine) -> float:
    """Largest difference of a gradient to torch's own DistributedDataParallel on the same rows."""
    weights = list(engine.trainable.values())
    engine.forward_backward(ROWS, cross_entropy)
    engine.world.add_gradients(weights)
    ours = [weight.grad.clone() for weight in weights]  # type: ignore[union-attr]
    engine.model.zero_grad()
    wrapped = torch.nn.parallel.DistributedDataParallel(engine.model)
    mine = ROWS[engine.world.rank :: 2]  # another share than ours: the sum is the same
    for row in mine:
        logits_T_V = wrapped(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0, :-1]
        logprobs_T = logits_T_V.log_softmax(-1).gather(-1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
        loss = -(logprobs_T * torch.tensor(row.trained[1:])).sum() / Totals.of(ROWS).tokens
        with wrapped.no_sync():
            (2 * loss).backward()  # DDP averages
    wrapped(input_ids=torch.tensor([[3, 4]]), use_cache=False).logits.sum().mul(0.0).backward()
    return max((weight.grad - own).abs().max().item() for weight, own in zip(weights, ours, strict=True))  # type: ignore[operator]


def absent_gradients(world: Any) -> list[Any]:
    """Of three weights one has a gradient here, one there, and one nowhere."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    weights[world.rank].grad = torch.full((2,), 1.0 + world.rank)
    world.add_gradients(weights)
    return [None if weight.grad is None else weight.grad.tolist() for weight in weights]


def main() -> None:
    faulthandler.dump_traceback_later(90, exit=True)  # who waits for the other for ever says where
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    world = join(os.environ, CPU)
    results = cases(world, folder / "base", folder / "two") | of_two(world, folder / "base", folder)
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    world.leave()


if __name__ == "__main__":
    main()
