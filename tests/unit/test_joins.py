"""Nothing half added: what is listed in one place is there in the others."""

import re
import tomllib
from pathlib import Path

import pytest

from microtuning_core.domain.algorithms import (
    ALGORITHMS,
    LOSS_ALGORITHMS,
    CustomSettings,
    DistillationSettings,
    DpoSettings,
    GrpoSettings,
    KtoSettings,
    MultiTurnSettings,
    OrpoSettings,
    RewardModelSettings,
    ScriptSettings,
    SftSettings,
)
from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.model import EVALUATION_METRICS

ROOT = Path(__file__).parents[2]
ALGORITHMS_PAGE = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
SETTINGS = {
    "sft": SftSettings,
    "dpo": DpoSettings,
    "kto": KtoSettings,
    "orpo": OrpoSettings,
    "reward": RewardModelSettings,
    "grpo": GrpoSettings,
    "multi_turn": MultiTurnSettings,
    "distillation": DistillationSettings,
    "custom": CustomSettings,
    "script": ScriptSettings,
}


def listed_settings(text: str) -> dict[str, str]:
    """Default by setting."""
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))


def section(name: str) -> str:
    return re.split(r"^## ", ALGORITHMS_PAGE.split(f"\n## {name}\n")[1], flags=re.MULTILINE)[0]


def common_settings() -> dict[str, str]:
    return listed_settings(ALGORITHMS_PAGE.split("\n## ")[0])


def own_settings(name: str) -> dict[str, str]:
    """multi_turn has those of grpo, and its section says so."""
    return listed_settings(section("grpo" if name == "multi_turn" else name))


def test_algorithms_have_settings_a_recipe_and_a_heading():
    recipes = {path.stem for path in (ROOT / "training_container" / "recipes").glob("*.py")}
    registry = (ROOT / "training_container" / "recipes" / "__init__.py").read_text("utf-8")
    headings = re.findall(r"^## (\w+)$", ALGORITHMS_PAGE, re.MULTILINE)
    assert (
        set(headings) == set(ALGORITHMS) == set(SETTINGS) == set(re.findall(r'^    "(\w+)": "training', registry, re.M))
    )
    assert set(ALGORITHMS) <= recipes


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_an_algorithm_is_in_its_table_or_in_the_common_one(name):
    common = common_settings().keys()
    fields = set(SETTINGS[name].model_fields) - {"type"}
    assert fields - common == own_settings(name).keys()
    assert name == "script" or common <= fields


@pytest.mark.parametrize("name", ALGORITHMS)
def test_documented_defaults_are_the_real_ones(name):
    documented = common_settings() | own_settings(name)
    for field, info in SETTINGS[name].model_fields.items():
        if field != "type" and not info.is_required() and info.default not in (None, {}):
            assert documented[field] == str(info.default), field


def test_a_model_is_registered_by_the_metrics_that_its_algorithm_has():
    assert EVALUATION_METRICS.keys() == set(ALGORITHMS) - {"script"}
    for name, metrics in EVALUATION_METRICS.items():
        told = {metric.removesuffix("_before").removesuffix("_after") for metric in metrics}
        page = section(name).replace("as grpo", "`eval_reward` `eval_accuracy`")
        assert {metric for metric in ("eval_loss", "eval_reward", "eval_accuracy") if f"`{metric}`" in page} == told, (
            name
        )


def test_a_loss_of_ones_own_is_for_every_algorithm_but_those_that_the_page_names():
    (without,) = re.findall(r"in every algorithm but (.+?)\.", ALGORITHMS_PAGE)
    assert set(ALGORITHMS) - set(LOSS_ALGORITHMS) == set(re.findall(r"\w+", without)) - {"and"}


def test_every_failure_class_has_its_row_of_evidence_and_action():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## Failure is data")[1]
    assert set(re.findall(r"^\| (\w+) \| ", page.split("## Records")[0], re.MULTILINE)) - {"class"} == set(FailureClass)


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = project["dependencies"] + [
        each for extra in project["optional-dependencies"].values() for each in extra
    ]
    names = {re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in requirements}
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8").lower()
    given = {name.strip() for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for name in row.split(",")}
    # botocore, graphql-core: the pins that ministack wants, named in its row
    assert names - given <= {"botocore", "graphql-core"}


def test_every_handler_is_one_file_with_a_docstring_that_says_what_wakes_it():
    for path in sorted((ROOT / "functions").glob("[!_]*.py")):
        text = path.read_text("utf-8")
        assert text.startswith('"""') and "def handler(event: dict[str, Any], context: LambdaContext)" in text, (
            path.name
        )
