"""Uploading is enough: a spec put by any S3 client starts the same run; and so does Start execution."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.layout import dataset_key, receipt_key, spec_key
from microtuning_core.spec_files import dump_spec_text
from microtuning_sdk import Run, Stage

from .conftest import PATIENCE_S, sort_rows, wait_until

if TYPE_CHECKING:
    import pytest


def put_rows(stage: Stage, count: int) -> str:
    key = dataset_key("default", f"upload-{uuid.uuid4().hex[:8]}", "rows.jsonl")
    stage.s3.put_object(
        Bucket=stage.bucket, Key=key, Body="".join(json.dumps(row) + "\n" for row in sort_rows(count)).encode()
    )
    return f"s3://{stage.bucket}/{key}"


def a_spec(rows: str, **changed: Any) -> dict[str, Any]:
    return {
        "name": "by upload", "model": {"arch": "Transformer"}, "algorithm": {"type": "sft", "batch_size": 8},
        "data": {"train": rows, "eval": rows},
    } | changed  # fmt: skip


def upload(stage: Stage, text: str) -> tuple[str, dict[str, Any]]:
    """Puts the spec; its etag and its receipt."""
    file = f"{uuid.uuid4().hex}.yaml"
    etag = stage.s3.put_object(Bucket=stage.bucket, Key=spec_key("default", file), Body=text.encode())["ETag"].strip(
        '"'
    )
    return etag, wait_until(lambda: stage.objects.read_json(receipt_key("default", file)), "receipt")


def test_an_uploaded_spec_starts_a_run_and_the_receipt_names_it(stage: Stage) -> None:
    etag, receipt = upload(stage, dump_spec_text(a_spec(put_rows(stage, 16))))
    assert receipt.keys() == {"etag", "run_id"}
    assert receipt["etag"] == etag
    run = Run(receipt["run_id"], stage)
    assert run.wait(PATIENCE_S).status == "completed"
    assert run.execution_arn.endswith(f":{run.run_id}")


def test_a_bad_upload_is_answered_by_field_and_line_and_starts_nothing(stage: Stage) -> None:
    before = {run.run_id for run in stage.runs.list_runs("default")}
    text = (
        "name: bad\nmodel: {arch: Transformer}\nalgorithm:\n  type: sft\n  epochs: 0\n"
        "data:\n  train: s3://elsewhere/rows.jsonl\nunknown: 1\n"
    )
    _, receipt = upload(stage, text)
    assert receipt.keys() == {"etag", "errors"}
    assert sorted((each["field"], each["line"]) for each in receipt["errors"]) == [
        ("algorithm.epochs", 5),
        ("unknown", 8),
    ]
    assert {run.run_id for run in stage.runs.list_runs("default")} == before


def test_an_upload_that_names_empty_data_is_refused_by_its_field(stage: Stage) -> None:
    key = dataset_key("default", "upload-empty", "rows.jsonl")
    stage.s3.put_object(Bucket=stage.bucket, Key=key, Body=b"\n\n")
    _, receipt = upload(stage, dump_spec_text(a_spec(f"s3://{stage.bucket}/{key}")))
    assert {each["field"] for each in receipt["errors"]} == {"data.train", "data.eval"}
    assert "0 usable rows" in receipt["errors"][0]["message"]


def test_start_execution_with_tenant_and_spec_starts_a_run(stage: Stage) -> None:
    before = {run.run_id for run in stage.runs.list_runs("default")}
    document = {"tenant": "default", "spec": a_spec(put_rows(stage, 16), name="by console")}
    stage.session.client("stepfunctions").start_execution(
        stateMachineArn=stage.names.state_machine_arn, input=json.dumps(document)
    )
    new = wait_until(lambda: {run.run_id for run in stage.runs.list_runs("default")} - before, "run")
    assert Run(new.pop(), stage).wait(PATIENCE_S).status == "completed"


def test_a_run_by_the_command_line_from_a_file_with_local_paths(
    stage: Stage, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from microtuning_sdk import cli

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sort_rows(16)))
    (tmp_path / "spec.yaml").write_text(dump_spec_text(a_spec("rows.jsonl", name="by command")))
    assert cli.main(["check", str(tmp_path / "spec.yaml"), "--stage", "local"]) == 0
    assert "would upload" in capsys.readouterr().out
    assert cli.main(["run", str(tmp_path / "spec.yaml"), "--stage", "local"]) == 0
    printed = capsys.readouterr()
    assert Run(printed.out.strip(), stage).status == "completed"
    assert "completed" in printed.err
