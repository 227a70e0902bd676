"""Use cases beside other writers: stores in memory, one of which is always a step ahead."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from microtuning_core.aws.objects import ObjectStore, Stored
from microtuning_core.aws.runs import Checkpoint
from microtuning_core.domain.errors import NotYetWhole, StaleRevision
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.layout import CheckpointKey, step_prefix
from microtuning_core.domain.names import StackNames, parse_job_name
from microtuning_core.domain.run import Attempt, CheckpointRef, Metered, Run, RunStatus, new_run
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.usecases import checkpoint
from microtuning_core.usecases.checkpoint import prune
from microtuning_core.usecases.closing import error_text
from microtuning_core.usecases.costing import record_cost
from microtuning_core.usecases.dead_letters import bury
from microtuning_core.usecases.plan import plan_attempt
from microtuning_core.usecases.reconciling import stop_orphans
from microtuning_core.usecases.services import Services, StageSettings
from tests.unit.records import a_cpu_plan

RUN_ID = "acme-sort-0a1b2c3d4e5f"
JOB = f"prod-{RUN_ID}-a001"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
NAMES = StackNames("prod", "123456789012", "us-east-1")
SPEC = parse_spec(
    {
        "name": "sort",
        "tenant": "acme",
        "model": {"arch": "Transformer"},
        "algorithm": {"type": "sft"},
        "data": {"train": f"s3://{NAMES.bucket}/tenants/acme/datasets/x.jsonl"},
        "checkpoint": {"keep": 2},
    }
)


@dataclass
class Runs:
    """The run store in memory. `others` write once each, always just before we do."""

    run: Run
    others: list[Callable[[Run], Run]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def get(self, _: str) -> Run:
        return self.run

    def find(self, run_id: str) -> Run | None:
        return self.run if run_id == self.run.run_id else None

    def put(self, run: Run, now: datetime | None = None) -> Run:
        if self.others:
            self.run = self.others.pop(0)(self.run).with_(revision=self.run.revision + 1)
        if run.revision != self.run.revision:
            raise StaleRevision(run.run_id, run.revision)
        self.run = run.with_(revision=run.revision + 1)
        return self.run

    def update(self, run_id: str, change: Callable[[Run], Run]) -> Run:
        changed = change(self.run)
        return self.run if changed == self.run else self.put(changed)

    def note(self, _: str, kind: str, message: str, **data: Any) -> None:
        self.notes.append((kind, message))

    def events(self, _: str) -> list[dict[str, Any]]:
        return [{"kind": kind, "message": message} for kind, message in self.notes]

    def checkpoints(self, _: str) -> list[Checkpoint]:
        return [Checkpoint(1, step, "", True, {}, "") for step in sorted(self.steps)]

    def delete_checkpoint(self, _: str, lineage: int, step: int) -> None:
        self.steps.remove(step)


@dataclass
class Objects:
    bodies: dict[str, bytes] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)

    def put(self, key: str, body: bytes) -> None:
        self.bodies[key] = body

    def put_json(self, key: str, document: Any) -> None:
        self.put(key, json.dumps(document).encode())

    def read(self, key: str, *, at_most: int | None = None) -> bytes | None:
        return self.bodies.get(key)

    def read_json(self, key: str) -> Any:
        return json.loads(self.bodies[key]) if key in self.bodies else None

    def walk(self, prefix: str) -> list[Stored]:
        assert prefix.endswith("/")
        return [Stored(key, len(body)) for key, body in self.bodies.items() if key.startswith(prefix)]

    def delete(self, keys: list[str]) -> None:
        self.deleted += keys
        for key in keys:
            self.bodies.pop(key, None)


@dataclass
class Executions:
    failed: list[tuple[str, str]] = field(default_factory=list)

    def fail(self, token: str, error: str, cause: str) -> None:
        self.failed.append((token, cause))


def services(run: Run, **stores: Any) -> Any:
    defaults = {"admissions": SimpleNamespace(limit_changes=dict)}
    made = Services(None, StageSettings(NAMES, "image:1", 1))  # type: ignore[arg-type]  # of a session only stores are made
    ports = {"runs": Runs(run), "objects": Objects(), "executions": Executions()}
    vars(made).update(ports | defaults | stores)
    return made


def run(**changes: Any) -> Run:
    return new_run(RUN_ID, SPEC, NOW).with_(**changes)


def attempt(**changes: Any) -> Attempt:
    plan = a_cpu_plan()
    facts = {"job_name": JOB, "lineage": 1, "plan": plan, "created_at": NOW, "launched_at": NOW}
    return Attempt(attempt=1, **(facts | changes))


# -- planning ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_again_when_costs_or_progress_were_written_meanwhile():
    stage = services(run(status=RunStatus.PLANNING))
    stage.runs.others = [lambda run: run.with_(cost_usd=(run.cost_usd or Decimal(0)) + 1)] * 2
    planned = plan_attempt(stage, RUN_ID)
    assert (planned.status, len(planned.attempts), planned.cost_usd) == (RunStatus.TRAINING, 1, Decimal(2))
    assert [kind for kind, _ in stage.runs.notes] == ["planned"]
    assert sorted(key.rsplit("/", 1)[1] for key in stage.objects.bodies) == [
        "hyperparameters.json",
        "plan.json",
        "spec.json",
    ]


def test_a_run_cancelled_while_it_is_planned_gets_no_attempt():
    stage = services(run(status=RunStatus.PLANNING))
    stage.runs.others = [lambda run: run.with_(verdict="stopped")]
    assert plan_attempt(stage, RUN_ID).attempts == ()


def test_a_plan_that_is_asked_for_twice_makes_one_attempt():
    stage = services(run(status=RunStatus.PLANNING))
    assert plan_attempt(stage, RUN_ID) == plan_attempt(stage, RUN_ID)


def test_a_run_that_others_write_to_all_the_time_gives_up_planning_with_its_revision():
    stage = services(run(status=RunStatus.PLANNING))
    stage.runs.others = [lambda run: run.with_(cost_usd=Decimal(1))] * 20
    with pytest.raises(StaleRevision):
        plan_attempt(stage, RUN_ID)


# -- costs -------------------------------------------------------------------------------------------------------------


def test_a_late_estimate_does_not_undo_what_is_final():
    still_running = JobFacts(JOB, "InProgress", "Training", NOW, started_at=NOW, instance_type="ml.m5.large")
    stage = services(
        run(attempts=(attempt(cost_state="final"),)),
        jobs=SimpleNamespace(describe=lambda _: still_running),
        ledger=SimpleNamespace(put=lambda _: False, entries=lambda *_: []),
    )
    record_cost(stage, JOB)
    assert stage.runs.run.attempts[0].cost_state == "final"


@pytest.mark.parametrize("name", [JOB.replace("a001", "a002"), JOB.replace("sort", "nobody")])
def test_a_job_that_is_no_attempt_of_a_run_costs_nobody_anything(name):
    stage = services(run(attempts=(attempt(),)), jobs=SimpleNamespace(describe=lambda _: None))
    record_cost(stage, name)
    assert stage.runs.run == run(attempts=(attempt(),))


# -- pruning -----------------------------------------------------------------------------------------------------------


def checkpointed(*steps: int, at: int | None = None) -> Any:
    stage = services(run(last_checkpoint=CheckpointRef(lineage=1, step=at) if at is not None else None))
    stage.runs.steps = list(steps)
    for step in steps:
        for file in ("a.bin", "manifest.json"):
            stage.objects.put(f"tenants/acme/runs/{RUN_ID}/checkpoints/l01/step-{step}/{file}", b"x")
    return stage


def test_the_two_newest_are_kept_and_a_manifest_goes_before_its_files():
    stage = checkpointed(1, 2, 10, 9, at=10)
    prune(stage, stage.runs.run)
    assert stage.runs.steps == [10, 9]
    files = [key.split("/l01/")[1] for key in stage.objects.deleted]
    assert files == [f"step-{step}/{file}" for step in (1, 2) for file in ("manifest.json", "a.bin")]


def test_the_checkpoint_that_a_run_is_at_is_never_pruned():
    stage = checkpointed(1, 2, 3, 4, at=1)
    prune(stage, stage.runs.run)
    assert sorted(stage.runs.steps) == [1, 3, 4]


def test_nothing_is_pruned_while_a_job_may_be_fetching_it():
    stage = checkpointed(1, 2, 3, at=3)
    stage.runs.run = stage.runs.run.with_(attempts=(attempt(outcome="failed"), attempt()))
    prune(stage, stage.runs.run)
    assert stage.runs.steps == [1, 2, 3]
    prune(stage, stage.runs.run.with_current(metered=Metered()))
    assert stage.runs.steps == [2, 3]


def test_step_1_is_not_also_step_10():
    stage = checkpointed(1, 10, 11, at=11)
    prune(stage, stage.runs.run)
    assert all("/step-1/" in key for key in stage.objects.deleted)
    assert stage.runs.steps == [10, 11]


def test_a_deletion_that_was_refused_key_by_key_is_an_error_and_not_a_success():
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    with Stubber(client) as stub:
        refused = {"Key": "k", "Code": "AccessDenied", "Message": "s3:DeleteObject is not allowed"}
        stub.add_response("delete_objects", {"Errors": [refused]})
        with pytest.raises(ClientError, match="s3:DeleteObject"):
            ObjectStore(client, "bucket").delete(["k"])


# -- what nobody could deliver, and why ---------------------------------------------------------------------------------


def test_a_dead_letter_fails_the_state_that_waits_with_the_last_error_of_its_run():
    stage = services(run())
    for message in ("first", "last"):
        stage.runs.note(RUN_ID, "handler_error", message)
    stage.runs.note(RUN_ID, "status", "later, and no error")
    bury(stage, "launches", {"token": "t", "run_id": RUN_ID})
    assert stage.executions.failed == [("t", "launches gave up after several deliveries: last")]
    assert stage.runs.run == run()  # the machine closes the run; a copy that nobody waits for must not


@pytest.mark.parametrize(
    "body", [{"token": "t"}, {"token": "t", "input": "text"}, {"token": "t", "input": {"run_id": 7}}]
)
def test_a_dead_letter_that_names_no_run_still_tells_its_state(body):
    stage = services(run())
    bury(stage, "admissions", body)
    assert [token for token, _ in stage.executions.failed] == ["t"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, None),
        ({}, None),
        ({"Error": "States.Timeout"}, "States.Timeout"),
        ({"Error": "E", "Cause": "words"}, "words"),
        ({"Error": "E", "Cause": '{"errorMessage": "no s3:PutObject", "errorType": "X"}'}, "no s3:PutObject"),
        ({"Error": "E", "Cause": '{"other": 1}'}, '{"other": 1}'),
        ({"Error": "E", "Cause": "[1]"}, "[1]"),
        ({"Cause": ""}, "a state failed without saying why"),
    ],
)
def test_the_error_of_a_state_is_one_sentence(error, text):
    assert error_text(error) == text


# -- what is whole -----------------------------------------------------------------------------------------------------


@dataclass
class HashedObjects(Objects):
    """`kept`: the hashes that S3 keeps. `read_bytes`: what was read to be hashed."""

    kept: dict[str, str] = field(default_factory=dict)
    read_bytes: int = 0

    def read(self, key: str, *, at_most: int | None = None) -> bytes | None:
        return self.bodies.get(key)

    def sha256_of(self, key: str) -> str:
        self.read_bytes += len(self.bodies[key])
        return sha256(self.bodies[key]).hexdigest()

    def stored_sha256_of(self, key: str) -> str | None:
        return self.kept.get(key)


def saved(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], **changes: bytes) -> tuple[Any, HashedObjects]:
    """A checkpoint of `files`, some of which lie there with other bytes than the manifest says; 10 bytes may be read."""
    monkeypatch.setattr(checkpoint, "HASHED_BYTES", 10)
    stage, prefix = services(run()), step_prefix(RUN_ID, 1, 4)
    stage.objects = HashedObjects()
    stage.runs.registered = []
    stage.runs.put_checkpoint = lambda manifest, hashed: stage.runs.registered.append((manifest.step, hashed))
    listed = [{"path": name, "bytes": len(body), "sha256": sha256(body).hexdigest()} for name, body in files.items()]
    document = {
        "schema_version": 1, "run_id": RUN_ID, "attempt": 1, "lineage": 1, "step": 4, "epoch": 0, "world_size": 1,
        "global_batch": 64, "spec_sha256": "0" * 64, "base_model": "T", "files": listed, "created_at": NOW.isoformat(),
    }  # fmt: skip
    for name, body in (files | changes).items():
        stage.objects.put(prefix + name, body)
    stage.objects.put_json(prefix + "manifest.json", document)
    return stage, stage.objects


HERE = CheckpointKey("acme", RUN_ID, 1, 4)


def test_small_files_are_hashed_up_to_a_limit_and_the_record_says_how_much_was(monkeypatch):
    stage, objects = saved(monkeypatch, {"large": b"x" * 11, "b": b"123456", "a": b"1234", "c": b"1234567"})
    checkpoint.register(stage, HERE)
    assert (stage.runs.registered, objects.read_bytes) == ([(4, 10)], 10)


def test_the_hash_that_s3_keeps_of_a_large_file_is_compared(monkeypatch):
    stage, objects = saved(monkeypatch, {"large": b"x" * 11})
    objects.kept = {step_prefix(RUN_ID, 1, 4) + "large": sha256(b"x" * 11).hexdigest()}
    checkpoint.register(stage, HERE)
    assert (stage.runs.registered, objects.read_bytes) == ([(4, 11)], 0)
    objects.kept = dict.fromkeys(objects.kept, "0" * 64)
    with pytest.raises(NotYetWhole, match="large is not what its manifest says"):
        checkpoint.register(stage, HERE)


def test_a_spoiled_file_of_the_right_size_is_not_registered(monkeypatch):
    stage, _ = saved(monkeypatch, {"a": b"1234"}, a=b"1235")
    with pytest.raises(NotYetWhole, match="a is not what its manifest says"):
        checkpoint.register(stage, HERE)
    assert (stage.runs.registered, stage.runs.run.last_checkpoint) == ([], None)


def a_run_of(attempts: int) -> Run:
    made = tuple(
        Attempt(attempt=number, job_name=f"prod-{RUN_ID}-a{number:03d}", lineage=1, plan=a_cpu_plan(), created_at=NOW)
        for number in range(1, attempts + 1)
    )
    return new_run(RUN_ID, SPEC, NOW).with_(attempts=made)


@pytest.mark.parametrize(
    ("in_tables", "in_s3", "is_stopped"),
    [
        (2, 2, True),  # an older job than the run's
        (0, 2, False),  # the tables are those of the last clean stop
        (None, 2, False),  # the tables are lost
        (0, 0, True),  # an attempt that nobody ever wrote down
        (None, None, True),
    ],
)
def test_a_job_is_left_alone_while_s3_remembers_more_of_its_run_than_the_tables(
    in_tables: int | None, in_s3: int | None, is_stopped: bool
) -> None:
    body = None if in_s3 is None else a_run_of(in_s3).model_dump_json().encode()
    stopped: list[str] = []
    services: Any = SimpleNamespace(
        names=NAMES,
        runs=SimpleNamespace(find=lambda _: None if in_tables is None else a_run_of(in_tables)),
        objects=SimpleNamespace(read=lambda _: body),
        jobs=SimpleNamespace(in_progress=lambda _: [parse_job_name(JOB)], stop=stopped.append),
    )
    stop_orphans(services)
    assert stopped == ([JOB] if is_stopped else [])
