"""Our side of bench_trl: the product's own recipe on the product's own engine, with a clock around its steps."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from microtuning_core.domain.spec import RunSpec
from training_container.engine import Engine
from training_container.job import Job, Plan
from training_container.metrics import EventLog
from training_container.paths import MlTree
from training_container.progress import ProgressWriter
from training_container.recipes import load_recipe
from training_container.run import LoopState, Run

from . import bench_trl_rewards
from .bench_trl_work import GROUP, MAX_GRAD_NORM, NEW_TOKENS, SEED, WEIGHT_DECAY, Work, as_rows, device, stir

Gradient = dict[str, torch.Tensor]


@dataclass
class Measured:
    """What one side did. seconds, cpu_seconds: of each step; before_s: what the model computed before the first step.

    first: of the first step, where it was asked for: loss, gradient before clipping, trained ids row by row, weights after.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    before_s: float = 0.0
    rewards: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)


class Reached(Exception):
    """The reward that was waited for."""


class ClockedRun(Run):
    """A run whose steps are timed, without what it does to report them and to keep its state."""

    def __init__(self, *arguments: Any, until: Callable[[list[float]], bool], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.measured, self._until = Measured(), until
        self.in_step = False
        self._reporting: list[tuple[float, float]] = []

    def steps(self, *, rows: int, batch: int, updates: int = 1) -> Iterator[list[int]]:
        for indices in super().steps(rows=rows, batch=batch, updates=updates):
            self._reporting, self.in_step, began = [], True, now()
            try:
                yield indices
            finally:
                self.in_step, spent = False, since(began)
                self.measured.seconds.append(spent[0] - sum(each[0] for each in self._reporting))
                self.measured.cpu_seconds.append(spent[1] - sum(each[1] for each in self._reporting))

    def end_step(self, metrics: Mapping[str, Any], *, tokens: int) -> None:
        began = now()
        if "reward" in metrics:
            self.measured.rewards.append(float(metrics["reward"]))
            assert metrics["trainable_groups"] == metrics["groups"] or self.spec.reward.entry.endswith(":exact")
        super().end_step(metrics, tokens=tokens)
        self._reporting.append(since(began))
        if self._until(self.measured.rewards):
            raise Reached


def now() -> tuple[float, float]:
    """Seconds on the wall and of this process's CPU, with all that the device was given done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    wall_s, cpu_s = now()
    return wall_s - began[0], cpu_s - began[1]


def ours(
    work: Work,
    model: Path,
    rows: list[dict[str, str]],
    folder: Path,
    *,
    seed: int = SEED,
    look: bool = False,
    until: Callable[[list[float]], bool] = lambda _: False,
) -> Measured:
    """The recipe from its first step to its last, set up anew.

    Args:
        look: keep what the first step did; not for timing.
        until: ends the run, from the rewards of the steps so far.
    """
    as_the_worker_sets_torch()
    job = a_job(work, model, folder, seed)
    engine = Engine.build(work.model, source=str(model), texts=(), seed=seed, device=device())
    stir(engine.model)
    progress = ProgressWriter(
        job.tree.checkpoints, run_id=job.run_id, attempt=1, lineage=1, every_s=1e9, started_at_s=time.monotonic()
    )
    run = ClockedRun(
        job,
        engine,
        LoopState(),
        rows={"train": as_rows(rows, work.kind)},
        log=EventLog(job.tree.output_data / "metrics.jsonl", 1),
        progress=progress,
        stop_requested=lambda: False,
        until=until,
    )
    watch_tokens(engine, run.measured)
    watch_what_comes_before(engine, run)
    if look:
        keep_first_step(engine, run.measured)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Reached):
        load_recipe(work.kind).train(engine, run)
    run.measured.phases = dict(run.meter.seconds)
    shutil.rmtree(folder)
    torch.use_deterministic_algorithms(False)
    return run.measured


def as_the_worker_sets_torch() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def a_job(work: Work, model: Path, folder: Path, seed: int) -> Job:
    tree = MlTree(folder)
    tree.make_outputs()
    tree.checkpoints.mkdir(exist_ok=True)
    shutil.copy(bench_trl_rewards.__file__, tree.code)
    tree.channel("model").parent.mkdir(parents=True, exist_ok=True)
    tree.channel("model").symlink_to(model)  # dpo's reference is loaded from there
    spec = RunSpec(
        name="bench",
        model=work.model,
        algorithm=settings(work),
        reward={"entry": f"bench_trl_rewards:{work.reward}", "log_share": 0.0} if work.kind == "grpo" else None,
        data={"train": "s3://bench/train.jsonl"},
        checkpoint={"every_steps": 10**6, "every_epoch": False},
        seed=seed,
    )
    plan = Plan(
        run_id="default-bench-0a1b2c3d4e5f", attempt=1, lineage=1, instance_type="ml.m5.large", count=1,
        max_runtime_s=3600, price_usd_per_hour=Decimal("0.115"),
    )  # fmt: skip
    return Job(tree, spec, plan, torch_threads=1, progress_every_s=1e9)


def settings(work: Work) -> dict[str, Any]:
    common = {
        "type": work.kind, "epochs": 1, "learning_rate": work.learning_rate, "max_grad_norm": MAX_GRAD_NORM,
        "weight_decay": WEIGHT_DECAY,
    }  # fmt: skip
    if work.kind == "grpo":
        sizes = {"batch_size": work.batch * GROUP, "group_size": GROUP, "max_completion_tokens": NEW_TOKENS}
        return common | sizes
    return common | {"batch_size": work.batch}


# --- looking -------------------------------------------------------------------------------------------------------------


def watch_tokens(engine: Engine, measured: Measured) -> None:
    """Count the trained tokens of each step, those of rows left out for want of an advantage among them."""
    train = engine.forward_backward

    def counted(examples: Any, *arguments: Any, totals: Any = None, **options: Any) -> Any:
        found = totals.tokens if totals else sum(example.trained_tokens for example in examples)
        measured.tokens.append(found)
        return train(examples, *arguments, totals=totals, **options)

    engine.forward_backward = counted  # type: ignore[method-assign]


def watch_what_comes_before(engine: Engine, run: ClockedRun) -> None:
    """A reference's log-probabilities may be computed once for all rows, before the steps that they belong to."""
    forward = engine.forward

    def timed(*arguments: Any, **options: Any) -> Any:
        began = now()
        result = forward(*arguments, **options)
        run.measured.before_s += 0.0 if run.in_step else since(began)[0]
        return result

    engine.forward = timed  # type: ignore[method-assign]


def keep_first_step(engine: Engine, measured: Measured) -> None:
    train, step = engine.forward_backward, engine.optim_step

    def trained(examples: Any, *arguments: Any, **options: Any) -> Any:
        metrics = train(examples, *arguments, **options)
        if not measured.first:
            rows = [[t for t, flag in zip(row.tokens, row.trained, strict=True) if flag] for row in examples]
            measured.first |= {"loss": metrics["loss"], "rows": sorted(rows)}
        return metrics

    def stepped(*arguments: Any, **options: Any) -> Any:
        if "gradient" in measured.first:
            return step(*arguments, **options)
        measured.first["gradient"] = {name: weight.grad.clone() for name, weight in engine.trainable.items()}
        taken = step(*arguments, **options)
        measured.first["weights"] = {name: weight.detach().clone() for name, weight in engine.trainable.items()}
        return taken

    engine.forward_backward, engine.optim_step = trained, stepped  # type: ignore[method-assign]


def mean_of_last(rewards: list[float], count: int = 5) -> float:
    return sum(rewards[-count:]) / count if len(rewards) >= count else -math.inf
