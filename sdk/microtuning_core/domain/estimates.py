"""How long a run will take, roughly: within a factor of three or so, before anything has run.

    seconds = steps x max(overhead, 6 x parameters x tokens of a step / speed), and what drawing completions takes

6 x parameters x tokens is the work of a forward and a backward pass (arXiv:2001.08361, section 2.1); with an adapter the
weights get no gradient of their own, which saves a third. Completions cost a forward pass (2) where they are drawn, and a
time of its own for each position. `speed` is what such runs reach of a machine, not its peak.
"""

from __future__ import annotations

from decimal import Decimal
from math import ceil

from microtuning_core.domain.catalog import InstanceType
from microtuning_core.domain.planning import ModelShape
from microtuning_core.domain.record import Value

# FLOP/s that training reaches: about a third of the peak in bf16 (in float32 for T4), a core's worth a vCPU.
_GPU_SPEED = {"T4": 3e12, "A10G": 2e13, "L4": 2e13, "A100-40GB": 1e14, "A100-80GB": 1e14, "H100": 3e14}
_VCPU_SPEED = 1.5e10
_STEP_OVERHEAD_S = 0.03
_TOKEN_OVERHEAD_S = {True: 0.02, False: 0.003}  # of one position drawn for all completions, with a GPU and without
START_S = 240  # until a machine of AWS has fetched the image and the data


class Work(Value):
    """What a run does: optimizer steps, tokens of one, and positions drawn one after the other for each rollout.

    A rollout serves `minibatches` steps, and those `passes` times.
    """

    steps: int
    tokens_a_step: float
    drawn_positions: int = 0
    minibatches: int = 1
    passes: int = 1


def steps_of(rows: int, batch: int, epochs: int, max_steps: int | None, *, updates: int = 1) -> int:
    """Optimizer steps of a run that takes `batch` rows at a time and makes `updates` steps of them."""
    steps = epochs * ceil(rows / batch) * updates
    return steps if max_steps is None else min(steps, max_steps)


def training_s(model: ModelShape, adapter: str, machine: InstanceType, work: Work, *, count: int = 1) -> float:
    """Seconds of training on `count` machines, without their start."""
    speed = _GPU_SPEED[machine.gpu_family or "T4"] * machine.gpus if machine.gpus else _VCPU_SPEED * machine.vcpus
    flops = (6 if adapter == "none" else 4) * model.parameters * work.tokens_a_step
    drawing_s = 0.0
    if work.drawn_positions:
        flops += 2 * model.parameters * work.tokens_a_step / work.passes
        a_rollout_s = work.drawn_positions * _TOKEN_OVERHEAD_S[machine.gpus > 0]
        drawing_s = a_rollout_s / (work.minibatches * work.passes)
    return work.steps * (max(_STEP_OVERHEAD_S, flops / (speed * count)) + drawing_s)


def billed_s(seconds: float) -> float:
    """What AWS bills: the start, too."""
    return seconds + START_S


def cost_usd(seconds: float, machine: InstanceType, *, count: int = 1) -> Decimal:
    """Of `count` machines that train for so long, each at the on-demand price."""
    return Decimal(ceil(billed_s(seconds)) * count) * machine.price_usd_per_hour / 3600
