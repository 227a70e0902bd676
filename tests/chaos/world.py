"""The world that faults strike: the local cloud, runs on it begun as users begin them, what is seen and done there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from microtuning_core.domain.errors import LocalCloudError, MicrotuningError
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.layout import step_prefix
from microtuning_core.domain.names import StackNames
from microtuning_core.usecases.services import Services, StageSettings
from microtuning_local import cloud as local
from microtuning_local.cloud import LocalCloud
from microtuning_local.home import local_home, read_endpoint
from microtuning_sdk import RLTrainer, Run, SFTTrainer, Stage, connect
from microtuning_sdk._logs import LogTail
from tests.chaos.mischief import mischievous
from tests.processes import leader_of, processes_of

PATIENCE_S = 240.0
TICK_EVERY_S = 2.0
STEPS, BATCH, EVERY_STEPS = 20, 8, 2
RECIPES = ("sft", "grpo")
NAMES = StackNames("local", "000000000000", "us-east-1")


@dataclass
class World:
    """The local cloud of a test session, and a folder for wishes."""

    cloud: LocalCloud
    folder: Path
    began: list[Struck] = field(default_factory=list)
    _services: Services | None = None

    @property
    def services(self) -> Services:
        """The stage's own stores, with the rights of root; made anew after a restart."""
        if self._services is None:
            self._services = Services(self.cloud, StageSettings(NAMES, "local/none:1", 4))  # type: ignore[arg-type]
        return self._services

    def restarted(self, cloud: LocalCloud) -> None:
        self.cloud, self._services = cloud, None

    def client(self, service: str) -> Any:
        return self.cloud.client(service)

    def begin(self, recipe: str, *, spot: bool = False, rows: int = STEPS * BATCH) -> Struck:
        """A run of 20 steps of 0.25 s or more, a checkpoint at every second one; always the same seed and rows."""
        wishes = self.folder / f"wishes-{recipe}"
        wishes.mkdir()
        compute = {"spot": spot, "hung_after_s": 3}
        run = submit(recipe, str(wishes), connect("local"), count=rows, compute=compute)
        return self.adopt(run, recipe, wishes)

    def begin_all(self, *, spot: bool = False) -> list[Struck]:
        """One run of each recipe, at the same time."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda recipe: self.begin(recipe, spot=spot), RECIPES))

    def adopt(self, run: Run, recipe: str, wishes: Path) -> Struck:
        struck = Struck(self, run, recipe, wishes)
        self.began.append(struck)
        return struck

    def tick(self) -> None:
        """The reconciler's minute, now. While the cloud is away nobody ticks."""
        with suppress(LocalCloudError):
            local.tick()

    def drive(self, *runs: Struck) -> None:
        """Until every run is over and paid, by ticks and never by waiting for the schedule."""
        self.until(
            lambda: all(each.is_over for each in runs), f"end of {', '.join(each.name for each in runs)}", ticks=True
        )

    def until(self, is_so: Callable[[], Any], what: str, *, ticks: bool = False, timeout_s: float = PATIENCE_S) -> Any:
        """The first true answer; what cannot be asked while the cloud is away is asked again."""
        deadline, next_tick = time.monotonic() + timeout_s, time.monotonic() + TICK_EVERY_S
        while True:
            with suppress(BotoCoreError, ClientError, MicrotuningError):
                if found := is_so():
                    return found
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:.0f} s\n{self.stories()}"
            if ticks and time.monotonic() > next_tick:
                self.tick()
                next_tick = time.monotonic() + TICK_EVERY_S
            time.sleep(0.2)

    def stories(self) -> str:
        """What a person would read to understand the runs."""
        return "\n".join(each.story() for each in self.began if not each.record.is_final)


@dataclass
class Struck:
    """A run, and what was done to it."""

    world: World
    run: Run
    recipe: str
    wishes: Path
    struck_at: int = -1  # the registered checkpoint when it was last struck

    @property
    def name(self) -> str:
        return self.run.run_id

    @property
    def record(self) -> Any:
        return self.run.record

    @property
    def is_over(self) -> bool:
        record = self.record
        return record.is_final and record.costs_are_final

    @property
    def job_name(self) -> str:
        return str(self.record.attempts[-1].job_name)

    @property
    def checkpoints_on_machine(self) -> Path:
        return local_home().jobs / self.job_name / "ml" / "checkpoints"

    def newest_on_machine(self) -> Path | None:
        """The newest whole checkpoint of the machine that trains now."""
        whole = [each.parent for each in self.checkpoints_on_machine.glob("step-*/manifest.json")]
        return max(whole, key=lambda each: int(each.name.removeprefix("step-")), default=None)

    def newest_prefix(self) -> str:
        """Of the newest registered checkpoint in S3."""
        last = self.record.last_checkpoint
        assert last is not None
        return step_prefix(self.name, last.lineage, last.step)

    def wish(self, fault: str) -> None:
        (self.wishes / fault).touch()

    def comes_to(self, step: int) -> bool:
        """Wait for a step, with a newer registered checkpoint than when it was last struck; False where it ends before."""
        self.world.until(
            lambda: self.record.is_final or self.has_come_to(step), f"step {step} of {self.name}", ticks=True
        )
        last = self.record.last_checkpoint
        self.struck_at = last.step if last else -1
        return not self.record.is_final

    def has_come_to(self, step: int) -> bool:
        record = self.record
        if not record.attempts or self.step_on_machine(record.attempts[-1].job_name) < step:
            return False
        return record.last_checkpoint is not None and record.last_checkpoint.step > self.struck_at

    def step_on_machine(self, job_name: str) -> int:
        """The last step that the machine wrote down; it costs nobody anything to ask."""
        path = local_home().jobs / job_name / "ml" / "output" / "data" / "metrics.jsonl"
        try:
            lines = [json.loads(line) for line in path.read_text("utf-8").splitlines(keepends=True) if line[-1] == "\n"]
        except FileNotFoundError:
            return 0
        return max((each["step"] for each in lines if each["event"] == "metrics"), default=0)

    def events(self, job_names: list[str] | None = None) -> list[dict[str, Any]]:
        """What the jobs said, as it was said: a step that was done twice is there twice."""
        names = job_names or [each.job_name for each in self.record.attempts]
        return [event for line in LogTail(self.run.stage.cloudwatch_logs).read(names) if (event := line.event)]

    def losses(self) -> dict[int, float]:
        """By step, as it was done last."""
        return {each["step"]: each["loss"] for each in self.run.metrics()}

    def weights_sha256(self, folder: Path) -> str:
        path = self.run.model.download(folder / f"model-{self.name}") / "model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def processes(self) -> dict[int, int]:
        return processes_of(self.job_name)

    def supervisor(self) -> int:
        return leader_of(self.job_name)

    def worker(self) -> int:
        """The training process: a child of the supervisor's."""
        first = self.supervisor()
        return next(pid for pid, parent in self.processes().items() if parent == first)

    def kill_machine(self) -> None:
        """Every process of the job at once, as a power cut does it; a job that ends by itself meanwhile has ended."""
        with suppress(ProcessLookupError, StopIteration):
            os.killpg(self.supervisor(), signal.SIGKILL)

    def jobs(self) -> list[JobFacts]:
        return [facts for each in self.record.attempts if (facts := self.world.services.jobs.describe(each.job_name))]

    def timeline(self) -> str:
        """What its containers said, by when and what."""
        told = [f"{each['time']} a{each['attempt']} {each['event']} {each.get('step', '')}" for each in self.events()]
        return "\n".join(told)

    def story(self) -> str:
        record = self.record
        said = [f"{each['kind']}: {each['message']}" for each in self.world.services.runs.events(self.name)]
        attempts = [(each.attempt, each.outcome, each.failure and each.failure.message) for each in record.attempts]
        return f"{self.name} {record.status} verdict={record.verdict} reason={record.reason} {attempts} {said}"


def submit(recipe: str, wishes: str, stage: Stage, *, count: int = STEPS * BATCH, **settings: Any) -> Run:
    """Begin a run as a user does; with `wait=False` it is on its own from there."""
    chance = random.Random(0)
    texts = ["".join(chance.choices("0123456789", k=3)) for _ in range(count)]
    rows = [{"prompt": f"{text}>", "answer": text[::-1], "completion": text[::-1]} for text in texts]
    checkpoint = {"every_steps": EVERY_STEPS, "every_epoch": False, "keep": 5}
    common = {
        "model_arch": "Transformer",
        "stage": stage,
        "seed": 7,
        "checkpoint": checkpoint,
        "name": f"chaos {recipe}",
    }
    trainer: Any
    if recipe == "grpo":
        grouped = {"reward_func": share_in_place, "group_size": 4, "max_completion_tokens": 4}
        trainer = RLTrainer(loss=mischievous(wishes), **(common | grouped | settings))
        rows = rows[: count // 4]
    else:
        trainer = SFTTrainer(loss=mischievous(wishes), **(common | settings))
    run: Run = trainer.fit(rows, rows[:4], epochs=1, batch_size=BATCH, wait=False)
    return run


def share_in_place(completions: list[str], answer: list[str]) -> list[float]:
    return [sum(x == y for x, y in zip(c, a, strict=False)) / len(a) for c, a in zip(completions, answer, strict=True)]


def endpoint_pids() -> tuple[int, int]:
    """The emulator's process and the local SageMaker's."""
    endpoint = read_endpoint(local_home())
    assert endpoint is not None and endpoint.emulator_pid and endpoint.sagemaker_pid
    return endpoint.emulator_pid, endpoint.sagemaker_pid


def record_of(job_name: str) -> dict[str, Any]:
    """What the local SageMaker keeps of a job, segments of machine time among it."""
    found: dict[str, Any] = json.loads((local_home().jobs / job_name / "record.json").read_text("utf-8"))
    return found
