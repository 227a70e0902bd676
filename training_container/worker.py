"""A training worker: restore or build, run the recipe, leave the model. Runs in a process forked by the supervisor."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import islice

import torch
import transformers

from microtuning_core.domain.datasets import Row, check_rows

from .checkpoints import Checkpoint, newest_whole, resume_checkpoint
from .data import encode, read_channel, texts_of
from .engine import Engine
from .engine.export import leave_model
from .engine.models import Head
from .engine.parallel import World, join
from .engine.precision import choose_precision
from .engine.vllm_sampler import choose_sampler
from .failures import UserFailure, classify, write_failure
from .heartbeat import Heartbeat
from .job import Job
from .metrics import EventLog
from .progress import ProgressWriter, RestartClock
from .recipes import load_recipe
from .run import LOOP, LoopState, Run, Stopped

EXIT_FAILED, EXIT_STOPPED = 1, 128 + signal.SIGTERM
# What merged weights are compared with their adapter on.
_COMPARED_ROWS, _COMPARED_TOKENS = 4, 128


@dataclass
class StopFlag:
    """Set by SIGTERM; read between steps."""

    asked: bool = False

    def __call__(self) -> bool:
        return self.asked

    def set(self, *_: object) -> None:
        self.asked = True


def work(
    job: Job,
    *,
    started_at_s: float,
    restart: RestartClock | None,
    stop: StopFlag,
    heartbeat: Heartbeat | None = None,
) -> int:
    """Train to the end; the exit status of the process. Every failure is written to the failure file.

    Of several processes (torchrun's variables say so) each comes here, and the first that fails writes the file: what the
    others then meet is only that it is gone.

    Args:
        started_at_s: time.monotonic() when the attempt began (or this worker, after a restart): all until the first step
            counts as load.
        heartbeat: who watches for a sign of life, if anybody does.
        restart: what the supervisor knows of the restart, if this is one.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    log = EventLog(job.tree.output_data / "metrics.jsonl", job.plan.attempt, writes=is_main)
    run = None
    try:
        world = prepare_torch(job)
        run = begin(job, log, world, started_at_s=started_at_s, restart=restart, stop=stop)
        give_signs_of_life(run, heartbeat)
        train(run)
        world.leave()
        return 0
    except Stopped as reason:
        log.emit("notice", message=f"stopped at step {run.state.step if run else 0}: {reason}")
        return EXIT_STOPPED
    except Exception as error:
        if run is not None:
            run.let_it_be_written()
        if not isinstance(error, UserFailure):  # whose own traceback has been printed; ours would bury it
            traceback.print_exc(file=sys.stderr)
        if "RANK" not in os.environ or not job.tree.failure.exists():
            write_failure(job.tree.failure, classify(error, user_code=job.tree.code))
        if run is not None:
            run.write_progress(at_once=True)
        return EXIT_FAILED


def prepare_torch(job: Job) -> World:
    """A fixed number of threads and deterministic kernels: sums depend on both in their last bits. Then the others."""
    torch.set_num_threads(max(1, job.torch_threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow, and for finding bugs
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return join(os.environ, own_device(), compression=job.spec.compute.gradient_compression)


def own_device() -> torch.device:
    """This process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", min(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() - 1))
    torch.cuda.set_device(device)
    return device


def begin(
    job: Job, log: EventLog, world: World, *, started_at_s: float, restart: RestartClock | None, stop: StopFlag
) -> Run:
    """The run as its newest whole checkpoint has it, or from its start."""
    progress = ProgressWriter(
        job.tree.checkpoints,
        run_id=job.run_id,
        attempt=job.plan.attempt,
        lineage=job.plan.lineage,
        every_s=job.progress_every_s,
        started_at_s=started_at_s,
        writes=world.is_main,
    )
    rows = read_data(job)
    checkpoint = world.once(lambda: find_checkpoint(job, log))
    if checkpoint:
        check_same_model(job, checkpoint)
        check_same_batch(job, checkpoint)
    engine = make_engine(job, rows, checkpoint, world, restart)
    say_what_differs(log, job, engine, checkpoint)
    refuse_unrenderable(job, rows, engine)
    state = LoopState.load(checkpoint.folder / LOOP) if checkpoint else LoopState()
    if checkpoint and not checkpoint.folder.is_relative_to(job.tree.checkpoints):
        state.finished, state.eval_after = False, {}  # this lineage begins where another, or another run, had ended
    run = Run(job, engine, state, rows=rows, log=log, progress=progress, stop_requested=stop, restart=restart)
    progress.meter.add_seconds("load", time.monotonic() - started_at_s)
    run.announce_start()
    log.emit("phase", phase="training", step=state.step, weights=sum(p.numel() for p in engine.model.parameters()))
    return run


def read_data(job: Job) -> dict[str, list[Row]]:
    """Rows by channel. A preset has no chat template; whether another model has one is seen once it is loaded."""
    wanted = {"train": job.algorithm.type, "eval": job.algorithm.type, "warm": "sft"}
    needed = {"train"} | ({"warm"} if getattr(job.algorithm, "warm_start", None) else set())
    return {
        name: read_channel(job.tree.channel(name), kind, has_chat_template=job.spec.model.arch is None)
        for name, kind in wanted.items()
        if name in needed or job.tree.channel(name).is_dir()
    }


def find_checkpoint(job: Job, log: EventLog) -> Checkpoint | None:
    """This lineage's newest whole checkpoint; the `resume` channel counts only while there is none."""

    def on_damage(name: str, reason: str) -> None:
        log.emit("notice", message=f"checkpoint {name} is not used: {reason}")

    found = newest_whole(job.tree.checkpoints, on_damage)
    found = found or resume_checkpoint(job.tree.channel("resume"), on_damage)
    if found:
        log.emit("phase", phase="restore", step=found.manifest.step, checkpoint=found.folder.name)
    return found


def check_same_model(job: Job, checkpoint: Checkpoint) -> None:
    """An adapter means nothing on another base, and the weights of a preset fit it alone."""
    made_from, wanted = checkpoint.manifest.base_model, job.base_model
    if made_from != wanted:
        raise UserFailure(
            f"model is {wanted}, but checkpoint {checkpoint.folder.name} was made from {made_from}. Resume with "
            f"{made_from}, or begin a new run."
        )


def check_same_batch(job: Job, checkpoint: Checkpoint) -> None:
    """The step count, the rates and the place in the data mean what they mean at one batch size alone.

    How a batch is spread over micro-batches and processes may change as it likes: the engine adds up to the same.
    """
    made_with, wanted = checkpoint.manifest.global_batch, job.algorithm.batch_size
    if made_with != wanted:
        raise UserFailure(
            f"algorithm.batch_size is {wanted}, but checkpoint {checkpoint.folder.name} was made with {made_with}. "
            f"Resume with {made_with}, or begin a new run with its model as model.base."
        )


def say_what_differs(log: EventLog, job: Job, engine: Engine, checkpoint: Checkpoint | None) -> None:
    """What the user may not expect of this machine, or of this number of processes."""
    notice = choose_precision(job.spec.model, engine.device).notice
    if notice and checkpoint is None:
        log.emit("notice", message=notice)
    made_by = checkpoint.manifest.world_size if checkpoint else engine.world.size
    if made_by != engine.world.size:
        message = (
            f"the checkpoint was made by {made_by} and goes on with {engine.world.size} processes: the same batches, "
            "summed in another order"
        )
        log.emit("notice", message=message)


def give_signs_of_life(run: Run, heartbeat: Heartbeat | None) -> None:
    """From here on: up to now it was loading."""
    if heartbeat is None:
        return
    heartbeat.beat()
    run.engine.beat = heartbeat.beat
    run.meter.resting = heartbeat.resting


def make_engine(
    job: Job,
    rows: dict[str, list[Row]],
    checkpoint: Checkpoint | None,
    world: World,
    restart: RestartClock | None = None,
) -> Engine:
    channel = job.tree.channel("model")
    source = str(channel) if channel.is_dir() else job.base_model
    head: Head = "score" if job.algorithm.type == "reward" else "policy"
    device, spec = own_device(), job.spec.model
    if checkpoint:
        engine = Engine.restore(spec, checkpoint.folder, source=source, device=device, head=head, world=world)
    else:
        texts = (text for channel_rows in rows.values() for text in texts_of(channel_rows))
        engine = Engine.build(
            spec, source=source, texts=texts, seed=job.spec.seed, device=device, head=head, world=world
        )
    engine.micro_batch_rows = job.plan.micro_batch_size
    engine.halvings = restart.halvings if restart else 0
    engine.use_sampler(choose_sampler(getattr(job.algorithm, "sampler", "engine"), spec, source, device))
    return engine


def refuse_unrenderable(job: Job, rows: dict[str, list[Row]], engine: Engine) -> None:
    has_chat_template = bool(engine.tokenizer.chat_template)
    for name, channel_rows in rows.items():
        kind = "sft" if name == "warm" else job.algorithm.type
        check_rows(channel_rows, kind, name, has_chat_template=has_chat_template)


def train(run: Run) -> None:
    """The recipe, the final checkpoint and the model; a run that had finished before only leaves its model again."""
    if not run.state.finished:
        load_recipe(run.settings.type).train(run.engine, run)
        run.finish()
    leave(run)
    run.log.emit("phase", phase="finished", step=run.state.step)


def leave(run: Run) -> None:
    """The model, and the adapter merged into it where the spec asks for that."""
    model, tokenizer = run.spec.model, run.engine.tokenizer
    rows = [encode(tokenizer, text)[:_COMPARED_TOKENS] for text in islice(texts_of(run.rows["train"]), _COMPARED_ROWS)]
    said = leave_model(
        run.engine,
        run.job.tree.model,
        base=run.job.base_model,
        revision=model.revision,
        merge=model.merge,
        rows=[row for row in rows if row] or [[0]],
    )
    if said:
        run.log.emit("notice", message=said)
