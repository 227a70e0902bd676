"""The handle of one run: everything a user may ask of it or tell it, from any machine, by its id alone."""

from __future__ import annotations

import sys
import tarfile
import tempfile
import time
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.cost import latest, total
from microtuning_core.domain.errors import MicrotuningError, RunFailed, RunStopped
from microtuning_core.domain.layout import S3Uri, output_prefix, parse_s3_uri
from microtuning_core.domain.names import parse_run_id
from microtuning_core.domain.run import CheckpointRef, RunStatus
from microtuning_core.domain.run import Run as RunRecord
from microtuning_core.domain.spending import entry_days
from microtuning_sdk import _views
from microtuning_sdk._commands import answer_to, budget_of, give
from microtuning_sdk._connection import Stage, connect
from microtuning_sdk._display import detached
from microtuning_sdk._follow import CLOUD_POLL_S, LOCAL_POLL_S, follow, wait_silently
from microtuning_sdk._interrupts import one_interrupt
from microtuning_sdk._logs import LogTail, metrics_in
from microtuning_sdk._rollouts import Order, Rollout, in_order, read_rollouts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from microtuning_core.aws.runs import Checkpoint
    from microtuning_core.domain.command import Verb
    from microtuning_core.domain.cost import LedgerEntry


@dataclass(frozen=True)
class Cost:
    """What a run cost so far. `state` is "final" once no amount may change any more."""

    total_usd: Decimal
    state: str
    lines: tuple[LedgerEntry, ...]


@dataclass(frozen=True)
class Model:
    """The trained model: `uri` is its model.tar.gz."""

    uri: str
    stage: Stage

    def download(self, folder: str | Path) -> Path:
        """Unpacks the model into `folder`, which `AutoModelForCausalLM.from_pretrained` reads; returns the folder.

        Raises:
            MicrotuningError: the archive is broken, or would write or link outside the folder.
        """
        target = Path(folder).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        source = parse_s3_uri(self.uri)
        with tempfile.TemporaryFile() as packed:
            self.stage.s3.download_fileobj(source.bucket, source.key, packed)
            packed.seek(0)
            try:
                with tarfile.open(fileobj=packed) as archive:
                    archive.extractall(target, filter="data")
            except (tarfile.TarError, EOFError, zlib.error) as error:
                raise MicrotuningError(
                    f"The model at {self.uri} cannot be unpacked: {error}",
                    next_step="Look at what the run left there; nothing of it was run.",
                ) from error
        return target


class Run:
    """One fine-tuning run.

        run = Run("default-sort-digits-0z3k8q5m1c7t")
        run.wait().status                                    # "completed", "failed" or "stopped"

    Args:
        run_id: as fit() gave it.
        stage: a stage, its name, or None for the default one.
    """

    def __init__(self, run_id: str, stage: Stage | str | None = None) -> None:
        self.run_id = parse_run_id(run_id).run_id
        self.stage = stage if isinstance(stage, Stage) else connect(stage)

    def __repr__(self) -> str:
        return f"Run({self.run_id!r})"

    @property
    def record(self) -> RunRecord:
        """The run as it stands now: status, attempts, metrics, spec. Read anew each time; RunNotFound if there is none."""
        return self.stage.runs.get(self.run_id)

    @property
    def status(self) -> str:
        return self.record.status.value

    @property
    def execution_arn(self) -> str:
        """The Step Functions execution that carries the run now."""
        return self.stage.names.execution_arn(self.record.execution)

    def wait(self, timeout_s: float | None = None, *, logs: bool = False) -> RunRecord:
        """Waits until the run is completed, failed or stopped, and returns its record; none of the three raises.

        Ctrl-C ends the waiting and not the run: the message says how to come back, and the record is the one of now.

        Args:
            timeout_s: seconds to wait at most; TimeoutError after them.
            logs: show log lines and progress, on from the last line that this machine's user saw.
        """
        with one_interrupt():
            try:
                return (follow if logs else wait_silently)(self.stage, self.run_id, timeout_s)
            except KeyboardInterrupt:
                print(detached(self.run_id), file=sys.stderr)
                return self.record

    def raise_if_unsuccessful(self) -> None:
        """RunFailed or RunStopped, with the reason, when the run ended like that; nothing otherwise."""
        run = self.record
        if run.status is RunStatus.FAILED:
            raise RunFailed(self.run_id, _reason(run))
        if run.status is RunStatus.STOPPED:
            raise RunStopped(self.run_id, _reason(run))

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """The log lines of all attempts in order; with `follow` on until the run is over."""
        tail = LogTail(self.stage.cloudwatch_logs)
        while True:
            run = self.record
            for line in tail.read(attempt.job_name for attempt in run.attempts):
                yield line.text
            if run.is_final or not follow:
                return
            time.sleep(LOCAL_POLL_S if self.stage.is_local else CLOUD_POLL_S)

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, in order, as the job printed them; a step that was done again counts once."""
        tail = LogTail(self.stage.cloudwatch_logs)
        lines = tail.read(attempt.job_name for attempt in self.record.attempts)
        return metrics_in(event for line in lines if (event := line.event))

    def rollouts(self, step: int | None = None, *, order: Order = "written") -> list[Rollout]:
        """What the model said in a step and how every part of the reward scored it; of a run that trains, too.

        Args:
            step: the newest by default. A step that is not in the log gives nothing.
            order: "best" or "worst" by reward first, or as the completions were drawn.

        Returns:
            One dict a completion: step, index, row ("file:line" of its prompt), prompt, completion, reward, components,
            notes, advantage, truncated, tokens. reward is None where it was not scored.
        """
        run = self.record
        return in_order(read_rollouts(self.stage.objects, self.run_id, run.lineage, step), order)

    def checkpoints(self) -> list[Checkpoint]:
        """The registered checkpoints, oldest first; RunNotFound when there is no such run."""
        return self.stage.runs.checkpoints(self.record.run_id)

    def cost(self) -> Cost:
        """What the ledger says; amounts of an attempt that still runs are estimates."""
        run = self.record  # before the entries: once it says that they are final, those read after it are
        entries = self._ledger_entries(run)
        view = _views.run_cost_view(run, entries)
        return Cost(total(entries), view["state"], tuple(latest(entries)))

    def _ledger_entries(self, run: RunRecord) -> list[LedgerEntry]:
        return self.stage.ledger.entries(run.tenant, self.run_id, *entry_days(run, datetime.now(UTC)))

    def cancel(self) -> bool:
        """Asks the stage to stop the run: it saves a checkpoint, ends as "stopped", and keeps what it has.

        Returns:
            Whether it was asked; False, and nothing is done, when the run is over already.
        """
        if self.record.is_final:
            return False
        give(self.stage, self.run_id, "cancel")
        return True

    def rollback(self, step: int | None = None, *, lineage: int | None = None) -> CheckpointRef:
        """Continues the run from an older checkpoint, as a new lineage; one that is over is taken up again.

        Args:
            step: of the checkpoint; the newest by default, which resumes a stopped run.
            lineage: the newest that has the step by default.

        Returns:
            Where the new lineage begins. Older checkpoints, attempts and costs stay.

        Raises:
            CommandRefused: there is no such checkpoint; the message lists those there are.
        """
        answer = self._told("rollback", step=step, lineage=lineage)
        return CheckpointRef(lineage=answer["lineage"], step=answer["step"])

    def fork(
        self,
        step: int | None = None,
        *,
        lineage: int | None = None,
        name: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Run:
        """Starts a new run from a checkpoint of this one, which goes on as it is.

        Args:
            step, lineage: of the checkpoint, as for rollback.
            name: of the new run; this one's by default.
            changes: laid over this run's spec, such as {"algorithm": {"learning_rate": 1e-5}}; None takes a field away.

        Raises:
            CommandRefused: there is no such checkpoint, or the changed spec is not valid; with every problem by field.
        """
        answer = self._told("fork", step=step, lineage=lineage, name=name, changes=dict(changes or {}))
        return Run(answer["run_id"], self.stage)

    def pin(self, step: int | None = None, *, lineage: int | None = None) -> str:
        """Keeps a copy of a checkpoint where nothing is pruned; its s3:// address."""
        return str(self._told("pin", step=step, lineage=lineage)["uri"])

    def raise_budget(self, usd: Decimal | float | str) -> Decimal:
        """Gives the run another budget in all, at once; one that its budget stopped goes on from its last checkpoint.

        Raises:
            CommandRefused: a stopped run has spent as much already; the message says how much.
            InvalidSpec: usd is no amount above 0.
        """
        return Decimal(self._told("budget", usd=budget_of(usd))["budget_usd"])

    def _told(self, verb: Verb, **details: Any) -> dict[str, Any]:
        self.stage.runs.get(self.run_id)  # RunNotFound rather than a command nobody answers
        return answer_to(self.stage, self.run_id, give(self.stage, self.run_id, verb, **details))

    @property
    def model(self) -> Model:
        """The trained model of a completed run."""
        run = self.record
        if run.status is not RunStatus.COMPLETED or run.current is None:
            raise MicrotuningError(
                f"Run {self.run_id} is {run.status} and has no finished model.",
                next_step="Its checkpoints are listed by `microtuning checkpoints`.",
            )
        key = f"{output_prefix(self.run_id)}{run.current.job_name}/output/model.tar.gz"
        return Model(str(S3Uri(self.stage.bucket, key)), self.stage)

    def training_job(self, attempt: int | None = None) -> Any:
        """The SageMaker training job of an attempt (the newest by default), as sagemaker-core's resource `TrainingJob`.

        Needs the extra "aws" (pip install "microtuning[aws]").
        """
        try:
            from sagemaker.core.resources import TrainingJob
        except ImportError as error:
            raise MicrotuningError(
                "Run.training_job() needs sagemaker-core.", next_step='Install it: pip install "microtuning[aws]".'
            ) from error
        jobs = {each.attempt: each.job_name for each in self.record.attempts}
        if not jobs or (attempt is not None and attempt not in jobs):
            raise MicrotuningError(f"Run {self.run_id} has no such attempt yet.", next_step=f"It has {sorted(jobs)}.")
        name = jobs[attempt if attempt is not None else max(jobs)]
        return TrainingJob.get(name, session=self.stage.session, region=self.stage.names.region)

    def view(self) -> dict[str, Any]:
        """The run as JSON, in the shape of `microtuning runs show --json`."""
        run = self.record
        arn = self.stage.names.execution_arn(run.execution)
        waits = run.status == RunStatus.QUEUED
        place = _views.place_of(run, self.stage.places(run.tenant)) if waits else None
        return _views.run_view(
            run, self.checkpoints(), self._ledger_entries(run), arn, place, self.stage.runs.events(run.run_id)
        )


def _reason(run: RunRecord) -> str:
    """The reason, and where in the user's code it lies."""
    failure = run.failure
    where = f" ({failure.file}, line {failure.line})" if failure and failure.file and failure.line else ""
    return f"{run.reason or (failure.message if failure else 'no reason was recorded')}{where}"
