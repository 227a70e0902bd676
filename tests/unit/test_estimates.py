"""A first guess of time and money: worked numbers, and that more work is never said to take or cost less."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.catalog import CATALOG, InstanceType, find
from microtuning_core.domain.estimates import Work, billed_s, cost_usd, steps_of, training_s
from microtuning_core.domain.planning import TINY_DECODER, ModelShape

ONE_GPU = find("ml.g5.xlarge")  # an A10G, taken at 2e13 FLOP/s
TWO_CORES = find("ml.m5.large")  # taken at 3e10 FLOP/s
BILLION = ModelShape(parameters=10**9, hidden_size=2048, layers=16, vocabulary=32_000)

machines = st.sampled_from(sorted(CATALOG.values(), key=lambda each: each.instance_type))
shapes = st.builds(
    ModelShape,
    parameters=st.integers(1, 10**12), hidden_size=st.just(64), layers=st.just(3), vocabulary=st.just(128),
)  # fmt: skip
works = st.builds(
    Work,
    steps=st.integers(0, 10**6), tokens_a_step=st.floats(0, 1e8), drawn_positions=st.integers(0, 10**6),
    minibatches=st.integers(1, 64), passes=st.integers(1, 64),
)  # fmt: skip
adapters = st.sampled_from(["none", "lora", "qlora"])


def a_work(**changes: Any) -> Work:
    return Work(**({"steps": 100, "tokens_a_step": 10_000} | changes))


def seconds(*, machine: InstanceType = ONE_GPU, adapter: str = "none", count: int = 1, **changes: Any) -> float:
    return training_s(BILLION, adapter, machine, a_work(**changes), count=count)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "max_steps", "updates", "steps"),
    [
        (10, 4, 1, None, 1, 3),  # the last batch holds two rows
        (10, 4, 2, None, 1, 6),  # and so in each epoch
        (10, 4, 2, 5, 1, 5),
        (10, 4, 1, 99, 1, 3),
        (16, 8, 1, None, 6, 12),  # two rollouts, two minibatches, three passes
        (16, 8, 1, 7, 6, 7),
        (0, 4, 3, None, 1, 0),
        (1, 1000, 1, None, 1, 1),
    ],
)
def test_steps_are_the_batches_of_every_epoch_and_at_most_the_limit(
    rows: int, batch: int, epochs: int, max_steps: int | None, updates: int, steps: int
) -> None:
    assert steps_of(rows, batch, epochs, max_steps, updates=updates) == steps


@given(st.integers(0, 10**7), st.integers(1, 10**5), st.integers(1, 100), st.integers(1, 100))
def test_more_rows_epochs_or_updates_never_make_fewer_steps(rows: int, batch: int, epochs: int, updates: int) -> None:
    steps = steps_of(rows, batch, epochs, None, updates=updates)
    assert steps <= steps_of(rows + 1, batch, epochs, None, updates=updates)
    assert steps <= steps_of(rows, batch, epochs + 1, None, updates=updates)
    assert steps <= steps_of(rows, batch, epochs, None, updates=updates + 1)
    assert steps >= steps_of(rows, batch + 1, epochs, None, updates=updates)
    assert steps * batch >= rows * epochs


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_step_takes_six_operations_a_weight_and_token_and_four_with_an_adapter() -> None:
    # 6 x 1e9 x 1e4 / 2e13 = 3 s a step
    assert seconds() == pytest.approx(300.0)
    assert seconds(adapter="lora") == seconds(adapter="qlora") == pytest.approx(200.0)


def test_completions_cost_a_forward_pass_and_a_time_for_each_position() -> None:
    # (6 + 2) x 1e9 x 1e4 / 2e13 = 4 s, and 50 positions of 20 ms
    assert seconds(drawn_positions=50) == pytest.approx(500.0)


def test_a_rollout_that_is_used_again_is_drawn_once() -> None:
    # Two passes: (6 + 2/2) / 6 x 3 s = 3.5 s, and half of the second that the drawing takes.
    assert seconds(drawn_positions=50, passes=2) == pytest.approx(400.0)
    # Two minibatches: twice as many completions are drawn at once, so the positions take half as long a step.
    assert seconds(drawn_positions=50, minibatches=2) == pytest.approx(450.0)


def test_a_step_that_is_hardly_any_work_takes_its_overhead() -> None:
    assert seconds(tokens_a_step=0) == pytest.approx(3.0)  # 100 x 30 ms
    assert training_s(TINY_DECODER, "none", TWO_CORES, a_work(tokens_a_step=1000)) == pytest.approx(4.0)
    assert training_s(TINY_DECODER, "none", TWO_CORES, a_work(tokens_a_step=1000, drawn_positions=10)) == pytest.approx(
        100 * (8 * 200_000 * 1000 / 3e10 + 10 * 0.003)
    )


def test_four_gpus_or_four_machines_take_a_quarter_of_the_time() -> None:
    assert seconds(machine=find("ml.g5.12xlarge")) == seconds(count=4) == pytest.approx(75.0)


@pytest.mark.parametrize("machine", CATALOG.values(), ids=lambda each: each.instance_type)
def test_every_machine_has_a_speed(machine: InstanceType) -> None:
    assert 0 < training_s(BILLION, "lora", machine, a_work(drawn_positions=8)) < math.inf


@given(shapes, adapters, machines, works)
def test_more_work_never_takes_less_time(shape: ModelShape, adapter: str, machine: InstanceType, work: Work) -> None:
    least = training_s(shape, adapter, machine, work)
    assert least >= 0
    for name in ("steps", "tokens_a_step", "drawn_positions"):
        more = work.model_copy(update={name: getattr(work, name) + 1})
        assert training_s(shape, adapter, machine, more) >= least
    larger = shape.model_copy(update={"parameters": 2 * shape.parameters})
    assert training_s(larger, adapter, machine, work) >= least
    assert training_s(shape, "none", machine, work) >= least
    assert training_s(shape, adapter, machine, work, count=2) <= least


@given(shapes, adapters, machines, works, st.integers(2, 64))
def test_reuse_of_a_rollout_never_makes_a_step_dearer(
    shape: ModelShape, adapter: str, machine: InstanceType, work: Work, times: int
) -> None:
    once = training_s(shape, adapter, machine, work)
    for name in ("passes", "minibatches"):
        reused = work.model_copy(update={name: getattr(work, name) * times})
        assert training_s(shape, adapter, machine, reused) <= once


# --- money -----------------------------------------------------------------------------------------------------------


def test_the_start_of_a_machine_is_paid_for_in_whole_seconds_of_every_machine() -> None:
    assert billed_s(60.0) == 300.0
    assert cost_usd(3360.0, TWO_CORES) == Decimal("0.115")  # 3,360 s and the 240 of the start: an hour
    assert cost_usd(3359.2, TWO_CORES) == Decimal("0.115")
    assert cost_usd(3360.0, TWO_CORES, count=3) == Decimal("0.345")
    assert cost_usd(0.0, TWO_CORES) == Decimal(240) * Decimal("0.115") / 3600


@given(st.floats(0, 1e9), st.floats(0, 1e6), machines, st.integers(1, 16))
def test_money_is_decimal_positive_and_grows_with_time_and_machines(
    some_s: float, more_s: float, machine: InstanceType, count: int
) -> None:
    cost = cost_usd(some_s, machine, count=count)
    assert isinstance(cost, Decimal)
    assert cost.is_finite()
    assert cost > 0
    assert cost_usd(some_s + more_s, machine, count=count) >= cost
    assert cost_usd(some_s, machine, count=count + 1) > cost
