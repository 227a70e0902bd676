"""How long machines are assumed to last, and what failures of the run change about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.failures import AttemptSummary, FailureClass
from microtuning_core.domain.reliability import LEAST_MTBF_S, ON_DEMAND_MTBF_S, SPOT_MTBF_S, mtbf_s


def attempt(failure_class: FailureClass | None = None, **changes) -> AttemptSummary:
    facts = {
        "billed_s": 3600,
        "checkpoint_step": 5,
        "instance_type": "ml.g5.xlarge",
        "micro_batch_size": None,
        "spot": True,
    }
    return AttemptSummary(failure_class=failure_class, **(facts | changes))


def test_a_run_without_a_past_takes_what_is_assumed_of_its_machines():
    assert mtbf_s(spot=True, count=1) == SPOT_MTBF_S
    assert mtbf_s(spot=False, count=1) == ON_DEMAND_MTBF_S
    assert mtbf_s(spot=True, count=4) == SPOT_MTBF_S / 4


def test_spot_machines_that_are_taken_every_hour_are_expected_to_be():
    taken = [attempt(FailureClass.INTERRUPTED)] * 50
    assert mtbf_s(spot=True, count=1, history=taken) == pytest.approx(3600, rel=0.1)
    assert mtbf_s(spot=True, count=1, history=[attempt(recoveries=50, billed_s=50 * 3600)]) == pytest.approx(
        3600, rel=0.1
    )


@pytest.mark.parametrize(
    "other", [FailureClass.USER, FailureClass.MEMORY, FailureClass.NUMERICS, FailureClass.CAPACITY]
)
def test_what_is_not_the_machines_fault_does_not_count_against_it(other):
    assert mtbf_s(spot=True, count=1, history=[attempt(other)]) > SPOT_MTBF_S


def test_spot_and_on_demand_learn_apart():
    assert mtbf_s(spot=False, count=1, history=[attempt(FailureClass.PLATFORM)] * 9) == ON_DEMAND_MTBF_S


@given(
    past=st.lists(
        st.builds(
            attempt,
            st.sampled_from([None, *FailureClass]),
            billed_s=st.integers(0, 10**6),
            spot=st.booleans(),
            recoveries=st.integers(0, 9),
        ),
        max_size=9,
    ),
    spot=st.booleans(),
)
def test_one_more_failure_never_makes_machines_more_reliable(past, spot):
    failed = attempt(FailureClass.PLATFORM, spot=spot, billed_s=0)
    assert (
        LEAST_MTBF_S <= mtbf_s(spot=spot, count=1, history=[*past, failed]) <= mtbf_s(spot=spot, count=1, history=past)
    )
