"""progress.json: the sign of life of a job."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from microtuning_core.domain.progress import Progress, sign_after_s, signs_within

A_PROGRESS = {"run_id": "acme-sort-0a1b2c3d4e5f", "attempt": 1, "lineage": 1, "step": 0, "total_steps": 100,
              "at": "2026-01-02T03:04:05Z"}  # fmt: skip


def test_progress_begins_with_everything_at_zero() -> None:
    progress = Progress.model_validate(A_PROGRESS)
    assert progress.phase_ms.rollout == progress.tokens.sampled == progress.longest_step_ms == 0
    assert progress.restarts == ()


def test_progress_survives_its_own_json_and_is_under_4_kb_after_three_restarts() -> None:
    restart = {"cause": "killed by signal 9", "at": "2026-01-02T03:04:05Z", "detect_ms": 1, "first_step_ms": 900}
    progress = Progress.model_validate(A_PROGRESS | {"restarts": [restart] * 3})
    text = progress.model_dump_json()
    assert Progress.model_validate_json(text) == progress
    assert len(text) < 4096


def test_signs_come_less_often_as_a_job_grows_old() -> None:
    assert [sign_after_s(age_s) for age_s in (0, 600, 1800, 3600, 10**6)] == [10, 10, 30, 60, 60]
    assert sign_after_s(30, least_s=0.5) == 0.5


@pytest.mark.parametrize("seconds", [0, 9, 600, 1200, 3600, 36_000])
def test_signs_are_counted_as_they_are_given(seconds: int) -> None:
    age_s, given = 0.0, 0
    while (age_s := age_s + sign_after_s(age_s)) <= seconds:
        given += 1
    assert given <= signs_within(seconds) <= given * 1.05 + 2


def test_progress_refuses_a_metric_that_is_not_finite() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Progress.model_validate(A_PROGRESS | {"metrics": {"last": {"loss": float("nan")}}})
