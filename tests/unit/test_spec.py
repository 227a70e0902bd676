"""The run spec: vetted defaults, unknown fields refused, every problem at once by field and line."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.algorithms import ALGORITHMS
from microtuning_core.domain.errors import InvalidSpec
from microtuning_core.domain.spec import RunSpec, foreign_locations, locations
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.usecases.plan import frozen_sources

CASES = Path(__file__).parents[1] / "cases"
DATA = "s3://bucket/tenants/default/datasets/x/train.jsonl"
CODE = {"uri": "s3://bucket/tenants/default/code/x/code.zip", "sha256": "0" * 64}


def a_document(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "sort digits",
        "model": {"arch": "Transformer"},
        "algorithm": {"type": "grpo"},
        "reward": {"entry": "rewards:exact"},
        "data": {"train": DATA},
        "code": CODE,
    }
    return document | changes


def problems_of(document: Any, lines: dict[str, int] | None = None) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as raised:
        parse_spec(document, lines)
    return {problem.field: problem.message for problem in raised.value.problems}


def test_a_spec_of_six_lines_is_complete():
    spec = parse_spec(a_document())
    assert (spec.tenant, spec.seed, spec.checkpoint.keep, spec.model.effective_adapter) == ("default", 0, 2, "none")


def test_a_base_model_trains_an_adapter_unless_told_otherwise():
    assert parse_spec(a_document(model={"base": "Qwen/Qwen3-0.6B"})).model.effective_adapter == "lora"


@pytest.mark.parametrize(
    "entry",
    ["reasoning_gym:leg_counting", "arn:aws:lambda:us-east-1:123456789012:function:grade", "https://grader.example/v1",
     "model:s3://bucket/tenants/default/runs/r/m/"],
)  # fmt: skip
def test_a_reward_that_lies_elsewhere_needs_no_code(entry):
    assert parse_spec(a_document(reward={"entry": entry}, code=None)).reward.named_parts["reward"].entry == entry


def test_a_reward_model_and_a_teacher_are_among_what_the_job_reads():
    model, teacher = f"{DATA[:-11]}m/", f"{DATA[:-11]}t/"
    parts = {"good": {"entry": f"model:{model}", "weight": 2}, "short": {"entry": "rewards:short", "weight": 0}}
    assert ("reward.parts.good.entry", model) in locations(parse_spec(a_document(reward={"parts": parts})))
    distilled = a_document(algorithm={"type": "distillation", "teacher": {"base": teacher}}, reward=None)
    assert ("algorithm.teacher.base", teacher) in locations(parse_spec(distilled))


def test_the_base_of_a_reward_models_adapter_is_read_by_the_job_and_gives_the_size():
    model, base = f"{DATA[:-11]}m/", f"{DATA[:-11]}b/"
    alone = parse_spec(a_document(reward={"entry": f"model:{model}", "base": base}))
    assert {("reward.entry", model), ("reward.base", base)} <= set(locations(alone))
    parts = {"good": {"entry": f"model:{model}", "base": base}, "whole": {"entry": f"model:{model}w/"}}
    several = parse_spec(a_document(reward={"parts": parts}))
    assert ("reward.parts.good.base", base) in locations(several)
    assert frozen_sources(several) == [base, f"{model}w/"]


def test_a_base_without_a_reward_model_and_settings_beside_parts_are_refused():
    with pytest.raises(InvalidSpec, match="`base` is of a reward model's adapter"):
        parse_spec(a_document(reward={"entry": "rewards:exact", "base": f"{DATA[:-11]}b/"}))
    with pytest.raises(InvalidSpec, match="belong to a part"):
        parse_spec(a_document(reward={"parts": {"a": {"entry": "rewards:exact"}}, "base": f"{DATA[:-11]}b/"}))


def test_every_problem_is_reported_by_field_and_by_the_nearest_line():
    document = a_document(
        algorithm={"type": "grpo", "batch_size": 10, "group_size": 4, "lerning_rate": 1}, data={"train": "s3://b/../x"}
    )
    lines = {"": 1, "algorithm": 4, "algorithm.lerning_rate": 7, "data": 9, "data.train": 10}
    with pytest.raises(InvalidSpec) as raised:
        parse_spec(document, lines)
    found = {problem.field: problem.line for problem in raised.value.problems}
    assert found == {"algorithm.lerning_rate": 7, "data.train": 10}


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model": {}}, "model", "exactly one of arch"),
        ({"model": {"arch": "Transformer", "base": "x"}}, "model", "exactly one of arch"),
        ({"model": {"base": "/home/me/model"}}, "model.base", "fit\\(\\) uploads a local directory"),
        ({"model": {"arch": "Transformer", "adapter": "qlora"}}, "model.adapter", "nothing to adapt"),
        ({"algorithm": {"type": "grpo", "batch_size": 10, "group_size": 4}}, "algorithm", "multiple of group_size"),
        ({"algorithm": {"type": "magic"}}, "algorithm", "one of sft, dpo, kto"),
        ({"algorithm": {}}, "algorithm", "needs a type"),
        ({"compute": {"spot": "maybe"}}, "compute.spot", "auto"),
        ({"compute": {"fallbacks": ["ml.x", "ml.y"]}}, "compute", "ml.x, ml.y"),
        ({"compute": 3}, "compute", "mapping"),
        ({"reward": None}, "reward", "needs a reward"),
        ({"code": None}, "code", "reward.entry is code of yours"),
        ({"environment": {"max_steps": 3}}, "environment.max_steps", "one turn"),
        ({"environment": {"entry": "games:Guess"}}, "environment.entry", "multi_turn does"),
        ({"algorithm": {"type": "multi_turn"}}, "environment.entry", "needs an environment"),
        ({"algorithm": {"type": "sft"}}, "reward", "learns from its rows"),
        ({"algorithm": {"type": "reward"}, "reward": None, "loss": {"entry": "a:b"}}, "loss", "takes no loss of yours"),
        ({"algorithm": {"type": "custom", "entry": "a:b"}, "reward": None, "code": None}, "code", "algorithm.entry"),
        (
            {"algorithm": {"type": "dpo", "reference": "adapter_off"}, "reward": None},
            "algorithm.reference",
            "no adapter",
        ),
        ({"algorithm": {"type": "dpo", "loss": "ipo", "label_smoothing": 0.1}, "reward": None}, "algorithm", "sigmoid"),
        ({"algorithm": {"type": "distillation"}, "reward": None}, "algorithm.teacher", "is missing"),
        ({"model": {"arch": "Transformer", "merge": True}}, "model.merge", "none is trained"),
        (
            {"model": {"base": "a/b", "adapter": "qlora"}, "compute": {"instance": "ml.m5.large"}},
            "model.adapter",
            "no GPU",
        ),
        ({"model": {"base": "a/b", "adapter": "qlora", "merge": True}}, "model.merge", "not merged"),
        ({"compute": {"processes": 4, "instance": "ml.m5.large"}}, "compute.processes", "room for 2"),
        (
            {"compute": {"processes": 16}, "algorithm": {"type": "sft", "batch_size": 8}, "reward": None},
            "compute.processes",
            "a batch of 8",
        ),
        ({"algorithm": {"type": "grpo", "kl_coef": 0.1}}, "algorithm.kl_coef", "random weights"),
        ({"algorithm": {"type": "grpo", "max_completion_tokens": 1024}}, "algorithm", "no room for a prompt"),
        ({"algorithm": {"type": "grpo", "overlong_penalty_tokens": 65}}, "algorithm", "cannot be more"),
        (
            {"algorithm": {"type": "kto", "desirable_weight": 0, "undesirable_weight": 0}, "reward": None},
            "algorithm",
            "both 0",
        ),
        ({"reward": {}}, "reward", "exactly one of entry"),
        ({"reward": {"entry": "judge"}}, "reward", "go together"),
        ({"reward": {"parts": {"a": {"entry": "nonsense"}}}}, "reward.parts.a.entry", "match pattern"),
        ({"compute": {"instance": "ml.g5.tiny"}}, "compute", "not in the catalog"),
        ({"compute": {"count": 2}}, "compute.count", "less than or equal to 1"),
        ({"name": "  "}, "name", "run name"),
        ({"tenant": "Acme"}, "tenant", "tenant"),
        ({"budget_usd": "0"}, "budget_usd", "greater than 0"),
        ({"colour": "red"}, "colour", "is no field of a spec"),
        ({"data": {}}, "data.train", "is missing"),
    ],
)
def test_a_request_that_can_never_work_names_its_field(changes, field, says):
    found = problems_of(a_document(**changes))
    assert list(found) == [field]
    assert re.search(says, found[field])


def test_a_document_that_is_no_mapping_is_refused():
    assert problems_of(["name"]) == {"spec": "a spec is a mapping of fields to values"}


def test_what_the_service_will_not_take_as_environment_is_refused_by_name_and_secrets_stay_unprinted():
    variables = json.loads((CASES / "c49_env.json").read_text())
    with pytest.raises(InvalidSpec) as raised:
        parse_spec(a_document(environment_variables=variables))
    fields = {problem.field for problem in raised.value.problems}
    assert fields == {f"environment_variables.{name}" for name in ("TOO_LONG", "bad-name", "HF_TOKEN")}
    assert variables["HF_TOKEN"] not in str(raised.value)


def test_more_than_a_hundred_environment_variables_are_refused():
    found = problems_of(a_document(environment_variables={f"V{i}": "x" for i in range(101)}))
    assert found == {"environment_variables": "at most 100 are possible"}


def test_long_and_many_hyperparameters_are_accepted_and_keep_their_types():
    settings = json.loads((CASES / "c49_hparams.json").read_text()) | {f"k{i}": i for i in range(101)}
    algorithm = {"type": "script", "entry": "train.py", "hyperparameters": settings}
    spec = parse_spec(a_document(algorithm=algorithm, reward=None))
    assert json.loads(spec.model_dump_json())["algorithm"]["hyperparameters"] == settings


def test_the_json_of_a_spec_reads_back_as_the_same_spec_with_the_same_hash():
    spec = parse_spec(a_document(budget_usd="1.50", algorithm={"type": "sft"}, reward=None))
    again = parse_spec(json.loads(spec.model_dump_json()))
    assert again == spec and again.sha256 == spec.sha256 and again.budget_usd == Decimal("1.50")


@given(st.sampled_from(["x", "y"]), st.integers(0, 100))
def test_specs_that_differ_have_different_hashes(name, seed):
    spec, other = parse_spec(a_document(name=name, seed=seed)), parse_spec(a_document(name=name, seed=seed + 1))
    assert spec.sha256 != other.sha256


def test_data_outside_the_own_prefix_is_named_field_by_field():
    warm = {"data": "s3://bucket/tenants/other/x.jsonl", "steps": 1}
    spec = parse_spec(
        a_document(algorithm={"type": "grpo", "warm_start": warm}, data={"train": DATA, "eval": "s3://mine/e"})
    )
    assert [problem.field for problem in foreign_locations(spec, "bucket")] == [
        "data.eval",
        "algorithm.warm_start.data",
    ]
    assert [field for field, _ in locations(spec)] == [
        "data.train",
        "data.eval",
        "code.uri",
        "algorithm.warm_start.data",
    ]


def test_the_algorithms_listed_are_the_members_of_the_union():
    tags = {
        member["properties"]["type"]["const"]
        for name, member in RunSpec.model_json_schema()["$defs"].items()
        if name.endswith("Settings")
    }
    assert tags == set(ALGORITHMS)


NUMBERS = ["model.alpha", "algorithm.learning_rate", "algorithm.max_grad_norm", "algorithm.weight_decay",
           "algorithm.temperature", "reward.time_limit_s", "reward.success_at"]  # fmt: skip


def with_value(path: str, value: Any) -> dict[str, Any]:
    document = a_document()
    part, field = path.split(".")
    return document | {part: document[part] | {field: value}}


@pytest.mark.parametrize("path", NUMBERS)
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 1e999])
def test_a_number_that_json_does_not_have_is_refused_wherever_it_stands(path, number):
    """It would be stored as null: unreadable, or read back as "the default"."""
    assert path in problems_of(with_value(path, number))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a\ud800"},
        {"environment_variables": {"A": "\ud800"}},
        {"environment_variables": {"A": "a\0b"}},
        {
            "algorithm": {"type": "script", "entry": "a.py", "hyperparameters": {"deep": [{"x": float("inf")}]}},
            "reward": None,
        },
        {"algorithm": {"type": "script", "entry": "a.py", "hyperparameters": {"x\0": 1}}, "reward": None},
    ],
)
def test_text_and_numbers_that_cannot_be_stored_are_refused_by_field(changes):
    (field,) = problems_of(a_document(**changes))
    assert field.split(".")[0] == next(iter(changes))


def test_a_spec_that_a_record_cannot_hold_is_refused_with_its_size():
    algorithm = {"type": "script", "entry": "train.py", "hyperparameters": {"big": "x" * 600_000}}
    assert "200,000 bytes" in problems_of(a_document(algorithm=algorithm, reward=None))["spec"]


def test_a_secret_and_a_bad_name_are_reported_beside_a_bad_field():
    found = problems_of(a_document(name="", tenant="Bad", seed=-1, environment_variables={"HF_TOKEN": "x"}))
    assert set(found) == {"name", "tenant", "seed", "environment_variables.HF_TOKEN"}


@given(
    st.builds(
        a_document,
        seed=st.integers(0, 2**31 - 1),
        name=st.text(min_size=1, max_size=40),
        budget_usd=st.none() | st.decimals("0.01", "1000", places=2).map(str),
        reward=st.builds(
            dict, entry=st.just("rewards:exact"), success_at=st.floats(allow_nan=False, allow_infinity=False)
        ),
    )
)
def test_whatever_is_accepted_reads_back_as_the_same_spec(document):
    try:
        spec = parse_spec(document)
    except InvalidSpec:
        return
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_fast_recovery_on_spot_is_refused_by_its_field_and_on_auto_taken():
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(a_document(compute={"recovery": "fast", "spot": True}), {"compute.recovery": 7})
    (problem,) = refused.value.problems
    assert (problem.field, problem.line) == ("compute.recovery", 7)
    assert "leave spot at auto" in problem.message
    for spot in ("auto", False):
        assert parse_spec(a_document(compute={"recovery": "fast", "spot": spot})).compute.recovery == "fast"
