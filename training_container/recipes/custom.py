"""The user's own loop, `def train(engine, run)`, on the same primitives as every recipe here (docs/custom.md)."""

from __future__ import annotations

from ..custom_code import load_loop
from ..engine import Engine
from ..run import Run


def train(engine: Engine, run: Run) -> None:
    """Hand over to the loop; what it leaves in the engine is the model, whether or not it counted a step."""
    load_loop(run)(engine, run)
    if run.state.step == 0:
        run.log.emit("notice", message="the loop never called run.end_step: the model is kept as it is, after 0 steps")
