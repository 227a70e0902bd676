"""What fit() and check say a run will take: three machines, their ranges, and a word about the budget."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import boto3
import pytest

from microtuning_core.domain.calibration import Sample
from microtuning_core.domain.estimates import START_S
from microtuning_core.domain.names import StackNames
from microtuning_sdk import LoopTrainer, SFTTrainer, Stage
from microtuning_sdk._draft import Draft
from microtuning_sdk._estimates import estimate_view, estimates, shown_estimate
from microtuning_sdk._preflight import _about_time

ROWS = [{"prompt": f"{number}>", "completion": str(number)} for number in range(64)]
LEARNT = [
    Sample("transformer", "ml.m5.large", 10.0, 40.0, 20.0),
    Sample("transformer", "ml.m5.large", 10.0, 50.0, 30.0),
]


@pytest.fixture
def stage() -> Stage:
    return Stage(StackNames("local", "000000000000", "us-east-1"), boto3.Session(region_name="us-east-1"))


def drafted(stage: Stage, **settings: Any) -> Draft:
    settings = {"compute": {"instance": "ml.m5.large"}} | settings
    trainer = SFTTrainer(model_arch="Transformer", stage=stage, **settings)
    return trainer._draft(stage, ROWS, None, 50, 8, None)


def test_the_chosen_machine_comes_first_and_then_the_next_best(stage: Stage) -> None:
    found = estimates(drafted(stage))
    assert found[0].instance_type == "ml.m5.large"
    assert len({each.instance_type for each in found}) == 3
    assert all(each.low_usd < each.usd < each.high_usd for each in found)
    assert "a first guess" in shown_estimate(found[0])


def test_past_attempts_narrow_the_range(stage: Stage) -> None:
    (guess, *_), (known, *_) = estimates(drafted(stage)), estimates(drafted(stage), LEARNT)
    assert known.attempts == 2
    spans = [(each.high_s - each.low_s) / (each.seconds - other_s) for each, other_s in ((known, 25), (guess, START_S))]
    assert spans[0] < 1 < spans[1]  # of the training itself, without what else is billed
    assert "by 2 past attempts of this model family on this type" in shown_estimate(known)


def test_a_loop_of_ones_own_has_no_estimate(stage: Stage) -> None:
    def train(engine: Any, run: Any) -> None:
        return None

    trainer = LoopTrainer(train, model_arch="Transformer", stage=stage)
    assert estimates(trainer._draft(stage, ROWS, None, None, None, None)) == ()


def test_an_estimate_is_json_whose_money_is_text(stage: Stage) -> None:
    view = json.loads(json.dumps(estimate_view(estimates(drafted(stage))[0])))
    assert Decimal(view["low_usd"]) < Decimal(view["usd"])
    assert view["instance_type"] == "ml.m5.large"
    assert view["basis"].startswith("a first guess")


def test_a_budget_below_the_estimate_is_a_warning_and_one_inside_the_range_a_note(stage: Stage) -> None:
    slow = [Sample("transformer", "ml.m5.large", 1.0, 1000.0, 20.0)]
    usd = estimates(drafted(stage), slow)[0].usd
    below = list(_about_time(drafted(stage, budget_usd=str(usd * Decimal("0.9"))), slow))
    assert [each.level for each in below if "budget" in each.found] == ["warning"]
    inside = list(_about_time(drafted(stage, budget_usd=str(usd * Decimal("1.1"))), slow))
    assert [each.level for each in inside if "budget" in each.found] == ["note"]
    enough = list(_about_time(drafted(stage, budget_usd=str(usd * 5)), slow))
    assert [each.about for each in enough] == ["time", "instead", "instead"]
