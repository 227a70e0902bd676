"""What an upload may name, judged by the stage as fit() judges it on the user's machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import StageUnderTest

pytestmark = pytest.mark.cloud

FOLDER = "tenants/default/datasets/uploads/"


def uri(stage: StageUnderTest, file: str, body: str | bytes) -> str:
    stage.put(FOLDER + file, body)
    return f"s3://{stage.names.bucket}/{FOLDER}{file}"


def errors(stage: StageUnderTest, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The receipt's errors by field."""
    return {each["field"]: each for each in stage.receipt(*stage.upload(spec))["errors"]}


def script(stage: StageUnderTest, **changes: Any) -> dict[str, Any]:
    code = {"uri": uri(stage, "code.zip", b"PK"), "sha256": "0" * 64}
    return stage.spec(code=code, **changes)


def test_a_script_reads_files_of_any_kind(stage: StageUnderTest) -> None:
    spec = script(
        stage, algorithm={"type": "script", "entry": "train.py"}, data={"train": uri(stage, "t.csv", "a,b\n")}
    )
    run_id = stage.receipt(*stage.upload(spec))["run_id"]
    assert stage.ended(run_id).status == "completed", stage.story(run_id)


def test_hyperparameters_that_the_service_will_not_take_reach_the_job_by_file(stage: StageUnderTest) -> None:
    settings = {"text": "two\nlines", "long": "x" * 3000, "list": [1, 2.5], "plain": 7} | {
        f"k{i}": i for i in range(101)
    }
    algorithm = {"type": "script", "entry": "train.py", "hyperparameters": settings}
    run_id = stage.receipt(*stage.upload(script(stage, algorithm=algorithm, data={"train": stage.data_uri()})))[
        "run_id"
    ]
    run = stage.ended(run_id)
    assert run.status == "completed", stage.story(run_id)
    written = stage.services.objects.read_json(f"tenants/default/runs/{run_id}/config/a001/hyperparameters.json")
    assert written == settings


def test_one_file_that_is_not_jsonl_is_refused_by_name(stage: StageUnderTest) -> None:
    found = errors(stage, stage.spec(data={"train": uri(stage, "rows.json", '{"prompt": "a", "completion": "b"}\n')}))
    assert "rows.json: is not a .jsonl or .jsonl.gz file" in found["data.train"]["message"]


def test_a_bad_row_deep_in_a_folder_is_named_by_its_path_and_line(stage: StageUnderTest) -> None:
    uri(stage, "deep/a/part-000.jsonl", '{"prompt": "a", "completion": "b"}\n')
    uri(stage, "deep/b/part-000.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": 1}\n')
    found = errors(stage, stage.spec(data={"train": f"s3://{stage.names.bucket}/{FOLDER}deep/"}))
    assert found["data.train"]["message"].startswith("b/part-000.jsonl, line 2:")


def test_what_the_stage_finds_is_reported_at_once_and_with_the_lines_of_the_file(stage: StageUnderTest) -> None:
    missing = f"s3://{stage.names.bucket}/{FOLDER}nothing.jsonl"
    spec = stage.spec(data={"train": uri(stage, "empty.jsonl", ""), "eval": missing})
    lines = json.dumps(spec, indent=1).splitlines()
    found = errors(stage, spec)
    assert "0 usable rows" in found["data.train"]["message"] and "nothing at" in found["data.eval"]["message"]
    assert all(f'"{field.split(".")[1]}"' in lines[found[field]["line"] - 1] for field in ("data.train", "data.eval"))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("algorithm: {type: sft, weight_decay: 1e999}", "algorithm.weight_decay"),
        ("algorithm: {type: sft, learning_rate: 1e999}", "algorithm.learning_rate"),
        ("seed: " + "1" * 5000, "spec"),
        ('environment_variables: {A: "a\\0b"}', "environment_variables.A"),
        ('name: "\\ud800"', "name"),
    ],
)
def test_what_cannot_be_stored_is_answered_at_once_and_starts_nothing(
    line: str, field: str, stage: StageUnderTest
) -> None:
    kept = {name: value for name, value in stage.spec().items() if name != line.split(":")[0]}
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in kept.items()) + line + "\n"
    before = len(stage.executions())
    receipt = stage.receipt(*stage.upload(text))
    assert field in [each["field"] for each in receipt["errors"]], receipt
    assert len(stage.executions()) == before


@pytest.mark.parametrize(
    ("config", "field"), [("{bad", "model.base"), ("[]", "compute.instance"), ("\xff", "model.base")]
)
def test_a_model_whose_config_cannot_be_read_is_refused_by_field(
    config: str, field: str, stage: StageUnderTest
) -> None:
    stage.put(f"{FOLDER}model/config.json", config.encode("latin-1"))
    model = {"base": f"s3://{stage.names.bucket}/{FOLDER}model/"}
    found = errors(stage, stage.spec(model=model, compute={"instance": "auto"}))
    assert field in found
