"""One training job from Starting to its end: machines, downloads, processes, uploads, and the statuses between.

    wait for machines -> Downloading: /opt/ml, channels, checkpoints -> Training: one process a host -> what ended it?
        exited          -> Uploading -> Completed, or Failed with the failure file's text
        stop, deadlines -> Stopping: SIGTERM to the process, 120 s, SIGKILL to its group -> Stopped
        reclaimed       -> SIGKILL at once, Interrupted, and from the top with an empty disk
The job's thread runs `JobRun.run`; everything else only asks through its `control`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from microtuning_local.home import write_whole
from microtuning_local.processes import kill_group, started_at
from microtuning_local.sagemaker import jobs as records
from microtuning_local.sagemaker import rules, sync
from microtuning_local.sagemaker.locations import Location, parse_location
from microtuning_local.sagemaker.logs import LogShipper, stream_name
from microtuning_local.sagemaker.pool import Control, Ending
from microtuning_local.sagemaker.roles import RoleSession, role_session
from microtuning_local.sagemaker.tree import MlTree, write_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from microtuning_local.home import Endpoint, Home
    from microtuning_local.sagemaker.events import EventSender
    from microtuning_local.sagemaker.jobs import Job, Jobs
    from microtuning_local.sagemaker.pool import Pool

LOOK_S = 0.05
SIGNAL_EXIT_BASE = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Account:
    """What all jobs share: records, machines, the event sender, and how this local cloud is set up."""

    home: Home
    endpoint: Endpoint
    jobs: Jobs
    pool: Pool
    events: EventSender
    sts: Any
    logs: Any
    images: Mapping[str, list[str]]
    job_environment: Mapping[str, str]
    stop_grace_s: float = 120.0
    tokens: dict[str, RoleSession] = field(default_factory=dict)


class Failure(Exception):
    """The job fails for a reason that SageMaker puts into FailureReason."""


@dataclass
class Host:
    """One machine of a job: its /opt/ml tree and, while it trains, its process, log and checkpoint mirror."""

    name: str
    tree: MlTree
    process: subprocess.Popen[bytes] | None = None
    shipper: LogShipper | None = None
    mirror: sync.CheckpointMirror | None = None

    @property
    def exit_code(self) -> int | None:
        """As a container runtime reports it: 128 + n after signal n."""
        code = self.process.poll() if self.process else None
        return code if code is None or code >= 0 else SIGNAL_EXIT_BASE - code


class JobRun:
    """The life of one job."""

    def __init__(self, account: Account, job: Job, on_end: Callable[[], object] = lambda: None) -> None:
        self.account, self.job, self._on_end = account, job, on_end
        self.control = Control()
        self.session = role_session(account.endpoint, account.sts, job.request["RoleArn"], job.name)
        self.token = secrets.token_urlsafe(24)
        self.thread = threading.Thread(target=self.run, name=f"job {job.name}", daemon=True)

    # -- the way through ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.account.tokens[self.token] = self.session
            while self._once() == "reclaimed":
                self.control.forget_reclaim()
                self._become("InProgress", "Starting")
        except Failure as failure:
            self._fail(str(failure))
        except Exception:  # our own fault: say so as the service does, and keep the trace in our log
            log.exception("job %s", self.job.name)
            self._fail(records.INTERNAL_ERROR)
        finally:
            self.account.tokens.pop(self.token, None)
            self._clean_up()
            self._on_end()

    def _once(self) -> Ending | None:
        """One try on one set of machines. Returns why it ended; the job is terminal unless it was reclaimed."""
        taken = self._take_machines()
        if taken is None:
            return None
        try:
            return self._on_machines()
        except Failure as failure:  # told first, since how it failed decides whether its machines are kept
            self._fail(str(failure))
            return None
        finally:
            self.account.pool.leave(self.job, taken)

    def _on_machines(self) -> Ending:
        hosts = self._hosts()
        try:
            self._prepare(hosts)
            ending = self.control.ending() or self._train(hosts)
            self._conclude(hosts, ending)
        finally:
            self._kill(hosts)
            self._end_mirrors(hosts, keep=False)
        return ending

    # -- machines ----------------------------------------------------------------------------------------------------

    def _take_machines(self) -> str | None:
        """Wait for machines; None when the job ended while it waited."""
        if kept := self.account.pool.take_kept(self.job):
            return kept
        types, count = rules.instance_types(self.job.request), self.job.instance_count
        pool = self.account.pool
        if not self.job.is_spot and not pool.can_ever_hold(types, count):
            raise Failure(records.CAPACITY_ERROR)
        taken = pool.take(self.job) if not pool.waiting else None
        if taken is None:
            self._become("InProgress", "Pending")
            taken = pool.wait(self.job, give_up=lambda: self.control.ends_waiting or self._waited_enough())
        if taken is None:
            self._end_without_machines()
        elif self.job.request["ResourceConfig"].get("InstancePreferences"):
            self.account.jobs.change(self.job, lambda job: _select(job, taken, count))
        return taken

    def _end_without_machines(self) -> None:
        if not self.control.server_ends:
            self._become("Stopped", "Stopped" if self.control.stop else "MaxWaitTimeExceeded")

    def _hosts(self) -> list[Host]:
        """algo-1 has its tree in jobs/<job>/ml; a second host in ml-algo-2, and so on."""
        folder = self.account.home.jobs / self.job.name
        names = [f"algo-{number}" for number in range(1, self.job.instance_count + 1)]
        return [Host(name, MlTree(folder / ("ml" if name == "algo-1" else f"ml-{name}"))) for name in names]

    # -- Downloading -------------------------------------------------------------------------------------------------

    def _prepare(self, hosts: list[Host]) -> None:
        self._hold_machines()
        s3 = self._client("s3")
        names = [host.name for host in hosts]
        for index, host in enumerate(hosts):
            host.tree.renew()
            write_config(host.tree, self.job, names, host.name)
            self._download_channels(s3, host, share=(index, len(hosts)))
            self._restore_checkpoints(s3, host)

    def _hold_machines(self) -> None:
        now = records.now()
        self.job.segments.append([now, None])
        self.job.started_at = self.job.started_at or now
        self._become("InProgress", "Downloading")

    def _download_channels(self, s3: Any, host: Host, share: tuple[int, int]) -> None:
        for channel in self.job.request.get("InputDataConfig", []):
            source = channel["DataSource"]["S3DataSource"]
            is_sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
            folder = host.tree.channels / channel["ChannelName"]
            location = parse_location(source["S3Uri"])
            with s3_failures("Data download failed", self.job):
                sync.download_channel(s3, location, folder, share=share if is_sharded else (0, 1))

    def _restore_checkpoints(self, s3: Any, host: Host) -> None:
        target = self._checkpoint_location()
        if target:
            folder = host.tree.checkpoints(self.job)
            folder.mkdir(parents=True, exist_ok=True)
            with s3_failures("Checkpoint download failed", self.job):
                sync.download(s3, target, folder)

    def _checkpoint_location(self) -> Location | None:
        """The checkpoint prefix, always ending in `/`: it is a folder, and `l1` must not bring `l10` along."""
        config = self.job.request.get("CheckpointConfig")
        return Location(*parse_location(config["S3Uri"])).under("") if config else None

    # -- Training ----------------------------------------------------------------------------------------------------

    def _train(self, hosts: list[Host]) -> Ending:
        self._become("InProgress", "Training")
        for host in hosts:
            self._start(host)
        self._remember_processes(hosts)
        return self._watch(hosts)

    def _start(self, host: Host) -> None:
        argv = self.account.images[self.job.request["AlgorithmSpecification"]["TrainingImage"]]
        target = self._checkpoint_location()
        if target:
            host.mirror = sync.CheckpointMirror(self._client("s3"), host.tree.checkpoints(self.job), target)
        host.process = subprocess.Popen(
            argv,
            env=self._environment(host),
            cwd=host.tree.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert host.process.stdout is not None
        stream = stream_name(self.job.name, host.name, time.time())
        host.shipper = LogShipper(self._client("logs"), self.account.logs, stream, host.process.stdout)
        host.shipper.start()
        if host.mirror:
            host.mirror.start()

    def _environment(self, host: Host) -> dict[str, str]:
        """The container's whole environment: what the request says, the job's name, and the role's credentials."""
        job = self.job
        own = {
            "TRAINING_JOB_NAME": job.name,
            "TRAINING_JOB_ARN": job.arn,
            "MICROTUNING_ML_ROOT": str(host.tree.root),
            "AWS_REGION": self.account.endpoint.region,
            "AWS_DEFAULT_REGION": self.account.endpoint.region,
        }
        access = {} if job.request.get("EnableNetworkIsolation") else self._access()
        asked: dict[str, str] = job.request.get("Environment", {})
        return dict(self.account.job_environment) | asked | own | access

    def _access(self) -> dict[str, str]:
        """Where the container finds its role's credentials, fresh for as long as it runs, as on AWS."""
        endpoint = self.account.endpoint
        return {
            "AWS_ENDPOINT_URL": endpoint.endpoint_url,
            "AWS_ENDPOINT_URL_SAGEMAKER": endpoint.sagemaker_url,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{endpoint.sagemaker_url}/_local/credentials",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN": self.token,
        }

    def _remember_processes(self, hosts: list[Host]) -> None:
        """Name the processes on disk, so that they can be ended should this server die before them."""
        named = [(host.process.pid, started_at(host.process.pid)) for host in hosts if host.process]
        write_whole(self._processes_file(), json.dumps(named))

    def _processes_file(self) -> Path:
        return self.account.home.jobs / self.job.name / "processes.json"

    def _watch(self, hosts: list[Host]) -> Ending:
        """Wait for the first thing that ends the training."""
        while True:
            ending = self._ending(hosts)
            if ending:
                return ending
            self.control.asked.wait(LOOK_S)

    def _ending(self, hosts: list[Host]) -> Ending | None:
        codes = [host.exit_code for host in hosts]
        if any(codes) or all(code is not None for code in codes):
            return "exited"
        if any(host.mirror and host.mirror.failure for host in hosts):
            return "mirror_failed"
        if self._fault() == "internal_error":
            raise Failure(records.INTERNAL_ERROR)
        return self.control.ending() or self._deadline()

    def _fault(self) -> str | None:
        return self.account.pool.faults.of_job(self.job.name)

    def _deadline(self) -> Ending | None:
        if self.job.held_s(time.time()) > rules.max_runtime_s(self.job.request):
            return "max_runtime"
        return "max_wait" if self._waited_enough() else None

    def _waited_enough(self) -> bool:
        """MaxWaitTimeInSeconds counts from the creation of a spot job, training included."""
        if self.job.is_spot and self._fault() == "max_wait":
            return True
        wait_s = (self.job.request.get("StoppingCondition") or {}).get("MaxWaitTimeInSeconds")
        return wait_s is not None and time.time() - self.job.created_at > wait_s

    # -- the end -----------------------------------------------------------------------------------------------------

    def _conclude(self, hosts: list[Host], ending: Ending) -> None:
        match ending:
            case "exited":
                self._conclude_exit(hosts)
            case "reclaimed":
                self._conclude_reclaim(hosts)
            case "server_ends":
                self._conclude_server_end(hosts)
            case "mirror_failed":
                self._kill(hosts)
                self._end_mirrors(hosts, keep=True)
            case "stop" | "max_runtime" | "max_wait":
                self._conclude_stop(hosts, ending)

    def _conclude_exit(self, hosts: list[Host]) -> None:
        failed = next((host for host in hosts if host.exit_code), None)
        if failed:
            code, text = failed.exit_code, failed.tree.failure_text()
            self._kill(hosts)
            self._end_mirrors(hosts, keep=True)
            self._upload_output(hosts)
            raise Failure(algorithm_error(text, code or 0))
        self._kill(hosts)
        self._become("InProgress", "Uploading")
        self._end_mirrors(hosts, keep=True)
        self._upload_model(hosts)
        self._upload_output(hosts)
        # A stop that came while the results were on their way still ends as one: the caller was told so.
        last = "Stopped" if self.job.status == "Stopping" else "Completed"
        self._become(last, last)

    def _conclude_stop(self, hosts: list[Host], ending: Ending) -> None:
        self._become("Stopping", "Stopping")
        self._terminate(hosts)
        self._end_mirrors(hosts, keep=True)
        if any(any(host.tree.model.iterdir()) for host in hosts):
            self._upload_model(hosts)
        self._upload_output(hosts)
        last = {"max_runtime": "MaxRuntimeExceeded", "max_wait": "MaxWaitTimeExceeded"}.get(ending, "Stopped")
        self._become("Stopped", last)

    def _conclude_reclaim(self, hosts: list[Host]) -> None:
        """The machine is gone: no signal to catch, no last upload, nothing billed until there is another."""
        self._kill(hosts)
        self._end_mirrors(hosts, keep=False)
        records.close_segment(self.job, records.now())
        self._become("InProgress", "Interrupted")

    def _conclude_server_end(self, hosts: list[Host]) -> None:
        """The local cloud goes down: keep what there is. The record stays in flight; the next start fails it."""
        self._kill(hosts)
        self.account.jobs.change(self.job, lambda job: records.close_segment(job, records.now()))
        self._end_mirrors(hosts, keep=True)

    def _terminate(self, hosts: list[Host]) -> None:
        """SIGTERM to the container's first process, the grace time, SIGKILL to all it started."""
        running = [host.process for host in hosts if host.process and host.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.account.stop_grace_s
        while time.monotonic() < deadline and not self.control.server_ends:
            if all(process.poll() is not None for process in running):
                break
            time.sleep(LOOK_S)
        self._kill(hosts)

    def _kill(self, hosts: list[Host]) -> None:
        """End whatever is left of each host's process group, and store the rest of its log."""
        for host in hosts:
            if host.process:
                _kill_group_of(host.process)
            if host.shipper:
                host.shipper.finish()
        self._processes_file().unlink(missing_ok=True)

    def _end_mirrors(self, hosts: list[Host], *, keep: bool) -> None:
        for host in hosts:
            if host.mirror and not keep:
                host.mirror.abandon()
            elif host.mirror:
                with s3_failures("Checkpoint upload failed", self.job):
                    host.mirror.close()

    # -- uploads -----------------------------------------------------------------------------------------------------

    def _upload_model(self, hosts: list[Host]) -> None:
        uri = self._upload_result("model", [host.tree.model for host in hosts], even_if_empty=True)
        self.job.model_uri = uri

    def _upload_output(self, hosts: list[Host]) -> None:
        self._upload_result("output", [host.tree.output_data for host in hosts], even_if_empty=False)

    def _upload_result(self, name: str, folders: list[Path], *, even_if_empty: bool) -> str:
        """Upload folders as <S3OutputPath>/<job>/output/<name>.tar.gz, or as they are with CompressionType NONE."""
        config = self.job.request["OutputDataConfig"]
        base = parse_location(config["S3OutputPath"]).under(self.job.name, "output")
        s3, key = self._client("s3"), config.get("KmsKeyId")
        with s3_failures("Artifact upload failed", self.job):
            if config.get("CompressionType") == "NONE":
                target = base.under(name)
                for folder in folders:
                    sync.upload_folder(s3, folder, target, key)
                return f"{target.uri}/"
            target, archive = base.under(f"{name}.tar.gz"), self._processes_file().with_name(f"{name}.tar.gz")
            if sync.pack(folders, archive) or even_if_empty:
                sync.upload(s3, archive, target, key)
            archive.unlink(missing_ok=True)
            return target.uri

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _client(self, service: str) -> Any:
        try:
            return self.session.client(service)
        except rules.Refusal as refusal:
            raise Failure(f"ClientError: {refusal.message}") from refusal

    def _clean_up(self) -> None:
        """The disk goes with the machine; a failed job's stays, so that one can look at what it left."""
        if self.job.status in ("Completed", "Stopped"):
            for host in self._hosts():
                shutil.rmtree(host.tree.root, ignore_errors=True)

    def _become(self, status: str, secondary: str) -> None:
        is_step_back = status == "InProgress" and self.job.status == "Stopping"
        if is_step_back or self.job.secondary == secondary:
            return
        now = records.now()
        self.account.jobs.change(self.job, lambda job: records.moved(job, status, secondary, now))
        self.account.events.emit(self.job, now)

    def _fail(self, reason: str) -> None:
        self.job.failure_reason = reason[: records.MAX_REASON_CHARACTERS]
        self._become("Failed", "Failed")


def _select(job: Job, instance_type: str, count: int) -> None:
    job.request["ResourceConfig"] |= {"SelectedInstanceType": instance_type, "SelectedInstanceCount": count}


def _kill_group_of(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process and all it started, then collect its exit code."""
    with suppress(ProcessLookupError):  # all of it may have ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kill_group(process.pid)


def algorithm_error(text: str, exit_code: int) -> str:
    """AlgorithmError: <text>, exit code: <n>; the text gives way where both do not fit into 1,024 characters."""
    tail = f", exit code: {exit_code}"
    head = f"AlgorithmError: {text}"
    return head[: records.MAX_REASON_CHARACTERS - len(tail)] + tail


class s3_failures:  # noqa: N801 - reads as the statement it is: with s3_failures("Artifact upload failed", job)
    """Turn what S3 refuses into the job's failure, named as SageMaker names it."""

    def __init__(self, what: str, job: Job) -> None:
        self.what, self.job = what, job

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import ClientError

        if isinstance(error, sync.NothingFound):
            raise Failure(nothing_found(error.location, self.job)) from error
        if isinstance(error, (ClientError, S3UploadFailedError)):
            raise Failure(f"ClientError: {self.what}: {error}") from error


def nothing_found(location: Location, job: Job) -> str:
    return (
        f'ClientError: Data download failed:No S3 objects found under S3 URL "{location.uri}" given in input data '
        "source. Please ensure that the bucket exists in the selected region, that objects exist under that S3 "
        f'prefix, and that the role "{job.request["RoleArn"]}" has "s3:ListBucket" permissions on bucket '
        f'"{location.bucket}".'
    )
