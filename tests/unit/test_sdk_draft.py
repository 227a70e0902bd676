"""From a trainer's settings or a spec file to a valid spec: what is checked, what would be uploaded, what is refused."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber

from microtuning_core.domain.algorithms import (
    DistillationSettings,
    DpoSettings,
    EnvironmentSpec,
    GrpoSettings,
    KtoSettings,
    OrpoSettings,
    RewardModelSettings,
    RewardSpec,
    ScriptSettings,
    SftSettings,
)
from microtuning_core.domain.errors import InvalidCode, InvalidData, InvalidSpec
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.spec import ModelSpec, RunSpec
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.spec_files import read_spec_text
from microtuning_sdk import RLTrainer, ScriptTrainer, SFTTrainer, Stage
from microtuning_sdk._draft import draft
from microtuning_sdk._settings import (
    ENVIRONMENT_FIELDS,
    MODEL_FIELDS,
    REWARD_FIELDS,
    RUN_FIELDS,
    DPOSettings,
    KTOSettings,
    ModelSettings,
    ORPOSettings,
    RewardSettings,
    RLSettings,
    RunSettings,
)
from microtuning_sdk._settings import (
    DistillationSettings as DistillationKeywords,
)
from microtuning_sdk.cli._run import read_draft

CASES = Path(__file__).parents[1] / "cases"
BUCKET = "microtuning-local-000000000000-us-east-1"
ROWS = [{"prompt": "ba>", "answer": "ab"}, {"prompt": "dc>", "answer": "cd"}]


@pytest.fixture
def stage() -> Stage:
    """A stage that is never asked: whatever is checked here needs no network."""
    return Stage(StackNames("local", "000000000000", "us-east-1"), boto3.Session(region_name="us-east-1"))


def reward(completions: list[str], answer: list[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def an_rl_trainer(stage: Stage, **settings: Any) -> RLTrainer:
    return RLTrainer(**({"model_arch": "Transformer", "reward_func": reward, "stage": stage} | settings))


def fields_of(refused: pytest.ExceptionInfo[InvalidSpec]) -> list[str]:
    return [problem.field for problem in refused.value.problems]


def test_a_trainers_settings_become_the_spec_a_person_would_write(stage: Stage) -> None:
    trainer = an_rl_trainer(
        stage, env_config={"max_steps": 1}, group_size=4, seed=3, name="sort digits", success_at=0.5
    )
    spec = trainer.check(ROWS, ROWS[:1], epochs=2, batch_size=8, max_steps=10)
    assert spec.algorithm == GrpoSettings(group_size=4, epochs=2, batch_size=8, max_train_steps=10)
    assert (spec.name, spec.seed, spec.environment.max_steps, spec.reward and spec.reward.success_at) == (
        "sort digits", 3, 1, 0.5,
    )  # fmt: skip
    assert spec.data.train.startswith(f"s3://{BUCKET}/tenants/default/datasets/")
    assert spec.data.train.endswith("/rows.jsonl")
    assert spec.code is not None
    assert spec.code.uri == f"s3://{BUCKET}/tenants/default/code/{spec.code.sha256}/code.zip"


def test_the_spec_file_that_is_uploaded_reads_back_as_the_same_spec(stage: Stage) -> None:
    trainer = an_rl_trainer(stage, warm_start={"data": [{"prompt": "b", "completion": "a"}], "steps": 5})
    document, lines = read_spec_text(trainer.spec(ROWS))
    assert parse_spec(document, lines) == trainer.check(ROWS)
    assert document["algorithm"]["warm_start"]["data"].endswith("/rows.jsonl")


def test_what_is_uploaded_is_named_by_its_content_and_named_once(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    document = {"name": "x", "model": {"arch": "Transformer"}, "algorithm": {"type": "script", "entry": "t.py"}}
    (tmp_path / "t.py").write_text("print(1)\n")
    first = draft(stage, document | {"data": {"train": "train.jsonl"}}, folder=tmp_path)
    again = draft(stage, document | {"data": {"train": tmp_path / "train.jsonl"}}, folder=tmp_path)
    assert [each.key for each in first.parcels] == [each.key for each in again.parcels]
    assert [each.key.rsplit("/", 1)[-1] for each in first.parcels] == ["code.zip", "train.jsonl"]


def test_a_misspelt_setting_is_refused_by_name_before_any_data_is_read(stage: Stage) -> None:
    with pytest.raises(InvalidSpec) as refused:
        an_rl_trainer(stage, groupsize=4, compute={"instanc": "auto"}).check("no-such-file.jsonl")
    assert sorted(fields_of(refused)) == ["algorithm.groupsize", "compute.instanc"]


def test_more_than_one_turn_is_refused_where_it_was_written(stage: Stage) -> None:
    with pytest.raises(InvalidSpec) as refused:
        an_rl_trainer(stage, env_config={"max_steps": 3}).check(ROWS)
    assert fields_of(refused) == ["environment.max_steps"]


def test_environment_variables_are_refused_by_name_and_no_value_is_ever_shown(stage: Stage) -> None:
    variables = json.loads((CASES / "c49_env.json").read_text("utf-8"))
    with pytest.raises(InvalidSpec) as refused:
        SFTTrainer("Transformer", stage=stage, environment_variables=variables).check([{"text": "a"}])
    assert fields_of(refused) == [f"environment_variables.{name}" for name in variables if name != "SHORT"]
    assert variables[list(variables)[-1]] not in str(refused.value)


def test_a_secrets_value_that_is_no_text_is_not_shown_either(stage: Stage) -> None:
    with pytest.raises(InvalidSpec) as refused:
        SFTTrainer("Transformer", stage=stage, environment_variables={"HF_TOKEN": 90817263}).check([{"text": "a"}])  # type: ignore[dict-item]
    assert "90817263" not in str(refused.value)


def test_hyperparameters_keep_every_value_and_type(stage: Stage) -> None:
    given = json.loads((CASES / "c49_hparams.json").read_text("utf-8"))
    given |= {f"key{i}": i for i in range(101)}
    trainer = ScriptTrainer(CASES / "seed_script.py", hyperparameters=given, stage=stage)
    document, _ = read_spec_text(trainer.spec([{"text": "a"}]))
    spec = parse_spec(document)
    assert isinstance(spec.algorithm, ScriptSettings)
    assert spec.algorithm.entry == "seed_script.py"
    assert json.dumps(spec.algorithm.hyperparameters) == json.dumps(given)


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [("c05_empty.jsonl", None, "0 usable rows"), ("c05_only_newlines.jsonl", None, "0 usable rows"),
     ("c07_mixed_shapes.jsonl", 1, "no chat template")],
)  # fmt: skip
def test_data_that_cannot_be_used_is_refused_with_file_and_line(
    stage: Stage, file: str, line: int | None, words: str
) -> None:
    with pytest.raises(InvalidData, match=words) as refused:
        SFTTrainer("Transformer", stage=stage).check(CASES / file)
    assert refused.value.file.endswith(file)
    assert line is None or refused.value.line is not None


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [(b'{"text": "a"}\n{"text": \n', 2, "not valid JSON"), (b'{"text": "a"}\n{"text": "\xff"}\n', 2, "not UTF-8")],
)
def test_a_malformed_line_is_refused_with_its_number(
    stage: Stage, tmp_path: Path, content: bytes, line: int, words: str
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(InvalidData, match=words) as refused:
        SFTTrainer("Transformer", stage=stage).check(tmp_path / "bad.jsonl")
    assert refused.value.line == line


def test_byte_order_marks_blank_lines_and_crlf_change_no_row(stage: Stage) -> None:
    for file in ("c01_bom.jsonl", "c01_nobom.jsonl", "c03_crlf_blank.jsonl"):
        assert SFTTrainer("Transformer", stage=stage).check(CASES / file).data.train.endswith(f"/{file}")


def test_a_folder_gives_its_nested_and_packed_parts_and_no_markers(stage: Stage) -> None:
    document = {
        "name": "x", "model": {"arch": "Transformer"}, "algorithm": {"type": "sft"},
        "data": {"train": str(CASES / "c09_folder" / "train")},
    }  # fmt: skip
    ready = draft(stage, document)
    paths = [each.key.split("/", 4)[-1] for each in ready.parcels]
    assert paths == ["a/part-000.jsonl", "b/part-001.jsonl.gz"]
    assert ready.spec.data.train.endswith("/")
    rows = [row for each in ready.parcels for row in _plain(each.content).splitlines()]  # type: ignore[arg-type]
    assert len(rows) == 3


def _plain(content: bytes) -> bytes:
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def test_rows_that_are_no_json_are_refused_with_their_number(stage: Stage) -> None:
    with pytest.raises(InvalidData, match="line 2"):
        SFTTrainer("Transformer", stage=stage).check([{"text": "a"}, {"text": {1, 2}}])


def test_rows_may_come_from_a_generator(stage: Stage) -> None:
    trainer = an_rl_trainer(stage, warm_start={"data": ({"text": t} for t in "ab"), "steps": 1})
    assert trainer.check(row for row in ROWS).algorithm.type == "grpo"


def test_a_file_that_is_no_json_lines_is_refused_but_a_script_may_read_it(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidData, match=r"not a \.jsonl or \.jsonl\.gz file"):
        SFTTrainer("Transformer", stage=stage).check(tmp_path / "train.csv")
    spec = ScriptTrainer(CASES / "seed_script.py", stage=stage).check(tmp_path / "train.csv")
    assert spec.data.train.endswith("/train.csv")


def test_a_local_model_is_uploaded_under_its_hash_and_its_size_is_read_from_its_config(
    stage: Stage, tmp_path: Path
) -> None:
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128_000, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    spec = SFTTrainer(model=tmp_path, stage=stage).check([{"text": "a"}])
    assert spec.model.base is not None
    assert spec.model.base.startswith(f"s3://{BUCKET}/tenants/default/models/base/")
    with pytest.raises(InvalidSpec, match="GiB") as refused:
        SFTTrainer(model=tmp_path, adapter="none", stage=stage).check([{"text": "a"}])
    assert fields_of(refused) == ["compute"]


def test_a_folder_without_a_model_is_refused(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"no config\.json"):
        SFTTrainer(model=str(tmp_path), stage=stage).check([{"text": "a"}])


@pytest.mark.parametrize("config", [b"{bad", b"[]", b"", b"null", b"3", b"\xff", b"[" * 100_000])
def test_a_broken_config_is_refused_before_anything_is_uploaded(stage: Stage, tmp_path: Path, config: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(InvalidSpec, match=r"its config\.json is not") as refused:
        SFTTrainer(model=tmp_path, stage=stage).check([{"text": "a"}])
    assert fields_of(refused) == ["model.base"]


@pytest.mark.parametrize("code", ["NoSuchBucket", "AccessDenied"])
@pytest.mark.parametrize("operation", ["get_object", "list_objects_v2", "head_object"])
def test_a_model_in_s3_that_cannot_be_read_is_named(stage: Stage, operation: str, code: str) -> None:
    with Stubber(stage.s3) as answers:
        if operation != "get_object":
            body = StreamingBody(io.BytesIO(b"{}"), 2)
            answers.add_response("get_object", {"Body": body, "ETag": '"x"'})
        if operation == "head_object":
            answers.add_response("list_objects_v2", {"Contents": [{"Key": "m/config.json", "Size": 2}]})
        answers.add_client_error(operation, code)
        with pytest.raises(InvalidData, match=rf"^s3://nobucket-xyz/m/: cannot be read \({code}\)\. Check its address"):
            SFTTrainer(model="s3://nobucket-xyz/m/", stage=stage).check([{"text": "a"}])


def test_the_home_of_nobody_is_a_path_that_is_not_there(stage: Stage) -> None:
    nobody = "~no-such-user/x.jsonl"
    with pytest.raises(InvalidData, match="no such file"):
        SFTTrainer("Transformer", stage=stage).check(nobody)
    with pytest.raises(InvalidSpec, match=r"no config\.json"):
        SFTTrainer(model=nobody, stage=stage).check([{"text": "a"}])
    with pytest.raises(InvalidCode, match="no such file"):
        ScriptTrainer(nobody, stage=stage).check([{"text": "a"}])


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "an object, which JSON does not have"),
        (b"x", "a bytes, which JSON does not have"),
        (Path("x"), "PosixPath, which JSON does not have"),
        ({1, 2}, "a set; give a list"),
        ((1, 2), "a tuple; give a list"),
        (float("nan"), "not a finite number"),
        (float("-inf"), "not a finite number"),
        pytest.param(10**5000, "too many digits", id="digits"),
        (ENDLESS, "nested too deeply"),
        ({1: "x"}, "a name that is no text"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_hyperparameter_that_is_no_json_is_refused_by_name_wherever_it_lies(
    stage: Stage, value: object, words: str
) -> None:
    for given in (value, [value], {"inner": [1, {"deep": value}]}):
        trainer = ScriptTrainer(CASES / "seed_script.py", hyperparameters={"good": [1], "rate": given}, stage=stage)
        with pytest.raises(InvalidSpec, match=words) as refused:
            trainer.check([{"text": "a"}])
        assert fields_of(refused)[0].startswith("algorithm.hyperparameters.rate")


@pytest.mark.parametrize("given", [[1], 3, "x", {1: 2}])
def test_settings_of_another_kind_are_refused_by_name(stage: Stage, given: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"algorithm\.hyperparameters"):
        ScriptTrainer(CASES / "seed_script.py", hyperparameters=given, stage=stage).check([{"text": "a"}])
    with pytest.raises(InvalidSpec, match="environment"):
        an_rl_trainer(stage, env_config=given).check(ROWS)


def test_a_budget_that_buys_nothing_is_refused(stage: Stage) -> None:
    with pytest.raises(InvalidSpec, match="budget is"):
        SFTTrainer("Transformer", stage=stage, budget_usd=0.0001).check([{"text": "a"}])


def test_paths_in_a_spec_file_start_from_its_own_folder(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "my_rewards.py").write_text("def exact(completions): return [0.0 for _ in completions]\n")
    (tmp_path / "spec.yaml").write_text(
        "name: x\nmodel: {arch: Transformer}\nalgorithm: {type: grpo}\n"
        'reward: {entry: "my_rewards:exact"}\ndata: {train: rows.jsonl}\n'
    )
    ready = read_draft(stage, tmp_path / "spec.yaml")
    assert [each.key.rsplit("/", 1)[-1] for each in ready.parcels] == ["code.zip", "rows.jsonl"]
    assert ready.spec.code is not None
    assert ready.spec.code.entry == "my_rewards:exact"


def test_a_spec_file_may_name_a_folder_of_code(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print(1)\n")
    (tmp_path / "src" / "settings.toml").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "spec.json").write_text(
        json.dumps(
            {"name": "x", "model": {"arch": "Transformer"}, "algorithm": {"type": "script", "entry": "train.py"},
             "code": "src", "data": {"train": "rows.jsonl"}}
        )
    )  # fmt: skip
    ready = read_draft(stage, tmp_path / "spec.json")
    content = ready.parcels[0].content
    assert isinstance(content, bytes)
    assert sorted(zipfile.ZipFile(io.BytesIO(content)).namelist()) == ["code.json", "settings.toml", "train.py"]


def test_a_spec_file_is_refused_by_field_and_line(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(
        "name: x\nmodel: {arch: Transformer}\nalgorithm:\n  type: sft\n  epochs: 0\ndata: {train: rows.jsonl}\n"
    )
    with pytest.raises(InvalidSpec) as refused:
        read_draft(stage, tmp_path / "spec.yaml")
    assert [(problem.field, problem.line) for problem in refused.value.problems] == [("algorithm.epochs", 5)]


def test_every_setting_of_the_spec_can_be_given_to_a_trainer() -> None:
    run_fields = set(RunSpec.model_fields) - {
        "schema_version", "model", "algorithm", "reward", "loss", "environment", "data", "code",
    }  # fmt: skip
    assert set(RunSettings.__annotations__) - {"stage"} == run_fields == RUN_FIELDS
    assert set(ModelSpec.model_fields) - {"arch", "base"} == MODEL_FIELDS
    assert set(REWARD_FIELDS.values()) == set(RewardSpec.model_fields) - {"entry", "base", "parts", "judge"}
    assert set(EnvironmentSpec.model_fields) - {"entry", "options"} == ENVIRONMENT_FIELDS


@pytest.mark.parametrize(
    ("keywords", "settings"),
    [
        (ModelSettings, SftSettings),
        (DPOSettings, DpoSettings),
        (KTOSettings, KtoSettings),
        (ORPOSettings, OrpoSettings),
        (RewardSettings, RewardModelSettings),
        (RLSettings, GrpoSettings),
        (DistillationKeywords, DistillationSettings),
    ],
)
def test_every_setting_of_an_algorithm_is_a_keyword_of_its_trainer(keywords: Any, settings: Any) -> None:
    named_elsewhere = {"type", "epochs", "batch_size", "max_train_steps", "loss", "teacher"}
    own = set(keywords.__annotations__) - set(RunSettings.__annotations__) - MODEL_FIELDS - set(REWARD_FIELDS)
    assert own == set(settings.model_fields) - named_elsewhere
