"""Estimates learn from past attempts: the nearest ones, no more than they show, and never a range without the middle."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.calibration import (
    Calibration,
    Sample,
    calibration,
    drawing_of,
    estimate,
    family_of,
    samples_of,
)
from microtuning_core.domain.estimates import START_S
from microtuning_core.domain.run import Attempt, Metered, Run, new_run
from tests.unit.records import RUN_ID, a_cpu_plan, a_plan, a_spec

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)


def sample(ratio: float, family: str = "qwen3", instance_type: str = "ml.g5.xlarge", **changes) -> Sample:
    facts = {"guessed_s": 100.0, "measured_s": 100.0 * ratio, "other_s": 60.0}
    return Sample(family, instance_type, **(facts | changes))


def attempt(**changes) -> Attempt:
    facts = {
        "attempt": 1, "job_name": f"prod-{RUN_ID}-a001", "lineage": 1, "plan": a_cpu_plan(), "created_at": NOW,
        "training_s": 100, "billed_s": 100,
        "metered": Metered(step=50, steps_done=50, phase_ms={"load": 20_000, "update": 60_000, "idle": 1000},
                           tokens={"trained": 50_000}),
    }  # fmt: skip
    return Attempt(**(facts | changes))


def run(*attempts: Attempt, **spec) -> Run:
    return new_run(RUN_ID, a_spec(**spec), NOW).with_(attempts=attempts)


# ------------------------------------------------------------------------------------------------------------ samples


def test_an_attempt_teaches_what_its_steps_took_and_what_else_was_billed():
    (found,) = samples_of([run(attempt())])
    assert (found.family, found.instance_type) == ("transformer", "ml.m5.large")
    assert (found.measured_s, found.other_s, found.saving) == (60.0, 40.0, None)
    assert found.guessed_s > 0


def test_spot_teaches_what_it_saved():
    (found,) = samples_of([run(attempt(plan=a_plan(spot=True), billed_s=30))])
    assert found.saving == Decimal("0.7")


@pytest.mark.parametrize(
    "changes",
    [
        {"metered": None},
        {"metered": Metered(steps_done=0, phase_ms={"update": 5}, tokens={"trained": 5})},
        {"metered": Metered(steps_done=5, tokens={"trained": 5})},
        {"metered": Metered(steps_done=5, phase_ms={"update": 5})},
        {"training_s": None},
        {"plan": a_cpu_plan(instance_type="ml.gone.large")},
    ],
)
def test_an_attempt_that_measured_nothing_teaches_nothing(changes):
    assert samples_of([run(attempt(**changes))]) == []


def test_a_model_of_unknown_size_teaches_nothing():
    assert samples_of([run(attempt(), model={"base": "someone/of-unknown-size"})]) == []


@pytest.mark.parametrize(
    ("model", "family"),
    [("Qwen/Qwen3-0.6B", "qwen3"), ("Qwen/Qwen3-8B", "qwen3"), ("HuggingFaceTB/SmolLM2-135M", "smollm2"),
     ("Transformer", "transformer"), ("s3://b/tenants/a/models/base/llama_3/", "llama")],
)  # fmt: skip
def test_models_that_differ_in_size_alone_are_one_family(model, family):
    assert family_of(model) == family


def test_drawing_is_part_of_the_work_where_a_recipe_draws():
    assert drawing_of(a_spec()) == {"drawn_positions": 0, "minibatches": 1, "passes": 1}


# -------------------------------------------------------------------------------------------------------- calibration


def test_without_any_attempt_the_guess_stands_and_says_so():
    found = calibration([sample(2.0, "llama")], "qwen3", "ml.g5.xlarge")
    assert found == Calibration()
    words = estimate(90, "ml.g5.xlarge", 1, Decimal("3.6"), found, spot=False)
    assert (words.seconds, words.low_s, words.high_s) == (90 + START_S, 30 + START_S, 270 + START_S)
    assert "a first guess" in words.basis


def test_attempts_on_the_same_type_count_before_those_on_others():
    past = [sample(2.0), sample(3.0), sample(2.5), sample(9.0, instance_type="ml.p5.48xlarge")]
    found = calibration(past, "qwen3", "ml.g5.xlarge")
    assert (found.factor, found.attempts, found.same_type, found.other_s) == (2.5, 3, True, 60.0)
    assert found.low == pytest.approx(2.0 / 1.2)
    assert found.high == pytest.approx(3.6)


def test_one_attempt_is_believed_less_than_several_and_another_type_less_again():
    alone = calibration([sample(2.0)], "qwen3", "ml.g5.xlarge")
    elsewhere = calibration([sample(2.0)], "qwen3", "ml.g6.xlarge")
    assert (alone.low, alone.high) == (pytest.approx(2.0 / 1.5), 3.0)
    assert (elsewhere.low, elsewhere.high, elsewhere.same_type) == (1.0, 4.0, False)


def test_an_estimate_is_money_for_all_machines_with_their_start():
    found = estimate(
        100, "ml.g5.xlarge", 2, Decimal("3.6"), calibration([sample(2.0)], "qwen3", "ml.g5.xlarge"), spot=True
    )
    assert (found.seconds, found.usd) == (260.0, Decimal("0.5200"))
    assert (found.spot_usd, found.basis) == (None, "by 1 past attempt of this model family on this type")


def test_what_spot_would_save_is_said_once_past_attempts_on_the_type_show_it():
    past = [sample(1.0, "llama", saving=Decimal("0.6")), sample(1.0, "llama", saving=Decimal("0.8"))]
    found = estimate(3540, "ml.g5.xlarge", 1, Decimal("3.6"), calibration(past, "llama", "ml.g5.xlarge"), spot=False)
    assert (found.usd, found.spot_usd) == (Decimal("3.6000"), Decimal("1.0800"))


RATIOS = st.floats(0.01, 100)
TYPES = st.sampled_from(["ml.g5.xlarge", "ml.g6.xlarge"])


@given(st.lists(st.builds(sample, RATIOS, st.sampled_from(["qwen3", "llama"]), TYPES)), st.floats(0, 10**6), TYPES)
def test_the_estimate_lies_in_its_range_and_more_work_never_costs_less(past, guessed_s, instance_type):
    found = calibration(past, "qwen3", instance_type)
    one = estimate(guessed_s, instance_type, 1, Decimal("1.408"), found, spot=False)
    more = estimate(guessed_s * 2 + 1, instance_type, 2, Decimal("1.408"), found, spot=False)
    assert one.low_s <= one.seconds <= one.high_s
    assert one.low_usd <= one.usd <= one.high_usd
    assert more.usd >= one.usd >= 0
