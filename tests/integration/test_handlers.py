"""Handlers on the local cloud: batches, duplicates, late and lost events, tokens that nobody waits for, dead letters."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from functions._environment import Environment
from microtuning_core.domain.layout import receipt_key, spec_key, step_prefix
from microtuning_core.domain.names import job_name, new_run_id
from microtuning_core.domain.run import RunStatus, new_run
from microtuning_core.domain.settle import WaitingState
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_local import cloud as local

if TYPE_CHECKING:
    from tests.integration.conftest import StageUnderTest

pytestmark = pytest.mark.cloud

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases"
SHORTEST_SCHEDULE_S = 60.0  # EventBridge knows no shorter one; the local cloud's reconciler has it
HANDLERS = sorted(path.stem for path in (ROOT / "functions").glob("*.py") if not path.stem.startswith("_"))


def hex8() -> str:
    return uuid.uuid4().hex[:8]


# -- specs: batches, the same upload twice, marks of a function that was killed -----------------------------------------


def test_of_a_batch_only_the_bad_message_comes_back_and_nothing_starts_twice(stage: StageUnderTest) -> None:
    case = json.loads((CASES / "c13_sqs_batch.json").read_text())
    bodies = [json.loads(record["body"]) for record in case["Records"]]
    mark = hex8()
    for body in bodies:
        stored = body["Records"][0]["s3"]
        name = stored["object"]["key"].rsplit("/", 1)[1]
        stored["bucket"]["name"], stored["object"]["key"] = stage.names.bucket, spec_key("default", f"{mark}-{name}")
        if name != "missing.json":
            with stage.held_back("specs"):  # only this batch speaks of it
                _, stored["object"]["eTag"] = stage.upload(stage.spec(name=f"c13 {name[:-5]}"), f"{mark}-{name}")
                stage.client("sqs").purge_queue(QueueUrl=stage.queue_url("specs"))
    before = set(stage.executions())
    first = stage.deliver("on_spec_uploaded", *bodies)
    started = set(stage.executions()) - before
    second = stage.deliver("on_spec_uploaded", *bodies)
    assert (first, second, len(started)) == (["m-2"], ["m-2"], 2)
    assert set(stage.executions()) - before == started
    assert {stage.ended(run_id).status for run_id in started} == {"completed"}


class Upload:
    """A spec in S3 that only the test speaks of, and the mark that a function leaves of it."""

    def __init__(self, stage: StageUnderTest) -> None:
        self.stage, self.file, self.sequencer = stage, f"{hex8()}.json", hex8().upper()
        with stage.held_back("specs"):
            _, self.etag = stage.upload(stage.spec(name="c65"), self.file)
            stage.peek("specs")
            stage.client("sqs").purge_queue(QueueUrl=stage.queue_url("specs"))

    def announce(self, size: int = 100) -> list[str]:
        """The messages given back by the function."""
        key = spec_key("default", self.file)
        event = self.stage.object_event(key, self.etag, self.sequencer, size)
        return self.stage.deliver("on_spec_uploaded", event)

    @property
    def run_id(self) -> str:
        at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        key = spec_key("default", self.file)
        return new_run_id("default", "c65", at, self.stage.names.bucket, key, self.etag, self.sequencer)

    @property
    def receipt(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.stage.services.objects.read_json(receipt_key("default", self.file))
        return found

    def plant_mark(self, expires_in_s: float) -> None:
        """What powertools leaves in the table for a function that began with this upload and was killed."""
        identity = "|".join([self.stage.names.bucket, spec_key("default", self.file), self.etag, self.sequencer])
        submit = (
            f"{self.stage.names.function('on_spec_uploaded')}.functions.on_spec_uploaded._submit_once.<locals>.submit"
        )
        now = datetime.now(UTC).timestamp()
        item = {
            "id": {"S": f"{submit}#{md5_of_json(identity)}"},
            "status": {"S": "INPROGRESS"},
            "expiration": {"N": str(int(now) + 3600)},
            "in_progress_expiration": {"N": str(int((now + expires_in_s) * 1000))},
            "validation": {"S": md5_of_json("100")},
        }
        self.stage.client("dynamodb").put_item(TableName=self.stage.names.table("idempotency"), Item=item)


def md5_of_json(value: str) -> str:
    return hashlib.md5(json.dumps(value).encode(), usedforsecurity=False).hexdigest()


def test_a_mark_in_progress_holds_back_a_second_delivery_until_it_expires(stage: StageUnderTest) -> None:
    held, expired = Upload(stage), Upload(stage)
    held.plant_mark(expires_in_s=60)
    expired.plant_mark(expires_in_s=-1)
    assert (held.announce(), held.receipt) == (["m-1"], None)
    assert expired.announce() == []
    assert stage.ended(expired.run_id).status == "completed"
    assert stage.services.runs.find(held.run_id) is None


def test_a_function_killed_after_its_execution_started_leaves_one_run(stage: StageUnderTest) -> None:
    upload = Upload(stage)
    spec = parse_spec({"tenant": "default"} | stage.spec(name="c65"))
    stage.services.runs.create(new_run(upload.run_id, spec, datetime.now(UTC)))
    stage.services.executions.start(upload.run_id, {"run_id": upload.run_id})
    upload.plant_mark(expires_in_s=-1)
    before = set(stage.executions())
    assert upload.announce() == []
    assert upload.receipt == {"etag": upload.etag, "run_id": upload.run_id}
    assert set(stage.executions()) == before
    run = stage.ended(upload.run_id)
    assert (run.status, len(run.attempts)) == ("completed", 1)


def test_another_body_under_the_same_identity_is_refused_and_the_first_answer_stays(stage: StageUnderTest) -> None:
    upload = Upload(stage)
    assert upload.announce(size=100) == []
    before, receipt = set(stage.executions()), upload.receipt
    assert upload.announce(size=101) == []  # it can never become right, so it does not come back either
    assert (set(stage.executions()), upload.receipt) == (before, receipt)
    stage.ended(upload.run_id)


def test_a_file_that_was_replaced_before_it_was_read_runs_once_as_its_newer_spec(stage: StageUnderTest) -> None:
    before = set(stage.executions())
    file = f"{hex8()}.yaml"
    with stage.held_back("specs"):
        stage.upload(stage.spec(name="older"), file)
        newer = stage.upload(stage.spec(name="newer"), file)
    run_id = stage.receipt(*newer)["run_id"]
    stage.drained("specs")
    assert (stage.ended(run_id).name, set(stage.executions()) - before) == ("newer", {run_id})


def test_a_spec_in_a_folder_that_no_tenant_can_have_is_let_go(stage: StageUnderTest) -> None:
    event = stage.object_event("tenants/No Such Tenant/specs/x.yaml", "e")
    assert stage.deliver("on_spec_uploaded", event) == []


# -- job events: twice, late, out of order, never ----------------------------------------------------------------------


def test_duplicate_late_and_foreign_events_count_once_and_reopen_nothing(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit())
    stage.drained("cost-events")
    job = run.attempts[0].job_name
    case = json.loads((CASES / "c58_duplicates.json").read_text())
    for event in case["arrival_order"]:
        if event["detail"]["TrainingJobName"] == "rl-acme-run7-a1":
            event["detail"]["TrainingJobName"] = job
    before = ledger(stage, run.run_id)
    for function in ("on_training_event", "on_cost_event"):
        assert stage.deliver(function, *case["arrival_order"]) == []
    assert ledger(stage, run.run_id) == before
    assert [(entry["state"], entry["attempt"]) for entry in before] == [("final", 1)]
    assert stage.run(run.run_id) == run


def ledger(stage: StageUnderTest, run_id: str) -> list[dict[str, Any]]:
    """Of the run's machines; other lines have tests of their own."""
    month = f"{datetime.now(UTC):%Y-%m}"
    entries = stage.services.ledger.month("default", month, run_id)
    return [entry.model_dump(mode="json") for entry in entries if entry.line == "compute"]


def test_the_same_end_told_four_times_at_once_settles_the_attempt_once(stage: StageUnderTest) -> None:
    with stage.held_back("training-events"), stage.held_back("cost-events"):
        run_id = stage.submit()
        job = stage.when(run_id, lambda run: run.attempts and run.attempts[0].launched_at).attempts[0].job_name
        stage.until(lambda: stage.has_ended(job), "the job has not ended")
        told: list[list[str]] = []

        def tell(function: str) -> None:
            told.append(stage.deliver(function, stage.job_event(job)))

        threads = [threading.Thread(target=tell, args=(f"on_{kind}_event",)) for kind in ("training", "cost") * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run = stage.ended_and_paid(run_id)
    assert (run.status, told) == ("completed", [[]] * 8)
    assert stage.events(run_id, "attempt_ended") == ["completed"]
    assert [entry["billed_s"] for entry in ledger(stage, run_id)] == [run.attempts[0].billed_s]


@pytest.mark.parametrize("name", ["prod-default-x-000000000000-a001", "local-default-nobody-000000000000-a001", "mine"])
def test_events_of_other_jobs_are_let_go(stage: StageUnderTest, name: str) -> None:
    for function in ("on_training_event", "on_cost_event"):
        assert stage.deliver(function, stage.job_event(name)) == []


@pytest.mark.parametrize("fault", ["twice", "late"])
def test_a_run_whose_job_events_come_twice_or_late_ends_and_is_paid_once(
    stage: StageUnderTest, faults: Any, fault: str
) -> None:
    faults({"events": {"local-default-*": fault}, "late_s": 0.5})
    run = stage.ended_and_paid(stage.submit())
    assert (run.status, len(run.attempts), len(ledger(stage, run.run_id))) == ("completed", 1, 1)
    assert stage.events(run.run_id, "attempt_ended") == ["completed"]


def test_a_run_whose_job_events_never_come_ends_with_a_tick_and_is_paid_once(
    stage: StageUnderTest, faults: Any
) -> None:
    faults({"events": {"local-default-*": "drop"}})
    run_id = stage.submit()
    launched = stage.when(run_id, lambda run: run.attempts and run.attempts[0].launched_at)
    job = launched.attempts[0].job_name
    stage.until(lambda: stage.has_ended(job), "the job has not ended")
    local.tick()
    run = stage.ended(run_id)
    local.tick()
    run = stage.ended_and_paid(run_id)
    local.tick()
    assert (run.status, len(ledger(stage, run_id)), run.cost_usd) == ("completed", 1, stage.run(run_id).cost_usd)
    assert run_id not in stage.services.runs.open_run_ids("default")


def test_the_schedule_by_itself_ends_a_run_whose_job_events_never_come(stage: StageUnderTest, faults: Any) -> None:
    faults({"events": {"local-default-*": "drop"}})
    run = stage.ended(stage.submit(), timeout_s=3 * SHORTEST_SCHEDULE_S)
    assert (run.status, stage.events(run.run_id, "attempt_ended")) == ("completed", ["completed"])


def test_a_job_that_nobody_waits_for_any_more_is_stopped_and_paid(stage: StageUnderTest, faults: Any) -> None:
    faults({"events": {"local-default-*": "drop"}})
    run_id = stage.submit("hang")
    job = stage.training(run_id).attempts[0].job_name
    (waiting,) = stage.waiting(run_id)
    stage.services.executions.fail(waiting.token, "ByHand", "failed in the console")
    run = stage.ended(run_id)
    assert (run.status, run.reason) == ("failed", "failed in the console")
    stage.until(lambda: stage.job(job).status == "Stopped", "the job still runs")
    local.tick()
    run = stage.ended_and_paid(run_id)
    assert [entry["state"] for entry in ledger(stage, run_id)] == ["final"]


# -- tokens that nobody waits for --------------------------------------------------------------------------------------


def test_an_admission_that_is_delivered_again_does_not_push_out_the_state_that_waits(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang")
    stage.training(run_id)
    old = {"token": f"old-{hex8()}", "execution": run_id, "input": {"run_id": run_id}}
    assert stage.deliver("admit_run", old) == []
    assert [each.state for each in stage.waiting(run_id)] == ["train"]
    stage.cancel(run_id)
    assert stage.ended(run_id).status == "stopped"


def test_a_launch_that_is_delivered_again_while_the_run_waits_for_capacity_changes_nothing(
    stage: StageUnderTest, faults: Any
) -> None:
    faults({"capacity": {"ml.m5.large": 0}})
    run_id = stage.submit()
    stage.when(run_id, lambda run: run.not_before)
    stage.until(lambda: [each.state for each in stage.waiting(run_id)] == ["admit"], "Admit run waits again")
    run = stage.run(run_id)
    old = {"token": f"old-{hex8()}", "execution": run_id, "run_id": run_id, "attempt": 1}
    assert stage.deliver("launch_training", old) == []
    assert [each.state for each in stage.waiting(run_id)] == ["admit"]
    assert stage.run(run_id) == run
    stage.cancel(run_id)
    assert stage.ended(run_id).status == "stopped"


def test_a_launch_of_an_attempt_that_is_over_makes_no_job(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit())
    stage.services.runs.update(run.run_id, lambda run: run)
    old = {"token": f"old-{hex8()}", "execution": run.run_id, "run_id": run.run_id, "attempt": 1}
    assert stage.deliver("launch_training", old) == []
    jobs = stage.client("sagemaker").list_training_jobs(NameContains=run.run_id)["TrainingJobSummaries"]
    assert (len(jobs), stage.run(run.run_id)) == (1, run)


def test_a_cancel_between_plan_and_launch_makes_no_job(stage: StageUnderTest) -> None:
    with stage.held_back("launches"):
        run_id = stage.submit()
        stage.when(run_id, lambda run: run.attempts)
        stage.cancel(run_id)
        stage.when(run_id, lambda run: run.verdict == "stopped")
    run = stage.ended(run_id)
    assert (run.status, run.attempts[0].outcome, run.attempts[0].billed_s) == ("stopped", "stopped", 0)
    assert stage.services.jobs.describe(run.attempts[0].job_name) is None


def test_a_run_whose_slot_was_given_by_a_function_that_then_died_is_woken_by_the_tick(stage: StageUnderTest) -> None:
    with stage.held_back("admissions"):
        run_id = stage.submit()
        admissions = stage.services.admissions
        stage.services.runs.update(run_id, lambda run: run.moved_to(RunStatus.QUEUED))
        message = json.loads(stage.peek("admissions"))
        stage.client("sqs").purge_queue(QueueUrl=stage.queue_url("admissions"))
    stage.services.runs.put_token(run_id, WaitingState("admit", message["token"], message["execution"]))
    admissions.wait(run_id, "default", datetime.now(UTC))
    assert admissions.grant(stage.services.settings.limits, datetime.now(UTC)).run_ids == [run_id]
    local.tick()
    assert stage.ended(run_id).status == "completed"


# -- dead letters ------------------------------------------------------------------------------------------------------


def test_a_dead_launch_ends_its_run_with_the_last_error(stage: StageUnderTest) -> None:
    with stage.held_back("launches"):
        run_id = stage.submit()
        letter = stage.peek("launches")
        stage.services.runs.note(run_id, "handler_error", "launch-training: the last thing that went wrong")
        stage.client("sqs").purge_queue(QueueUrl=stage.queue_url("launches"))
        stage.send("launches-dlq", letter)
        run = stage.ended(run_id)
    reason = "launches gave up after several deliveries: launch-training: the last thing that went wrong"
    assert (run.status, run.reason) == ("failed", reason)


def test_a_dead_copy_of_a_launch_that_went_well_does_not_end_the_run(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang")
    stage.training(run_id)
    stage.send("launches-dlq", {"token": f"old-{hex8()}", "execution": run_id, "run_id": run_id, "attempt": 1})
    stage.drained("launches-dlq")
    assert stage.run(run_id).verdict is None
    stage.cancel(run_id)
    assert stage.ended(run_id).reason == "cancelled by its user"


def test_a_dead_spec_is_answered_in_its_receipt(stage: StageUnderTest) -> None:
    file = f"{hex8()}.yaml"
    stage.send("specs-dlq", stage.object_event(spec_key("default", file), "an-etag"))
    errors = stage.receipt(file, "an-etag")["errors"]
    assert errors == [{"field": "spec", "line": None, "message": "it could not be processed; upload it again"}]


@pytest.mark.parametrize(
    "body",
    ["no json at all", [], {"token": "t", "input": "text"}, {"token": "t", "run_id": "nonsense"}, {"detail": {}}],
)
def test_a_dead_letter_of_any_shape_is_let_go_and_does_not_come_back(stage: StageUnderTest, body: Any) -> None:
    assert stage.deliver("on_dead_letter", body) == []


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_only_the_newest_checkpoints_of_a_run_are_kept_and_a_namesake_keeps_all(stage: StageUnderTest) -> None:
    neighbour = "tenants/default/runs/{}1/checkpoints/l01/step-1/weights.bin"
    run_id = stage.submit("four_steps", checkpoint={"keep": 2})
    stage.put(neighbour.format(run_id), b"of a run whose name begins alike")
    stage.ended(run_id)

    def steps() -> list[int]:
        return [each.step for each in stage.services.runs.checkpoints(run_id)]

    stage.until(lambda: steps() == [3, 4], "the registered checkpoints are not the last two")
    stage.drained("checkpoints")
    for step in (1, 2):
        assert stage.keys(step_prefix(run_id, 1, step)) == []
    assert len(stage.keys(step_prefix(run_id, 1, 4))) == 2
    assert stage.keys(neighbour.format(run_id)) != []
    assert stage.run(run_id).last_checkpoint is not None


def test_a_checkpoint_is_registered_once_every_file_of_its_manifest_is_there(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit())
    whole = step_prefix(run.run_id, 1, 1)
    manifest = json.loads(stage.services.objects.read(whole + "manifest.json") or b"{}")
    later = step_prefix(run.run_id, 1, 9)
    with stage.held_back("checkpoints"):
        etag = stage.put(later + "manifest.json", json.dumps(manifest | {"step": 9}))
        stage.peek("checkpoints")
        stage.client("sqs").purge_queue(QueueUrl=stage.queue_url("checkpoints"))
        event = stage.object_event(later + "manifest.json", etag)
        assert stage.deliver("on_checkpoint", event) == ["m-1"]
        stage.put(later + "weights.bin", b"too short")
        assert stage.deliver("on_checkpoint", event) == ["m-1"]
        assert [each.step for each in stage.services.runs.checkpoints(run.run_id)] == [1]
        stage.put(later + "weights.bin", b"x" * 64)  # as long as it should be
        assert stage.deliver("on_checkpoint", event) == ["m-1"]
        assert [each.step for each in stage.services.runs.checkpoints(run.run_id)] == [1]
        stage.put(later + "weights.bin", bytes([1]) * 64)
        assert stage.deliver("on_checkpoint", event, event) == []
    registered = stage.services.runs.checkpoints(run.run_id)
    assert [(each.step, each.bytes, each.hashed_bytes) for each in registered] == [(1, 64, 64), (9, 64, 64)]


def test_the_hash_of_what_is_too_large_to_read_is_the_one_that_s3_keeps_if_it_keeps_one(stage: StageUnderTest) -> None:
    objects, s3 = stage.services.objects, stage.client("s3")
    body, key = b"weights" * 1000, f"tests/{hex8()}.bin"
    s3.put_object(Bucket=objects.bucket, Key=key, Body=body, ChecksumAlgorithm="SHA256")
    assert objects.stored_sha256_of(key) == objects.sha256_of(key) == hashlib.sha256(body).hexdigest()
    s3.put_object(Bucket=objects.bucket, Key=key, Body=body, ChecksumAlgorithm="CRC32")
    assert objects.stored_sha256_of(key) is None
    parts = s3.create_multipart_upload(Bucket=objects.bucket, Key=key, ChecksumAlgorithm="SHA256")
    name = {"Bucket": objects.bucket, "Key": key, "UploadId": parts["UploadId"]}
    part = s3.upload_part(**name, PartNumber=1, Body=body, ChecksumAlgorithm="SHA256")
    done = {"PartNumber": 1, "ETag": part["ETag"], "ChecksumSHA256": part["ChecksumSHA256"]}
    s3.complete_multipart_upload(**name, MultipartUpload={"Parts": [done]})
    assert objects.stored_sha256_of(key) is None  # a hash of the parts' hashes is not the file's
    s3.delete_object(Bucket=objects.bucket, Key=key)
    assert objects.sha256_of(key) is None


def test_a_manifest_that_speaks_of_another_checkpoint_is_not_registered(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit())
    body = stage.services.objects.read(step_prefix(run.run_id, 1, 1) + "manifest.json") or b""
    key = step_prefix(run.run_id, 1, 7) + "manifest.json"
    with stage.held_back("checkpoints"):
        event = stage.object_event(key, stage.put(key, body))
        stage.peek("checkpoints")
        stage.client("sqs").purge_queue(QueueUrl=stage.queue_url("checkpoints"))
        assert stage.deliver("on_checkpoint", event) == []
    assert "another checkpoint" in stage.events(run.run_id, "checkpoint_refused")[-1]
    assert [each.step for each in stage.services.runs.checkpoints(run.run_id)] == [1]


# -- the functions themselves ------------------------------------------------------------------------------------------


def test_importing_all_handlers_leaves_the_heavy_packages_out() -> None:
    heavy = ("torch", "transformers", "aws_cdk", "microtuning_sdk", "microtuning_local", "training_container")
    modules = ", ".join(f"functions.{name}" for name in HANDLERS)
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("name", HANDLERS)
def test_the_environment_of_a_deployed_function_is_what_its_code_reads(stage: StageUnderTest, name: str) -> None:
    function = stage.client("lambda").get_function_configuration(FunctionName=stage.names.function(name))
    variables = function["Environment"]["Variables"]
    read = Environment.model_validate(variables)
    assert (read.names, read.max_running_runs) == (stage.names, 4)
    assert variables["POWERTOOLS_SERVICE_NAME"] == name
    assert function["Handler"] == f"functions.{name}.handler"


def test_a_name_of_a_job_is_no_longer_than_sagemaker_takes(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit(name="a name with many words that goes on and on for ever"))
    assert run.attempts[0].job_name == job_name("local", run.run_id, 1)
    assert len(run.attempts[0].job_name) <= 62


def test_jobs_of_this_stage_that_nobody_wants_are_stopped_and_those_of_others_never(stage: StageUnderTest) -> None:
    wanted = stage.submit("hang")
    training = stage.training(wanted).attempts[0].job_name
    forgotten, lost, theirs = (
        job_name("local", new_run_id("default", "forgotten", datetime.now(UTC), hex8()), 1),
        job_name("local", wanted, 7),
        job_name("prod", new_run_id("default", "elsewhere", datetime.now(UTC), hex8()), 1),
    )
    names = [forgotten, lost, theirs, f"somebody-{hex8()}", f"local-model-{hex8()}"]
    for name in names:
        stage.copy_of_job(training, name)
    local.tick()
    for name in (forgotten, lost):
        assert stage.until(lambda name=name: stage.job(name).status != "InProgress", name)
    assert {stage.job(name).status for name in [*names[2:], training]} == {"InProgress"}
    for name in names[2:]:
        stage.client("sagemaker").stop_training_job(TrainingJobName=name)
        assert stage.until(lambda name=name: stage.job(name).is_terminal, name)
    stage.cancel(wanted)
    assert stage.ended(wanted).status == "stopped"
