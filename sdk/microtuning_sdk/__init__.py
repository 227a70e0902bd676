"""Microtuning: post-training of language models as SageMaker training jobs, or on this machine through the same code.

from microtuning_sdk import RLTrainer
run = RLTrainer(model_arch="Transformer", reward_func=exact_match).fit("train.jsonl", "eval.jsonl")
"""

from microtuning_core.domain.errors import (
    BudgetExceeded,
    InvalidCode,
    InvalidData,
    InvalidName,
    InvalidSpec,
    LocalCloudError,
    MicrotuningError,
    NothingFits,
    Problem,
    RunFailed,
    RunNotFound,
    RunStopped,
    StageUnreachable,
    SubmitRefused,
)
from microtuning_sdk._connection import Stage, connect
from microtuning_sdk._run import Cost, Model, Run
from microtuning_sdk._trainers import RLTrainer, ScriptTrainer, SFTTrainer

__all__ = [
    "BudgetExceeded",
    "Cost",
    "InvalidCode",
    "InvalidData",
    "InvalidName",
    "InvalidSpec",
    "LocalCloudError",
    "MicrotuningError",
    "Model",
    "NothingFits",
    "Problem",
    "RLTrainer",
    "Run",
    "RunFailed",
    "RunNotFound",
    "RunStopped",
    "SFTTrainer",
    "ScriptTrainer",
    "Stage",
    "StageUnreachable",
    "SubmitRefused",
    "connect",
]
