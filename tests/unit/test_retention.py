"""Which checkpoints are kept, by one rule on the machine's disk and in S3."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.retention import best_of, superfluous
from microtuning_core.domain.spec import CheckpointSpec


@dataclass(frozen=True)
class Saved:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False


def steps(checkpoints: list[Saved]) -> list[int]:
    return [each.step for each in checkpoints]


REWARDS = [Saved(2, {"reward": 0.4}), Saved(4, {"reward": 0.9}), Saved(6, {"reward": 0.5}), Saved(8, {"reward": 0.6})]


@pytest.mark.parametrize(
    ("spec", "left"),
    [
        ({"keep": 2}, [6, 8]),
        ({"keep": 1}, [8]),
        ({"keep": 9}, [2, 4, 6, 8]),
        ({"keep": 1, "best_metric": "reward"}, [4, 8]),
        ({"keep": 1, "best_metric": "reward", "best_is": "lowest"}, [2, 8]),
        ({"keep": 1, "best_metric": "no_such"}, [8]),
    ],
)
def test_the_newest_and_the_best_are_kept(spec, left):
    doomed = steps(superfluous(REWARDS, CheckpointSpec(**spec)))
    assert [each.step for each in REWARDS if each.step not in doomed] == left


def test_of_equals_the_newest_is_the_best():
    tied = [Saved(2, {"reward": 0.9}), Saved(4, {"reward": 0.9}), Saved(6, {"reward": 0.1})]
    best = best_of(tied, CheckpointSpec(best_metric="reward"))
    assert best is not None and best.step == 4


@given(
    saved=st.lists(
        st.builds(
            Saved,
            step=st.integers(0, 40),
            metrics=st.dictionaries(st.sampled_from(["reward", "loss"]), st.floats(-1, 1), max_size=2),
            final=st.booleans(),
        ),
        unique_by=lambda each: each.step,
    ),
    spec=st.builds(
        CheckpointSpec,
        keep=st.integers(1, 5),
        best_metric=st.sampled_from([None, "reward"]),
        best_is=st.sampled_from(["highest", "lowest"]),
    ),
    in_use=st.sets(st.integers(0, 40), max_size=3),
)
def test_what_is_in_use_final_newest_or_best_is_never_removed_and_removing_again_removes_nothing(saved, spec, in_use):
    doomed = superfluous(saved, spec, in_use=in_use)
    left = [each for each in saved if each not in doomed]
    newest = sorted(saved, key=lambda each: each.step)[-spec.keep :]
    assert not in_use & set(steps(doomed))
    assert not any(each.final for each in doomed)
    assert all(each in left for each in newest)
    assert (best := best_of(saved, spec)) is None or best in left
    assert superfluous(left, spec, in_use=in_use) == []
