"""The names a user's own loss or loop is written with: `from training_container.api import …` (docs/custom.md).

They stay what they are from one version to the next; everything else in this package may move.
"""

from . import advantages, losses
from .data import Prompt, render_prompts, render_supervised
from .engine import Completion, Engine, Example, Metrics, MicroBatch, OptimStep, Sampling, Totals
from .recipes.grpo import question_about
from .recipes.grpo import reward_function as open_reward
from .run import Run

__all__ = [
    "Completion",
    "Engine",
    "Example",
    "Metrics",
    "MicroBatch",
    "OptimStep",
    "Prompt",
    "Run",
    "Sampling",
    "Totals",
    "advantages",
    "losses",
    "open_reward",
    "question_about",
    "render_prompts",
    "render_supervised",
]
