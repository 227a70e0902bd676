"""Whole runs on the local cloud: how they start, end, fail and come back. Their container is done in a moment."""

from __future__ import annotations

import json
import math
import threading
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.aws.admissions import AdmissionStore
from microtuning_core.domain.catalog import find
from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.layout import checkpoints_prefix
from microtuning_core.domain.quota import Limits
from microtuning_core.domain.run import RunStatus
from microtuning_local import cloud as local
from microtuning_local.sagemaker.jobs import SPOT_BILLED_FRACTION

if TYPE_CHECKING:
    from tests.integration.conftest import StageUnderTest

pytestmark = pytest.mark.cloud

SLOTS = 4  # of the local stage


# -- how a run starts --------------------------------------------------------------------------------------------------


def test_an_upload_starts_one_run_that_ends_as_a_registered_model(stage: StageUnderTest) -> None:
    before = set(stage.executions())
    run_id = stage.submit("succeed", name=f"hello {uuid.uuid4().hex[:6]}")
    run = stage.ended_and_paid(run_id)
    assert (run.status, run.reason, [each.outcome for each in run.attempts]) == ("completed", None, ["completed"])
    assert set(stage.executions()) - before == {run_id}
    assert stage.execution_ended(run_id)["status"] == "SUCCEEDED"
    assert run.model_version == f"{run_id.split('-', 1)[1].rsplit('-', 1)[0]}/v1"
    assert run.metrics.last == {"loss": 2.0}
    stage.until(lambda: run_id not in stage.services.admissions.slots().held, "the slot was not given back")
    stage.until(lambda: not stage.waiting(run_id), "a token was left")
    assert stage.services.runs.mirrored_revision(run_id) == run.revision


def test_a_spec_in_plain_yaml_is_the_same_run(stage: StageUnderTest) -> None:
    uri = stage.data_uri()
    text = f"""\
name: from yaml
model: {{arch: Transformer}}
algorithm: {{type: sft, max_train_steps: 1}}
data:
  train: {uri}
compute: {{instance: ml.m5.large, spot: false}}
"""
    run = stage.ended(stage.receipt(*stage.upload(text))["run_id"])
    assert (run.status, run.spec.algorithm.max_train_steps, run.model_version) == ("completed", 1, None)
    assert any("data.eval" in told for told in stage.events(run.run_id, "model_not_registered"))


def test_every_error_of_a_spec_is_named_by_field_and_line_and_nothing_starts(stage: StageUnderTest) -> None:
    text = """\
name: wrong in five ways
model:
  arch: Transformer
  colour: red
algorithm:
  type: sft
  epochs: 0
data: {train: /home/me/rows.jsonl}
compute:
  instance: ml.no.such
"""
    before = set(stage.executions())
    errors = stage.receipt(*stage.upload(text))["errors"]
    named = {(error["field"], error["line"]) for error in errors}
    assert named >= {("model.colour", 4), ("algorithm.epochs", 7), ("data.train", 8)}
    assert any(field.startswith("compute") and line in (9, 10) for field, line in named)
    assert set(stage.executions()) == before


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"tenant": "other"}, "tenant", "'other'"),
        ({"data": {"train": "s3://elsewhere/rows.jsonl"}}, "data.train", "outside s3://"),
        ({"data": {"train": "{own}datasets/none.jsonl"}}, "data.train", "nothing at"),
        ({"data": {"train": "{own}datasets/bad.jsonl"}}, "data.train", "bad.jsonl, line 2"),
        ({"budget_usd": "0.000001", "algorithm": {"type": "sft", "max_train_steps": 5}}, "compute", "budget"),
    ],
)
def test_what_only_the_stage_can_judge_is_refused_by_field(
    stage: StageUnderTest, changes: dict[str, Any], field: str, words: str
) -> None:
    own = f"s3://{stage.names.bucket}/tenants/default/"
    stage.put("tenants/default/datasets/bad.jsonl", '{"prompt": "1", "completion": "1"}\n{"prompt": "1",\n')
    spec = json.loads(json.dumps(stage.spec(**changes)).replace("{own}", own))
    errors = stage.receipt(*stage.upload(spec))["errors"]
    assert errors[0]["field"] == field
    assert words in errors[0]["message"]


def test_text_that_is_no_spec_is_answered_with_its_line(stage: StageUnderTest) -> None:
    errors = stage.receipt(*stage.upload("name: x\nmodel: [unclosed\n"))["errors"]
    assert (len(errors), errors[0]["line"] in (2, 3)) == (1, True)


def test_an_upload_that_is_announced_twice_starts_one_run(stage: StageUnderTest) -> None:
    before = set(stage.executions())
    with stage.held_back("specs"):
        upload = stage.upload(stage.spec("succeed"))
        announced = stage.peek("specs")
        stage.send("specs", announced)
    run_id = stage.receipt(*upload)["run_id"]
    stage.send("specs", announced)
    run = stage.ended(run_id)
    stage.drained("specs")
    assert set(stage.executions()) - before == {run_id}
    assert stage.receipt(*upload) == {"etag": upload[1], "run_id": run_id}
    assert len(run.attempts) == 1


def test_start_execution_with_a_tenant_and_a_spec_runs_it(stage: StageUnderTest) -> None:
    name = stage.start_by_hand({"tenant": "default", "spec": stage.spec("succeed", name="by hand")})
    told = stage.execution_ended(name)
    assert told["status"] == "SUCCEEDED"
    run = stage.run(json.loads(told["output"])["run_id"])
    assert (run.status, run.execution, run.name) == ("completed", name, "by hand")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"tenant": "default", "spec": {"name": "x"}}, "model"),
        ({"tenant": "Not A Tenant", "spec": {}}, "Not A Tenant"),
        ({"spec": {"name": "x"}}, '{"tenant": …'),
        ({"run_id": "default-nobody-000000000000"}, "no run"),
        ({"run_id": "nonsense"}, "not a valid run id"),
        ({"run_id": 7}, "not a valid run id"),
        ([], '{"tenant": …'),
        ({"tenant": 7, "spec": "text"}, "not a valid tenant"),
    ],
)
def test_a_bad_start_execution_fails_at_once_and_says_why(stage: StageUnderTest, state: Any, words: str) -> None:
    told = stage.execution_ended(stage.start_by_hand(state))
    assert told["status"] == "FAILED"
    assert words in json.dumps(json.loads(told["cause"]), ensure_ascii=False).replace('\\"', '"')


# -- how a job that fails ends its run, or does not --------------------------------------------------------------------


def test_an_error_of_the_user_fails_the_run_at_once_with_file_and_line(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit("user_error"))
    assert (run.status, len(run.attempts)) == ("failed", 1)
    assert run.failure is not None
    assert (run.failure.failure_class, run.failure.file, run.failure.line) == ("user", "rewards.py", 12)
    assert run.reason == "ZeroDivisionError: division by zero"
    assert stage.execution_ended(run.run_id)["status"] == "FAILED"


def test_a_lost_host_is_made_good_by_a_second_attempt_from_the_last_checkpoint(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit("platform_once"))
    assert (run.status, [each.outcome for each in run.attempts]) == ("completed", ["failed", "completed"])
    assert [each.checkpoint_step for each in run.attempts] == [2, 3]
    (step,) = [line for line in map(json.loads, stage.job_log(run.attempts[1].job_name)) if line["event"] == "metrics"]
    assert (step["from_step"], step["step"], step["attempt"]) == (2, 3, 2)


def test_bad_numerics_begin_a_second_lineage_at_the_last_checkpoint(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit("numerics_once"))
    assert (run.status, [each.lineage for each in run.attempts]) == ("completed", [1, 2])
    assert run.resume_from is not None
    assert (run.resume_from.lineage, run.resume_from.step) == (1, 2)
    assert stage.keys(checkpoints_prefix(run.run_id, 2) + "step-3/manifest.json")


def test_a_run_out_of_memory_goes_on_on_a_larger_machine(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit("memory_once", compute={"instance": "auto"}))
    first, second = [find(each.plan.instance_type).memory_for_training_gib for each in run.attempts]
    assert (run.status, second > first) == ("completed", True)


def test_three_billed_attempts_without_a_checkpoint_end_the_run(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit("platform_always"))
    assert (run.status, len(run.attempts)) == ("failed", 3)
    assert "3 billed attempts in a row made no newer checkpoint" in (run.reason or "")


def test_a_model_without_its_evaluation_is_not_registered(stage: StageUnderTest) -> None:
    run = stage.ended(stage.submit("unevaluated"))
    assert (run.status, run.model_version) == ("failed", None)
    assert "no eval_loss_before, eval_loss_after" in (run.reason or "")


def test_a_launch_that_can_never_succeed_ends_the_run_with_its_reason(stage: StageUnderTest, faults: Any) -> None:
    faults({"refuse_creates": {"code": "ValidationException", "count": 1, "message": "No such subnet: subnet-1"}})
    run = stage.ended(stage.submit())
    assert (run.status, len(run.attempts), run.attempts[0].billed_s) == ("failed", 1, 0)
    assert run.reason == "No such subnet: subnet-1"
    assert run.failure is not None
    assert run.failure.failure_class == FailureClass.USER


def test_a_throttled_launch_returns_to_its_queue_and_uses_up_no_attempt(stage: StageUnderTest, faults: Any) -> None:
    faults({"refuse_creates": {"code": "ThrottlingException", "count": 2}})  # as often as boto3 tries here
    with stage.quick_retries("launches"):
        run = stage.ended(stage.submit())
    assert (run.status, len(run.attempts)) == ("completed", 1)
    assert any("Rate exceeded" in told for told in stage.events(run.run_id, "handler_error"))


def test_a_quota_that_is_used_up_moves_the_run_to_another_type(stage: StageUnderTest, faults: Any) -> None:
    faults({"refuse_creates": {"code": "ResourceLimitExceeded", "count": 1}})
    run = stage.ended(stage.submit(compute={"fallbacks": ["ml.m5.xlarge"]}))
    assert [each.plan.instance_type for each in run.attempts] == ["ml.m5.large", "ml.m5.xlarge"]
    assert (run.status, run.attempts[0].billed_s) == ("completed", 0)
    assert run.attempts[0].failure is not None
    assert "Service Quotas" in run.attempts[0].failure.message


def test_a_run_without_capacity_anywhere_waits_and_gives_its_slot_back(stage: StageUnderTest, faults: Any) -> None:
    faults({"capacity": {"ml.m5.large": 0}})
    run_id = stage.submit()
    run = stage.when(run_id, lambda run: run.status == RunStatus.QUEUED and run.not_before)
    assert run.not_before is not None
    assert (run.reason or "").startswith("CapacityError")
    stage.until(lambda: [each.state for each in stage.waiting(run_id)] == ["admit"], "Admit run waits again")
    assert run_id not in stage.services.admissions.slots().held
    stage.cancel(run_id)
    run = stage.ended(run_id)
    assert (run.status, run.reason) == ("stopped", "cancelled by its user")
    assert stage.execution_ended(run_id)["status"] == "SUCCEEDED"


def test_max_runtime_stops_the_run_keeps_its_cost_and_frees_its_slot(stage: StageUnderTest) -> None:
    with stage.held_back("launches"):
        run_id = stage.submit("hang")
        stage.when(run_id, lambda run: run.attempts)
        one_second = {"max_runtime_s": 1}  # a spec asks for 300 s at least
        stage.services.runs.update(
            run_id, lambda run: run.with_current(plan=run.attempts[0].plan.model_copy(update=one_second))
        )
    run = stage.ended_and_paid(run_id)
    assert run.status == "stopped"
    assert "MaxRuntimeExceeded" in (run.reason or "")
    assert run.cost_usd is not None
    assert run.cost_usd > 0
    assert run.attempts[0].checkpoint_step == 2
    stage.until(lambda: run_id not in stage.services.admissions.slots().held, "the slot was not given back")


def test_a_spot_machine_that_is_taken_back_is_a_recovery_of_the_same_attempt(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang_until_restored", compute={"spot": True})
    job = stage.training(run_id).attempts[0].job_name
    # Seconds are whole: of one of them nothing could be saved.
    stage.until(lambda: (stage.job(job).training_s or 0) >= 2, "the job has not held its machine for over a second")
    local.reclaim(job)
    run = stage.ended_and_paid(run_id)
    assert (run.status, len(run.attempts), run.attempts[0].plan.spot) == ("completed", 1, True)
    (recovery,) = run.attempts[0].recoveries
    assert (recovery.cause, recovery.provision_ms is not None) == ("interrupted", True)
    billed_s, training_s = run.attempts[0].billed_s or 0, run.attempts[0].training_s or 0
    assert billed_s == math.ceil(training_s * SPOT_BILLED_FRACTION) < training_s


# -- cancel ------------------------------------------------------------------------------------------------------------


def test_cancel_stops_a_training_job_after_its_checkpoint(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang")
    job = stage.training(run_id).attempts[0].job_name
    stage.cancel(run_id)
    stage.cancel(run_id)
    run = stage.ended_and_paid(run_id)
    assert (run.status, run.reason, run.attempts[0].outcome) == ("stopped", "cancelled by its user", "stopped")
    assert (stage.job(job).status, run.attempts[0].checkpoint_step) == ("Stopped", 2)
    assert stage.execution_ended(run_id)["status"] == "SUCCEEDED"


def test_cancel_ends_a_queued_run_that_never_had_a_job(stage: StageUnderTest) -> None:
    running = [stage.submit("hang", name=f"busy {n}") for n in range(SLOTS)]
    waiting = stage.submit("succeed", name="waits")
    stage.when(waiting, lambda run: run.status == RunStatus.QUEUED)
    stage.cancel(waiting)
    run = stage.ended(waiting)
    assert (run.status, run.attempts) == ("stopped", ())
    for run_id in running:
        stage.cancel(run_id)
    assert {stage.ended(run_id).status for run_id in running} == {"stopped"}


def test_cancel_of_a_finished_run_changes_nothing(stage: StageUnderTest) -> None:
    run = stage.ended_and_paid(stage.submit())
    stage.cancel(run.run_id)
    stage.until(lambda: stage.events(run.run_id, "command"), "the command was not heard")
    stage.drained("commands")
    assert stage.run(run.run_id) == run


# -- slots -------------------------------------------------------------------------------------------------------------


def test_twenty_submits_against_four_slots_never_hold_five_and_all_end(stage: StageUnderTest) -> None:
    held: list[int] = []
    over = threading.Event()

    def look() -> None:
        admissions = stage.services.admissions
        while not over.is_set():
            held.append(len(admissions.slots().held))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        uploads = [stage.upload(stage.spec("succeed", name=f"racing {n}")) for n in range(20)]
        runs = [stage.ended(stage.receipt(*upload)["run_id"], timeout_s=120) for upload in uploads]
    finally:
        over.set()
        watcher.join()
    assert [stage.story(run.run_id) for run in runs if run.status != "completed"] == []
    assert max(held) <= SLOTS
    stage.until(lambda: not stage.services.admissions.slots().held, "a slot was not given back")


def test_twenty_racing_threads_are_given_exactly_five_slots(stage: StageUnderTest, own_admissions: Any) -> None:
    now, gate = datetime.now(UTC), threading.Barrier(20)
    got: list[str] = []
    run_ids = [f"acme-run-{n:012d}" for n in range(20)]
    for run_id in run_ids:
        own_admissions.wait(run_id, "acme", now)

    def race() -> None:
        gate.wait()
        got.extend(own_admissions.grant(Limits(5), now).run_ids)

    threads = [threading.Thread(target=race) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(set(got)), set(own_admissions.slots().held)) == (5, 5, set(got))
    own_admissions.wait(got[0], "acme", now)  # delivered again
    assert own_admissions.grant(Limits(5), now).run_ids == []
    assert len(own_admissions.slots().held) == 5


def test_what_a_run_had_before_it_was_taken_up_again_is_given_back_and_what_it_has_since_stays(
    stage: StageUnderTest, own_admissions: Any
) -> None:
    now = datetime.now(UTC)
    for life in (1, 0):  # the message of its earlier life comes late
        own_admissions.wait("acme-sort-0a1b2c3d4e5f", "acme", now, life=life)
    own_admissions.forget("acme-sort-0a1b2c3d4e5f", 0)
    assert own_admissions.grant(Limits(1), now).run_ids == ["acme-sort-0a1b2c3d4e5f"]
    own_admissions.forget("acme-sort-0a1b2c3d4e5f", 0)
    assert own_admissions.slots().lives == {"acme-sort-0a1b2c3d4e5f": 1}
    own_admissions.forget("acme-sort-0a1b2c3d4e5f", 1)
    assert own_admissions.slots().held == {}


def test_slots_of_before_lives_were_counted_are_read_and_given_back(stage: StageUnderTest) -> None:
    old = {"pk": {"S": "STAGE"}, "sk": {"S": "SLOTS"}, "revision": {"N": "7"}}
    held = {"acme-sort-0a1b2c3d4e5f": {"S": "acme"}, "acme-sort-0a1b2c3d4e60": {"S": "acme"}}
    with stage.a_table() as table:
        stage.client("dynamodb").put_item(TableName=table, Item=old | {"held": {"M": held}})
        waiting = {"tenant": {"S": "acme"}, "since": {"S": "2026-01-02T03:04:05+00:00"}}
        entry = {"pk": {"S": "STAGE"}, "sk": {"S": "WAIT#acme-sort-0a1b2c3d4e61"}}
        stage.client("dynamodb").put_item(TableName=table, Item=entry | waiting)
        admissions = AdmissionStore(stage.client("dynamodb"), table)
        admissions.forget("acme-sort-0a1b2c3d4e5f", 0)
        assert admissions.grant(Limits(2), datetime.now(UTC)).run_ids == ["acme-sort-0a1b2c3d4e61"]
        assert {each.tenant for each in admissions.slots().held.values()} == {"acme"}
        admissions.release("acme-sort-0a1b2c3d4e60", 3)
        assert set(admissions.slots().held) == {"acme-sort-0a1b2c3d4e61"}


# -- executions that die -----------------------------------------------------------------------------------------------


def test_an_execution_stopped_in_the_console_is_taken_up_again_and_completes(stage: StageUnderTest) -> None:
    with stage.held_back("training-events"):  # the end of the job is still unknown when the execution dies
        run_id = stage.submit()
        job = stage.when(run_id, lambda run: run.attempts and run.attempts[0].launched_at).attempts[0].job_name
        stage.until(lambda: stage.has_ended(job), "the job has not ended")
        stage.client("stepfunctions").stop_execution(executionArn=stage.names.execution_arn(run_id))
        run = stage.ended(run_id)
    assert (run.status, run.execution, len(run.attempts)) == ("completed", f"{run_id}-e2", 1)
    assert stage.execution_ended(run.execution)["status"] == "SUCCEEDED"
    assert stage.execution(run_id)["status"] == "ABORTED"


def test_a_job_stopped_in_the_console_stops_its_run_also_after_the_execution_was_stopped(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang_once")
    job = stage.training(run_id).attempts[0].job_name
    stage.client("stepfunctions").stop_execution(executionArn=stage.names.execution_arn(run_id))
    run = stage.when(run_id, lambda run: run.executions == 2)
    assert run.execution == f"{run_id}-e2"
    stage.until(lambda: any(w.state == "train" for w in stage.waiting(run_id, run.execution)), "-e2 waits in Train")
    stage.client("sagemaker").stop_training_job(TrainingJobName=job)  # by a person, not by us: the run is stopped
    run = stage.ended(run_id)
    assert (run.status, len(run.attempts), run.reason) == ("stopped", 1, "the job was stopped")
    assert stage.execution_ended(f"{run_id}-e2")["status"] == "SUCCEEDED"


def test_a_cloud_that_goes_down_in_mid_run_takes_the_run_up_again(stage: StageUnderTest) -> None:
    run_id = stage.submit("hang_once")
    stage.training(run_id)
    local.down()
    local.up()
    run = stage.ended(run_id)
    assert (run.status, run.execution) == ("completed", f"{run_id}-e2")
    assert [each.outcome for each in run.attempts] == ["failed", "completed"]
    assert stage.execution_ended(f"{run_id}-e2")["status"] == "SUCCEEDED"
    assert stage.execution(run_id)["status"] == "FAILED"


# -- grants and dead letters -------------------------------------------------------------------------------------------


def test_without_the_grant_to_write_its_config_the_run_fails_with_that_grant_named(stage: StageUnderTest) -> None:
    with stage.without_grant(stage.role_of("plan_attempt"), "WriteConfig"):
        run = stage.ended(stage.submit())
    assert run.status == "failed"
    assert "s3:PutObject" in (run.reason or "")
    assert "plan-attempt is not authorized" in (run.reason or "")


def test_without_the_grant_to_the_slots_the_dead_letter_ends_the_run_with_the_last_error(
    stage: StageUnderTest,
) -> None:
    with stage.quick_retries("admissions"), stage.without_grant(stage.role_of("admit_run"), "Tenants"):
        run = stage.ended(stage.submit())
    assert run.status == "failed"
    assert (run.reason or "").startswith("admissions gave up after several deliveries: microtuning-local-admit-run: ")
    assert "dynamodb:" in (run.reason or "")
    assert stage.execution_ended(run.run_id)["status"] == "FAILED"


def test_a_job_that_may_not_write_its_checkpoints_fails_with_that_grant_named(stage: StageUnderTest) -> None:
    with stage.without_grant(stage.names.job_role_arn("default"), "Write"):
        run = stage.ended(stage.submit())
    assert run.status == "failed"
    assert "Checkpoint upload failed" in (run.reason or "")
    assert "s3:PutObject" in (run.reason or "")
