"""Vetted settings where the user gives none, by recipe and by what is trained.

    preset   a small model from nothing: all weights, high rates
    full     all weights of a pretrained model
    adapter  LoRA: ten times the rate of full training

The preset rows were measured: sorting six digits after a warm start of 250 steps, greedy accuracy rose from 0.12-0.22 to
0.96-0.98 in 100 steps for each of the seeds 0 to 4; a rate of 1e-3 collapses there, and a gradient norm of 1.0 is unstable.
The others follow common practice and were not measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from microtuning_core.domain.spec import ModelSpec


@dataclass(frozen=True)
class Rates:
    learning_rate: float
    max_grad_norm: float


RATES = {
    ("grpo", "preset"): Rates(3e-4, 0.3),
    ("grpo", "full"): Rates(1e-6, 0.3),
    ("grpo", "adapter"): Rates(1e-5, 0.3),
    ("distillation", "preset"): Rates(1e-3, 1.0),
    ("distillation", "full"): Rates(1e-5, 1.0),
    ("distillation", "adapter"): Rates(1e-4, 1.0),
    ("dpo", "preset"): Rates(3e-4, 1.0),
    ("dpo", "full"): Rates(1e-6, 1.0),
    ("dpo", "adapter"): Rates(1e-5, 1.0),
    ("kto", "preset"): Rates(3e-4, 1.0),
    ("kto", "full"): Rates(1e-6, 1.0),
    ("kto", "adapter"): Rates(1e-5, 1.0),
    ("orpo", "preset"): Rates(1e-3, 1.0),
    ("orpo", "full"): Rates(8e-6, 1.0),
    ("orpo", "adapter"): Rates(8e-5, 1.0),
    ("reward", "preset"): Rates(1e-3, 1.0),
    ("reward", "full"): Rates(1e-5, 1.0),
    ("reward", "adapter"): Rates(1e-4, 1.0),
    ("sft", "preset"): Rates(3e-3, 1.0),
    ("sft", "full"): Rates(2e-5, 1.0),
    ("sft", "adapter"): Rates(2e-4, 1.0),
}

# The supervised phase before reinforcement: its rate is in the spec.
WARM_START_RAMP_STEPS = 20
WARM_START_MAX_GRAD_NORM = 1.0


def rates_for(algorithm: str, model: ModelSpec) -> Rates:
    kind = "preset" if model.arch else "full"
    return RATES[algorithm, "adapter" if model.effective_adapter != "none" else kind]
