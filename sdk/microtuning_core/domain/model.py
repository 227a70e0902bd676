"""A model that a run produced, as registered: numbered in its group, with what it was measured by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from microtuning_core.domain.record import Record, UtcTime

# What a final checkpoint must have measured before and after training on data.eval, by algorithm.
_LOSS = ("eval_loss_before", "eval_loss_after")
_REWARD = ("eval_reward_before", "eval_reward_after")
_ACCURACY = ("eval_accuracy_before", "eval_accuracy_after")
EVALUATION_METRICS: Mapping[str, tuple[str, ...]] = {
    "sft": _LOSS,
    "dpo": _LOSS + _ACCURACY,
    "kto": _LOSS + _ACCURACY,
    "orpo": _LOSS + _ACCURACY,
    "reward": _LOSS + _ACCURACY,
    "grpo": _REWARD + _ACCURACY,
    "multi_turn": _REWARD + _ACCURACY,
    "distillation": _LOSS,
    "custom": (),  # what the user's own loop measures is its own
}


class ModelVersion(Record):
    """`uri` is the model.tar.gz that SageMaker collected."""

    group: str
    version: int
    tenant: str
    run_id: str
    lineage: int
    step: int
    uri: str
    metrics: dict[str, float]
    status: Literal["registered"]
    created_at: UtcTime
