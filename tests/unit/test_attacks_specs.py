"""Specs, keys and files that somebody wrote to do harm: each is refused in words that name the field, and soon."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from microtuning_core.domain.algorithms import ALGORITHMS
from microtuning_core.domain.datasets import unpacked_bytes
from microtuning_core.domain.errors import InvalidName, InvalidSpec, MicrotuningError
from microtuning_core.domain.layout import (
    belongs_to,
    parse_checkpoint_key,
    parse_command_key,
    parse_s3_uri,
    parse_spec_key,
    spec_key,
    step_of_rollout_file,
)
from microtuning_core.domain.names import check_tenant, parse_execution_name, parse_job_name, slug
from microtuning_core.domain.planning import choose_plan
from microtuning_core.domain.shapes import shape_from_config, shape_from_name
from microtuning_core.domain.spec import RunSpec, foreign_locations
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.domain.spec_dangers import is_secret_name
from microtuning_core.spec_files import read_spec_text
from microtuning_core.usecases.plan import plan_request

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "microtuning-dev-111122223333-us-east-1"
DATA = f"s3://{BUCKET}/tenants/acme/datasets/x/train.jsonl"
RUN = "acme-sort-0a1b2c3d4e5f"
HUGE = (10**4000, 2**63, 1e308, -1e308, "9" * 500, "1e400", True, [[]], {"a": 1}, "١", "0x10", "")


def a_document(kind: str = "sft", /, **changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "sort",
        "tenant": "acme",
        "model": {"arch": "Transformer"},
        "algorithm": {"type": kind},
        "data": {"train": DATA},
        "code": {"uri": f"s3://{BUCKET}/tenants/acme/code/c/code.zip", "sha256": "0" * 64},
    }
    if kind in ("grpo", "multi_turn"):
        document["reward"] = {"entry": "rewards:exact"}
    needs = {
        "multi_turn": {"environment": {"entry": "games:Game", "max_steps": 2}},
        "custom": {"algorithm": {"type": "custom", "entry": "loop:train"}},
        "script": {"algorithm": {"type": "script", "entry": "train.py"}},
        "distillation": {"algorithm": {"type": "distillation", "teacher": {"base": "gpt2"}}},
    }
    return document | needs.get(kind, {}) | changes


def problems_of(document: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(document)
    return {each.field: each.message for each in refused.value.problems}


# --- text that grows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n", "anchors and aliases"),  # a billion laughs
        ("a: *a\n", "anchors and aliases"),
        ("a: !!python/object/apply:os.system ['touch /tmp/owned']\n", "tags such as"),
        ("!!binary aGk=\n", "tags such as"),
        ("a: !include /etc/passwd\n", "tags such as"),
        ("[" * 900_000, "nested too deeply"),
        ("{a: " * 200_000, "nested too deeply"),
        ("- " * 200_000, "nested too deeply"),
        ("a: [" + "1," * 400_000 + "]", "more than 20,000 values"),
        ("\n".join(f"k{i}: 1" for i in range(60_000)), "more than 20,000 values"),
        ("a: 1" + "0" * 5000, "too many digits"),
        ("a: " + "x" * 1_000_001, "at most 1000000"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)
def test_a_file_that_grows_while_it_is_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        read_spec_text(text)
    assert words in refused.value.problems[0].message


@pytest.mark.parametrize("text", ["[" * 400_000 + "]" * 400_000, '{"a":' * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_json_that_grows_is_refused_too(text: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        read_spec_text(text, "spec.json")
    assert refused.value.problems[0].field == "spec"


def test_a_scanner_reads_no_more_of_a_deep_file_than_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML takes a minute for twenty thousand brackets: that they are too deep is known after fifty."""
    events: list[Any] = []
    parse = yaml.parse

    def counted(text: str, **options: Any) -> Iterator[Any]:
        for event in parse(text, **options):
            events.append(event)
            yield event

    monkeypatch.setattr(yaml, "parse", counted)
    with pytest.raises(InvalidSpec):
        read_spec_text("[" * 20_000)
    assert len(events) < 60


def test_a_gzip_bomb_is_counted_to_its_limit_and_no_further() -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 100_000
    assert 1_000_000 < unpacked_bytes("x.jsonl.gz", bomb, 1_000_000) < 4_000_000
    assert unpacked_bytes("x.jsonl", bomb, 10) == len(bomb)
    assert unpacked_bytes("x.jsonl.gz", bomb[:100], 1_000_000) < 50_000_000  # broken: whoever reads its rows says so


# --- numbers ---------------------------------------------------------------------------------------------------------


# A stage without a single object, as planning asks for one.
NOTHING_THERE: Any = SimpleNamespace(
    names=SimpleNamespace(bucket=BUCKET, stage="dev", region="us-east-1"),
    objects=SimpleNamespace(read=lambda _key, at_most=None: None),
)


def _paths(value: Any, before: str = "") -> list[str]:
    found = []
    for name in type(value).model_fields:
        part = getattr(value, name)
        found += [before + name, *(_paths(part, f"{before}{name}.") if hasattr(type(part), "model_fields") else [])]
    return found


def _with(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *outer, last = path.split(".")
    place = document
    for name in outer:
        place = place.setdefault(name, {})
    place[last] = value
    return document


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_value_in_any_field_does_more_than_be_refused(algorithm: str) -> None:
    """Every field of every algorithm takes its turn at each of them, up to the plan and back from its JSON."""
    refused = 0
    for path in _paths(parse_spec(a_document(algorithm))):
        for value in HUGE:
            try:
                spec = parse_spec(_with(json.loads(json.dumps(a_document(algorithm))), path, value))
                assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
                choose_plan(plan_request(NOTHING_THERE, spec), [])
            except MicrotuningError as error:
                refused += 1
                if isinstance(error, InvalidSpec):
                    assert all(each.field and len(each.message) <= 501 for each in error.problems), path
    assert refused > 100


@pytest.mark.parametrize(("field", "value"), [("seed", 10**5000), ("budget_usd", "1e400"), ("seed", "9" * 500)],
    ids=["long", "float", "text"])  # fmt: skip
def test_a_number_without_end_is_refused_by_its_field(field: str, value: Any) -> None:
    assert field in problems_of(a_document(**{field: value}))


def test_hyperparameters_take_what_64_bits_hold() -> None:
    script = {"type": "script", "entry": "train.py", "hyperparameters": {"x": 2**63 - 1}}
    parse_spec(a_document("script", algorithm=script))
    script["hyperparameters"] = {"deep": [{"x": 2**64}]}
    assert list(problems_of(a_document("script", algorithm=script))) == ["algorithm.hyperparameters.deep.0.x"]


@pytest.mark.parametrize("name", ["x-" + "9" * 400 + "b", "x-0b", "x-١٢b", "x-1e9b"])
def test_a_size_in_a_models_name_is_a_number_or_none(name: str) -> None:
    shape = shape_from_name(name)
    assert shape is None or 0 < shape.parameters <= 10**14


@pytest.mark.parametrize("value", [10**40, -1, 1.5, True, "7", None, [], {"a": 1}])
def test_a_models_config_may_hold_anything(value: Any) -> None:
    good = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    for name in good:
        assert shape_from_config(good | {name: value}) is None


# --- names and keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tenant",
    ["аcme", "acmе", "ａcme", "ACME", "acme\n", "acme\0", "ac/me", "..", "acme٠", "ac\u200bme", "a" * 17, "", "acme-x"],
)
def test_a_tenant_that_only_looks_like_one_is_refused(tenant: str) -> None:
    with pytest.raises(InvalidName):
        check_tenant(tenant)
    assert "tenant" in problems_of(a_document(tenant=tenant))
    assert parse_spec_key(f"tenants/{tenant}/specs/x.yaml") is None


@pytest.mark.parametrize("name", ["\x1b[2Jx", "a\u202eb", "a\0b", "x\r\ny", "a\u2028b", "\u2066x", "\x9b31m"])
def test_a_name_that_would_move_the_cursor_or_turn_text_around_is_refused(name: str) -> None:
    assert "name" in problems_of(a_document(name=name))


def test_a_name_may_be_in_any_script_and_its_slug_is_ascii() -> None:
    for name in ("сортировка", "数字", "é".join("abc"), "🚀 run", "../../etc/passwd"):
        assert parse_spec(a_document(name=name)).name == name
        assert slug(name).isascii()
        assert "/" not in slug(name)
        assert "." not in slug(name)


def test_digits_of_other_scripts_are_no_numbers_in_a_name() -> None:
    with pytest.raises(InvalidName):
        parse_job_name(f"dev-{RUN}-a٠٠١")
    with pytest.raises(InvalidName):
        parse_execution_name(f"{RUN}-e٢")
    folder = f"tenants/acme/runs/{RUN}/checkpoints"
    assert parse_checkpoint_key(f"{folder}/l٠١/step-٤/manifest.json") is None
    assert parse_checkpoint_key(f"{folder}/l01/step-{'9' * 400}/manifest.json") is None
    assert step_of_rollout_file("step-٤.jsonl") is None


@pytest.mark.parametrize("file", ["../x.yaml", "a/b.yaml", "..", "", "."])
def test_a_spec_file_cannot_leave_its_folder(file: str) -> None:
    with pytest.raises(InvalidName):
        spec_key("acme", file)


def test_a_command_for_another_tenants_run_is_refused() -> None:
    with pytest.raises(InvalidName):
        parse_command_key(f"tenants/globex/commands/{RUN}/x.json")


# --- places ----------------------------------------------------------------------------------------------------------

ELSEWHERE = [
    f"s3://{BUCKET}/tenants/globex/datasets/x.jsonl",
    f"s3://{BUCKET}/tenants/acmee/datasets/x.jsonl",
    f"s3://{BUCKET}/tenants/acme",
    f"s3://{BUCKET}/other/x.jsonl",
    "s3://somebody-elses-bucket/tenants/acme/x.jsonl",
    f"s3://{BUCKET}/TENANTS/acme/x.jsonl",
    f"s3://{BUCKET}/%74enants/acme/x.jsonl",
]
NOWHERE = [
    f"s3://{BUCKET}/tenants/acme/../globex/x.jsonl",
    f"s3://{BUCKET}/tenants/acme/./x.jsonl",
    f"s3://{BUCKET}//tenants/acme/x.jsonl",
    f"s3://{BUCKET}/tenants/acme//x.jsonl",
    f"s3://{BUCKET}/tenants/acme/x.jsonl#y",
    f"s3://{BUCKET}/tenants/acme/x.jsonl?versionId=1",
    f"s3://{BUCKET}/tenants/acme/\x00",
    f"s3://{BUCKET}/tenants/acme/\x7f",
    "file:///etc/passwd",
    "/etc/passwd",
    "../../etc/passwd",
    "http://169.254.169.254/latest/meta-data/",
    "S3://bucket/x",
    "s3://user:pass@bucket/x",
    "s3:///x",
]
PLACES = ("data.train", "data.eval", "code.uri", "model.base")


@pytest.mark.parametrize("uri", ELSEWHERE)
@pytest.mark.parametrize("field", PLACES)
def test_what_lies_outside_the_own_prefix_is_refused_by_field(field: str, uri: str) -> None:
    model = {"base": f"s3://{BUCKET}/tenants/acme/models/m/"}
    spec = parse_spec(_with(a_document(model=dict(model)), field, uri))
    assert field in {each.field for each in foreign_locations(spec, BUCKET)}
    assert not belongs_to(parse_s3_uri(uri), BUCKET, "acme")


@pytest.mark.parametrize("uri", NOWHERE)
@pytest.mark.parametrize("field", PLACES)
def test_what_is_no_plain_place_is_refused_by_field(field: str, uri: str) -> None:
    model = {"base": f"s3://{BUCKET}/tenants/acme/models/m/"}
    document = _with(a_document(model=dict(model)), field, uri)
    try:
        found = {each.field for each in foreign_locations(parse_spec(document), BUCKET)}
    except InvalidSpec as refused:
        found = {each.field for each in refused.problems}
    assert field in found


@pytest.mark.parametrize(
    "address",
    [
        "http://169.254.169.254/latest/meta-data/iam/",
        "http://169.254.170.2/v2/credentials/x",
        "http://2852039166/",
        "http://0xA9FEA9FE/",
        "http://0251.0376.0251.0376/",
        "http://[fd00:ec2::254]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fe80::1%25eth0]/",
        "http://metadata.google.internal./x",
        "http://①⑥⑨.254.169.254/",
    ],
)
def test_an_address_that_answers_with_credentials_is_refused(address: str) -> None:
    grpo = a_document("grpo", reward={"entry": address})
    assert "metadata" in problems_of(grpo)["reward.entry"]
    judge = {"base_url": address, "model": "m", "prompt": "{prompt}"}
    parts = {"reward": {"parts": {"j": {"entry": "judge", "judge": judge}}}}
    assert "metadata" in problems_of(a_document("grpo", **parts))["reward.parts.j.judge.base_url"]


@pytest.mark.parametrize("address", ["http://me:pw@grader.example/", "http://tok@grader.example/", "https://:99999/x"])
def test_an_address_with_a_password_or_without_a_host_is_refused_and_not_repeated(address: str) -> None:
    message = problems_of(a_document("grpo", reward={"entry": address}))["reward.entry"]
    assert "pw" not in message
    assert "tok@" not in message


@pytest.mark.parametrize("address", ["http://127.0.0.1:8080/score", "https://grader.example/v1", "http://10.0.0.7/x"])
def test_addresses_of_ones_own_are_fine(address: str) -> None:
    assert parse_spec(a_document("grpo", reward={"entry": address})).reward is not None


# --- secrets ---------------------------------------------------------------------------------------------------------

SECRET = "hunter2hunter2hunter2"


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "dbPassword", "MY_CREDENTIALS"])
def test_a_secret_in_the_environment_is_refused_by_name_and_never_repeated(name: str) -> None:
    found = problems_of(a_document(environment_variables={name: SECRET}))
    assert list(found) == [f"environment_variables.{name}"]
    assert SECRET not in str(found)


@pytest.mark.parametrize("name", ["hub_token", "apiKey", "secret", "aws_secret_access_key", "PASSWORD"])
def test_a_secret_among_hyperparameters_is_refused_by_name(name: str) -> None:
    script = {"type": "script", "entry": "train.py", "hyperparameters": {"deep": {name: SECRET}}}
    found = problems_of(a_document("script", algorithm=script))
    assert list(found) == [f"algorithm.hyperparameters.deep.{name}"]
    assert SECRET not in str(found)


@pytest.mark.parametrize(
    "value",
    [
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "hf_" + "a" * 34,
        "ghp_" + "a" * 36,
        "sk-" + "a" * 40,
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_a_value_that_is_somebodys_key_is_refused_under_any_name(value: str) -> None:
    script = {"type": "script", "entry": "train.py", "hyperparameters": {"note": value}}
    assert "algorithm.hyperparameters.note" in problems_of(a_document("script", algorithm=script))
    assert "environment_variables.NOTE" in problems_of(a_document(environment_variables={"NOTE": value}))


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "max_tokens", "pad_token", "eos_token", "max_new_tokens", "key", "keyboard", ""]
)
def test_tokens_of_text_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_the_budget_of_a_run_is_money_that_somebody_has() -> None:
    assert parse_spec(a_document(budget_usd="999999999")).budget_usd == Decimal(999_999_999)
