"""When a checkpoint is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.spec import CheckpointSpec
from training_container.cadence import Cadence, best_interval_s

HOUR_S = 3600.0


def cadence(mtbf_s: float = 4 * HOUR_S, **spec) -> Cadence:
    return Cadence(CheckpointSpec(**spec), mtbf_s=mtbf_s, now_s=0.0)


def due_at(made: Cadence, *, steps: int, step_s: float, stalled_s: float = 0.5, took_s: float = 1.0) -> list[int]:
    """Steps after which a run that saves whenever it is due would have saved."""
    found, now_s = [], 0.0
    for step in range(1, steps + 1):
        now_s += step_s
        if made.is_due(step, now_s=now_s):
            found.append(step)
            made.saved(now_s=now_s, stalled_s=stalled_s)
            made.written(took_s=took_s)
    return found


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s", "interval_s"),
    [
        (6, 2 * HOUR_S, 294 - 6),
        (0.8, 2 * HOUR_S, 107.3 - 0.8),
        (10, 6000, 346.4 - 10),
    ],  # facts/operations.md, 77 and 78
)
def test_the_interval_is_young_and_dalys(cost_s, mtbf_s, interval_s):
    assert best_interval_s(cost_s, mtbf_s) == pytest.approx(interval_s, abs=0.5)


@given(cost_s=st.floats(0.01, 1000), mtbf_s=st.floats(1e2, 1e7))
def test_no_other_interval_loses_less(cost_s, mtbf_s):
    """The share lost to saving and to work done again, C / (T + C) + (T + C) / 2M, is least there."""

    def lost(interval_s: float) -> float:
        return cost_s / (interval_s + cost_s) + (interval_s + cost_s) / (2 * mtbf_s)

    best = best_interval_s(cost_s, mtbf_s)
    if cost_s < mtbf_s / 2:
        assert lost(best) <= min(lost(best * 0.9), lost(best * 1.1)) + 1e-12


def test_auto_saves_after_the_first_step_and_then_as_often_as_its_cost_allows():
    saved = due_at(cadence(every_epoch=False), steps=1000, step_s=1.0)
    assert saved[:3] == [1, 121, 241]  # sqrt(2 * 0.5 * 14400) - 0.5 = 119.5


def test_auto_saves_more_often_where_machines_are_taken_away():
    spot = due_at(cadence(every_epoch=False), steps=5000, step_s=1.0)
    on_demand = due_at(cadence(7 * 24 * HOUR_S, every_epoch=False), steps=5000, step_s=1.0)
    assert len(spot) > 5 * len(on_demand) > 0


def test_auto_gives_the_disk_a_rest():
    saved = due_at(cadence(every_epoch=False), steps=5000, step_s=1.0, stalled_s=0.001, took_s=300.0)
    assert saved[:3] == [1, 601, 1201]


@pytest.mark.parametrize(
    ("spec", "saved"),
    [
        ({"every_steps": 4}, [4, 8, 12]),
        ({"every_seconds": 7}, [4, 8, 12]),
        ({"every_seconds": 7, "every_steps": 5}, [4, 5, 9, 10]),
    ],
)
def test_what_comes_first_counts(spec, saved):
    assert due_at(cadence(every_epoch=False, **spec), steps=12, step_s=2.0) == saved


def test_the_end_of_an_epoch_is_a_place_to_save_where_that_is_wanted():
    assert cadence(every_steps=100).is_due(7, epoch_ended=True, now_s=0.0)
    assert not cadence(every_steps=100, every_epoch=False).is_due(7, epoch_ended=True, now_s=0.0)


def test_only_what_goes_by_the_clock_must_be_agreed_on():
    assert not cadence(every_steps=5).asks_the_clock
    assert cadence().asks_the_clock and cadence(every_steps=5, every_seconds=9).asks_the_clock


def test_a_number_of_steps_that_would_never_save_is_lowered_and_said():
    made = cadence(every_steps=50, every_epoch=False)
    assert "every 2 steps" in (made.fit_to(6, steps_per_epoch=6) or "")
    assert due_at(made, steps=6, step_s=1.0) == [2, 4, 6]


@pytest.mark.parametrize("spec", [{}, {"every_steps": 50, "every_seconds": 60}])
def test_what_goes_by_the_clock_needs_no_such_correction(spec):
    assert cadence(**spec).fit_to(6, steps_per_epoch=6) is None
