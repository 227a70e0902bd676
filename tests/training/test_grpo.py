"""Policy optimisation as whole runs: what settings do to a rollout, and exact resume inside a window of several updates."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from training_container.rollouts import Rollout, Trajectory

GRPO = {"type": "grpo", "batch_size": 8, "group_size": 4, "max_completion_tokens": 6, "learning_rate": 1e-3}
WINDOW = GRPO | {"minibatches": 2, "passes": 2, "epochs": 2}
Box, Rows = Callable[..., Any], Callable[..., Any]


def trace(box: Any) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step, as last reported."""
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in box.of("metrics")}


# --- exact resume --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "model"),
    [
        ("a_box", WINDOW, None),
        ("a_lora_box", WINDOW | {"kl_coef": 0.1, "top_p": 0.9}, {"base": "tests/tiny", "rank": 4, "dropout": 0.2}),
    ],
    ids=["full", "an adapter with dropout, a reference and old log-probabilities"],
)
def test_a_run_stopped_after_every_single_step_ends_with_the_same_bits_though_a_window_is_4_updates(
    kind: str, settings: dict[str, Any], model: Any, rows: Rows, request: pytest.FixtureRequest
) -> None:
    make = request.getfixturevalue(kind)
    calm, stopped = (
        make(name=name, algorithm=settings, rows=rows(4), **({"model": model} if model else {}))
        for name in ("calm", "stopped")
    )
    assert calm.work() == 0
    assert calm.steps == list(range(1, 9))  # 2 rollouts of 4 prompts, 4 updates each
    for step in range(1, 8):
        assert stopped.work(stop=lambda: True) == 128 + signal.SIGTERM
        assert stopped.steps[-1] == step
    assert stopped.work() == 0
    assert stopped.steps == calm.steps
    assert trace(stopped) == trace(calm)
    assert stopped.weights_sha256 == calm.weights_sha256
