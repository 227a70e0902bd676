"""Microtuning: post-training of language models as SageMaker training jobs, or on this machine through the same code.

from microtuning_sdk import RLTrainer
run = RLTrainer(model_arch="Transformer", reward_func=exact_match).fit("train.jsonl", "eval.jsonl")

A name is loaded when it is first used, so that the command line answers Ctrl-C while boto3 and pydantic load.
"""

from importlib import import_module

TYPE_CHECKING = False  # as typing's, which would take its time
if TYPE_CHECKING:
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
        RunWouldFail,
        StageUnreachable,
        SubmitRefused,
    )
    from microtuning_sdk._connection import Stage, connect
    from microtuning_sdk._rewards import Judge
    from microtuning_sdk._run import Cost, Model, Run
    from microtuning_sdk._trainers import (
        DistillationTrainer,
        DPOTrainer,
        KTOTrainer,
        LoopTrainer,
        ORPOTrainer,
        RewardTrainer,
        RLTrainer,
        ScriptTrainer,
        SFTTrainer,
    )

__all__ = [
    "BudgetExceeded",
    "Cost",
    "DPOTrainer",
    "DistillationTrainer",
    "InvalidCode",
    "InvalidData",
    "InvalidName",
    "InvalidSpec",
    "Judge",
    "KTOTrainer",
    "LocalCloudError",
    "LoopTrainer",
    "MicrotuningError",
    "Model",
    "NothingFits",
    "ORPOTrainer",
    "Problem",
    "RLTrainer",
    "RewardTrainer",
    "Run",
    "RunFailed",
    "RunNotFound",
    "RunStopped",
    "RunWouldFail",
    "SFTTrainer",
    "ScriptTrainer",
    "Stage",
    "StageUnreachable",
    "SubmitRefused",
    "connect",
]

_ELSEWHERE = {
    "Stage": "_connection",
    "connect": "_connection",
    "Cost": "_run",
    "Model": "_run",
    "Run": "_run",
    "Judge": "_rewards",
    "DistillationTrainer": "_trainers",
    "DPOTrainer": "_trainers",
    "KTOTrainer": "_trainers",
    "LoopTrainer": "_trainers",
    "ORPOTrainer": "_trainers",
    "RewardTrainer": "_trainers",
    "RLTrainer": "_trainers",
    "ScriptTrainer": "_trainers",
    "SFTTrainer": "_trainers",
}


def __getattr__(name: str) -> object:
    """A public name: an error, or what `_ELSEWHERE` says."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_ELSEWHERE[name]}" if name in _ELSEWHERE else "microtuning_core.domain.errors"
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
