"""The local SageMaker's HTTP server: aws-json 1.1 for boto3 and the aws CLI, and a few paths of its own.

    POST /                    x-amz-target: SageMaker.<operation>, signed (AWS4-HMAC-SHA256)
    GET  /_local/health       POST /_local/reclaim {"job": …}   POST /_local/faults {…}     with the admin token
    GET  /_local/credentials  the credentials of a job's role, with the job's own token
It listens on 127.0.0.1, and answers neither another Host name (DNS rebinding) nor a web page (Origin).
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from microtuning_core.domain.errors import LocalCloudError
from microtuning_local.clients import root_client
from microtuning_local.deploy import TRAINING_IMAGE
from microtuning_local.emulator import base_environment, inherited
from microtuning_local.home import Home, read_endpoint
from microtuning_local.sagemaker import jobs as records
from microtuning_local.sagemaker import rules, warm_pools
from microtuning_local.sagemaker.events import EventSender
from microtuning_local.sagemaker.faults import Faults, FaultSpec
from microtuning_local.sagemaker.jobs import Job, Jobs
from microtuning_local.sagemaker.machine import Account, JobRun
from microtuning_local.sagemaker.pool import Pool
from microtuning_local.sagemaker.process import MACHINE_VARIABLES
from microtuning_local.sagemaker.roles import role_session, warm_models
from microtuning_local.sagemaker.rules import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from microtuning_local.home import Endpoint

MAX_BODY_BYTES = 8 * 1024 * 1024
SHUTDOWN_S = 10.0
HOLDING_MACHINES = ("Downloading", "Training")
SIGNATURE = "AWS4-HMAC-SHA256"

log = logging.getLogger(__name__)


class Service:
    """The operations. Each takes the request's JSON and returns the answer's; a Refusal is the error answer."""

    def __init__(self, account: Account, faults: Faults) -> None:
        self.account, self.faults = account, faults
        self.runs: dict[str, JobRun] = {}
        self.lock = threading.Lock()
        self.operations: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "CreateTrainingJob": self.create,
            "DescribeTrainingJob": self.describe,
            "StopTrainingJob": self.stop,
            "UpdateTrainingJob": self.update,
            "ListTrainingJobs": self.list_jobs,
            "AddTags": self.add_tags,
            "ListTags": self.list_tags,
        }

    def call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        if operation not in self.operations:
            raise Refusal("UnknownOperationException", f"The local SageMaker has no operation {operation}.")
        return self.operations[operation](request)

    def create(self, request: dict[str, Any]) -> dict[str, Any]:
        rules.check_create(request)
        self._check_image(request)
        job = records.new_job(request, self._arn(request["TrainingJobName"]), records.now())
        refusal = self.faults.refusal(job.instance_type, job.instance_count)
        refusal = refusal or self.account.pool.warm_pool_refusal(job)
        if refusal:
            raise refusal
        role_session(self.account.endpoint, self.account.sts, request["RoleArn"], job.name).credentials()
        records.moved(job, "InProgress", "Starting", job.created_at)
        # A run holds its job's clients, a megabyte of them: it goes with the job.
        run = JobRun(self.account, job, on_end=lambda: self.runs.pop(job.name, None))
        with self.lock:  # whoever sees the job can ask for something
            self.account.jobs.add(job)
            self.runs[job.name] = run
        self.account.events.emit(job, job.created_at)
        run.thread.start()
        return {"TrainingJobArn": job.arn}

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        rules.check_model("DescribeTrainingJob", request)
        return records.description(self.account.jobs.get(request["TrainingJobName"]), time.time())

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        rules.check_model("StopTrainingJob", request)
        job = self.account.jobs.get(request["TrainingJobName"])
        if job.is_terminal:
            raise rules.validation(f"The request was rejected because the training job is in status {job.status}.")
        now = records.now()
        if job.status != "Stopping":
            self.account.jobs.change(job, lambda job: records.moved(job, "Stopping", "Stopping", now))
            self.account.events.emit(job, now)
        self._ask(job, stop=True)
        return {}

    def update(self, request: dict[str, Any]) -> dict[str, Any]:
        """How long machines are kept after the job; the rest that the service can update does not exist here."""
        rules.check_model("UpdateTrainingJob", request)
        job = self.account.jobs.get(request["TrainingJobName"])
        if set(request) != {"TrainingJobName", "ResourceConfig"}:
            raise rules.validation("The local SageMaker updates ResourceConfig.KeepAlivePeriodInSeconds, nothing else.")
        keep_alive_s, now = request["ResourceConfig"]["KeepAlivePeriodInSeconds"], records.now()
        self.account.jobs.change(job, lambda job: warm_pools.update(job, keep_alive_s, now))
        return {"TrainingJobArn": job.arn}

    def list_jobs(self, request: dict[str, Any]) -> dict[str, Any]:
        rules.check_model("ListTrainingJobs", request)
        return records.listed(self.account.jobs.all(), request)

    def add_tags(self, request: dict[str, Any]) -> dict[str, Any]:
        rules.check_model("AddTags", request)
        job = self.account.jobs.by_arn(request["ResourceArn"])
        added = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
        self.account.jobs.change(job, lambda job: job.tags.update(added))
        return {"Tags": _tag_list(job)}

    def list_tags(self, request: dict[str, Any]) -> dict[str, Any]:
        rules.check_model("ListTags", request)
        return {"Tags": _tag_list(self.account.jobs.by_arn(request["ResourceArn"]))}

    def reclaim(self, name: str) -> dict[str, Any]:
        """Take the machine of a running spot job."""
        job = self.account.jobs.get(name)
        if not job.is_spot or job.secondary not in HOLDING_MACHINES:
            raise rules.validation(f"{name} is not a running spot job: only those are taken back.")
        self._ask(job, reclaim=True)
        return {"job": name}

    def _ask(self, job: Job, **what: bool) -> None:
        """Nothing is left to ask for where the job ended meanwhile."""
        with self.lock:
            run = self.runs.get(job.name)
        if run:
            run.control.ask(**what)

    def health(self) -> dict[str, Any]:
        running = [job.name for job in self.account.jobs.all() if not job.is_terminal]
        return {"status": "ok", "jobs_running": len(running), "machines_in_use": self.account.pool.count_in_use()}

    def fail_left_over(self, left: list[Job]) -> None:
        """Jobs that an earlier server had in flight: their machines are gone, so they failed."""
        for job in left:
            now = records.now()
            records.close_segment(job, min(now, last_sign_of_life(self.account.home.jobs / job.name)))
            job.failure_reason = records.INTERNAL_ERROR
            self.account.jobs.change(job, lambda job, now=now: records.moved(job, "Failed", "Failed", now))  # type: ignore[misc]
            self.account.events.emit(job, now)

    def end_warm_pools(self) -> None:
        """Machines that are kept do not outlive this server."""
        now = records.now()
        for job in self.account.jobs.all():
            if job.kept_until is not None and job.kept_until > now:
                self.account.jobs.change(job, lambda job: warm_pools.end(job, now))

    def reclaim_regularly(self, every_s: float) -> None:
        """Take each spot machine back after `every_s` of training, over and over."""
        while True:
            time.sleep(min(every_s / 4, 1.0))
            for job in self.account.jobs.all():
                if job.is_spot and job.secondary == "Training" and time.time() - job.modified_at > every_s:
                    self._ask(job, reclaim=True)

    def shut_down(self) -> None:
        """End all jobs, store what they left, send the events that wait. Their records stay in flight."""
        alive = [run for run in list(self.runs.values()) if run.thread.is_alive()]
        for run in alive:
            run.control.ask(server_ends=True)
        deadline = time.monotonic() + SHUTDOWN_S
        for run in alive:
            run.thread.join(max(0.0, deadline - time.monotonic()))
        self.end_warm_pools()
        self.account.events.close(timeout_s=2)

    def _check_image(self, request: dict[str, Any]) -> None:
        image = request["AlgorithmSpecification"].get("TrainingImage")
        if image not in self.account.images:
            raise rules.validation(
                f"Cannot find repository for image {image}. The local SageMaker knows {sorted(self.account.images)}."
            )

    def _arn(self, name: str) -> str:
        endpoint = self.account.endpoint
        return f"arn:aws:sagemaker:{endpoint.region}:{endpoint.account}:training-job/{name.lower()}"


def _tag_list(job: Job) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in job.tags.items()]


def last_sign_of_life(folder: Path) -> float:
    """When a job whose server died last wrote anything: what it is billed until."""
    return max((path.stat().st_mtime for path in folder.rglob("*")), default=time.time())


class Handler(BaseHTTPRequestHandler):
    """One connection; boto3 keeps it open, so every answer states its length."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 120  # of silence on a connection; boto3 opens another
    server: Server

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _answer(self, handle: Callable[[], dict[str, Any]]) -> None:
        try:
            self._check_origin()
            status, answer = 200, handle()
        except Refusal as refusal:
            status, answer = refusal.status, {"__type": refusal.code, "message": refusal.message}
        except Exception:  # the caller must get an answer; the trace goes to our log
            log.exception("%s %s", self.command, self.path)
            status, answer = 500, {"__type": "InternalFailure", "message": "See the local SageMaker's log."}
        self._send(status, answer)

    def _get(self) -> dict[str, Any]:
        if self.path == "/_local/credentials":
            return self._credentials()
        self._check_admin()
        if self.path == "/_local/health":
            return self.server.service.health()
        raise Refusal("UnknownOperationException", f"There is no {self.path}.", status=404)

    def _post(self) -> dict[str, Any]:
        body = self._body()
        if not self.path.startswith("/_local/"):
            return self._call(body)
        self._check_admin()
        match self.path:
            case "/_local/reclaim":
                return self.server.service.reclaim(str(body.get("job")))
            case "/_local/faults":
                return self._set_faults(body)
        raise Refusal("UnknownOperationException", f"There is no {self.path}.", status=404)

    def _call(self, body: dict[str, Any]) -> dict[str, Any]:
        if not (self.headers.get("Authorization") or "").startswith(SIGNATURE):
            raise Refusal("MissingAuthenticationTokenException", "Missing Authentication Token", status=403)
        return self.server.service.call((self.headers.get("X-Amz-Target") or "").rpartition(".")[2], body)

    def _set_faults(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            spec = FaultSpec.model_validate(body)
        except ValidationError as error:
            raise rules.validation(str(error)) from error
        self.server.service.faults.replace(spec)
        return spec.model_dump(mode="json")

    def _credentials(self) -> dict[str, Any]:
        session = self.server.service.account.tokens.get(self.headers.get("Authorization") or "")
        if not session:
            raise Refusal("AccessDeniedException", "This token belongs to no running job.", status=403)
        given = session.credentials()
        return {
            "AccessKeyId": given["access_key"],
            "SecretAccessKey": given["secret_key"],
            "Token": given["token"],
            "Expiration": given["expiry_time"].replace("+00:00", "Z"),
        }

    def _check_origin(self) -> None:
        """Only programs on this machine: no other name for our address, and no page in a browser."""
        port = self.server.server_address[1]
        hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        if self.headers.get("Host") not in hosts or self.headers.get("Origin"):
            self.close_connection = True
            raise Refusal("AccessDeniedException", "Only programs on this machine may call.", status=403)

    def _check_admin(self) -> None:
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise Refusal("AccessDeniedException", "The token in endpoint.json is needed here.", status=403)

    def _body(self) -> dict[str, Any]:
        size = self._body_size()
        try:
            body = json.loads(self.rfile.read(size) or b"{}")
        except (ValueError, RecursionError) as error:
            raise Refusal("SerializationException", "The body is not JSON.") from error
        if not isinstance(body, dict):
            raise Refusal("SerializationException", "The body is not a JSON object.")
        return body

    def _body_size(self) -> int:
        """Of a body whose end is known; else the connection is closed, since what follows is no next request."""
        told = (self.headers.get("Content-Length") or "0").strip()
        if self.headers.get("Transfer-Encoding") or not (told.isascii() and told.isdigit() and len(told) < 16):
            self.close_connection = True
            raise Refusal(
                "LengthRequired", "A request states its Content-Length, and has no other encoding.", status=411
            )
        if int(told) > MAX_BODY_BYTES:
            self.close_connection = True
            raise Refusal("RequestEntityTooLarge", f"A request has at most {MAX_BODY_BYTES} bytes.", status=413)
        return int(told)

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-amzn-RequestId", str(uuid.uuid4()))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, service: Service, token: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.service, self.token = service, token


def images(settings: Mapping[str, str]) -> dict[str, list[str]]:
    """Image address -> the command that stands for its ENTRYPOINT, run with this Python."""
    more: dict[str, list[str]] = json.loads(settings.get("MICROTUNING_LOCAL_IMAGES", "{}"))
    return more | {TRAINING_IMAGE: [sys.executable, "-m", "training_container.supervisor"]}


def open_account(home: Home, endpoint: Endpoint, settings: Mapping[str, str]) -> tuple[Service, list[Job]]:
    """Put the parts together; also returns the jobs that an earlier server left in flight."""
    faults = Faults()
    jobs = Jobs(home.jobs)
    left = jobs.load()
    account = Account(
        home=home,
        endpoint=endpoint,
        jobs=jobs,
        pool=Pool(int(settings.get("MICROTUNING_LOCAL_MACHINES", "2")), faults, jobs),
        events=EventSender(root_client(endpoint, "events"), faults),
        sts=root_client(endpoint, "sts"),
        logs=root_client(endpoint, "logs"),
        images=images(settings),
        job_environment=base_environment(home) | inherited(*MACHINE_VARIABLES),
        stop_grace_s=float(settings.get("MICROTUNING_LOCAL_STOP_GRACE_S", "120")),
    )
    service = Service(account, faults)
    service.end_warm_pools()  # of a server that was killed
    return service, left


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    home = Home(Path(os.environ["MICROTUNING_LOCAL_ROOT"]))
    endpoint = read_endpoint(home)
    if endpoint is None:
        raise LocalCloudError(
            f"{home.endpoint_file} is missing, so there is no address to listen on.",
            next_step="Run `microtuning local up`, which writes it.",
        )
    service, left = open_account(home, endpoint, os.environ)
    server = Server(endpoint.sagemaker_port, service, endpoint.token)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_background(service, endpoint, left)
    server.serve_forever(poll_interval=0.1)
    server.server_close()
    service.shut_down()


def start_background(service: Service, endpoint: Endpoint, left: list[Job]) -> None:
    """What need not be ready before the first answer: old jobs, the service model."""

    def prepare() -> None:
        service.fail_left_over(left)
        rules.input_shape("CreateTrainingJob")
        warm_models(endpoint)

    threading.Thread(target=prepare, name="prepare", daemon=True).start()
    every_s = float(os.environ.get("MICROTUNING_LOCAL_RECLAIM_EVERY_S", "0"))
    if every_s > 0:
        threading.Thread(target=service.reclaim_regularly, args=(every_s,), name="reclaim", daemon=True).start()


if __name__ == "__main__":
    main()
