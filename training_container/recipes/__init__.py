"""One post-training loop a file.

To add a recipe: a module here with `train(engine, run)`, its line in RECIPES, its settings in microtuning_core.domain.spec
(the name of both is `type`), its rates in defaults.py, a heading in docs/algorithms.md. Write it with the engine's
primitives, `data`, `rewards` and `losses` alone; `run.steps` and `run.end_step` give it checkpoints, exact resume, progress
and stopping. `script` is the exception: it has no engine, and runs the user's own file.
"""

from __future__ import annotations

import importlib
from types import ModuleType

# By module name, so that a script run does not wait for torch.
RECIPES = {
    "sft": "training_container.recipes.sft",
    "dpo": "training_container.recipes.dpo",
    "kto": "training_container.recipes.kto",
    "orpo": "training_container.recipes.orpo",
    "reward": "training_container.recipes.reward",
    "grpo": "training_container.recipes.grpo",
    "multi_turn": "training_container.recipes.multi_turn",
    "distillation": "training_container.recipes.distillation",
    "custom": "training_container.recipes.custom",
    "script": "training_container.recipes.script",
}


def load_recipe(algorithm_type: str) -> ModuleType:
    return importlib.import_module(RECIPES[algorithm_type])
