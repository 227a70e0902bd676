"""Where a policy comes from: a preset, a model directory or hub id, or the folder a checkpoint kept it in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from microtuning_core.domain.spec import ModelSpec

from ..failures import UserFailure
from .presets import character_tokenizer, preset_model

ADAPTER_FILE = "adapter_config.json"


def build_policy(
    spec: ModelSpec, *, source: str, texts: Iterable[str], seed: int, device: torch.device, head: str = "policy"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A fresh policy and its tokenizer.

    Args:
        spec: what the user asked for.
        source: directory or hub id of the base model; not read for a preset.
        texts: all text of the data sets, from which a preset's tokenizer is made.
        seed: of the random weights (a preset's, or a new adapter's).
    """
    if spec.arch:
        characters = character_tokenizer(texts)
        return on_device(preset_model(spec.arch, characters, seed), device), characters
    tokenizer = load_tokenizer(source, spec.revision)
    base = load_base(spec, source, device)
    if spec.effective_adapter == "none":
        return base, tokenizer
    torch.manual_seed(seed)
    return get_peft_model(base, lora_config(spec)), tokenizer


def restore_policy(
    spec: ModelSpec, folder: Path, *, source: str, device: torch.device, head: str = "policy"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The policy as `folder` (written by save_pretrained) holds it: all weights, or an adapter on the base model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if (folder / ADAPTER_FILE).exists():
        return PeftModel.from_pretrained(load_base(spec, source, device), folder, is_trainable=True), tokenizer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=choose_dtype(spec, device))
    return on_device(model, device), tokenizer


def is_adapter(model: Any) -> bool:
    return isinstance(model, PeftModel)


def load_base(spec: ModelSpec, source: str, device: torch.device) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, revision=spec.revision or "main", dtype=choose_dtype(spec, device), trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UserFailure(f"The model {spec.base!r} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    return on_device(model, device)


def on_device(model: Any, device: torch.device) -> Any:
    """transformers types `.to` as taking a model alone."""
    return model.to(device)


def load_tokenizer(source: str, revision: str | None) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserFailure(f"No tokenizer at {source!r}: {str(error).strip().splitlines()[0]}") from error


def lora_config(spec: ModelSpec) -> LoraConfig:
    """LoRA on every linear layer but the head, unless the user names modules; no dropout."""
    targets = list(spec.target_modules) if spec.target_modules else "all-linear"
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=0.0,
        target_modules=targets,
    )


def choose_dtype(spec: ModelSpec, device: torch.device) -> torch.dtype:
    """float32 on a CPU, whatever was asked (bfloat16 is slow or missing there); frozen weights under an adapter may be
    bfloat16 on an accelerator, trained ones stay float32 unless the user says otherwise."""
    if device.type == "cpu" or spec.dtype == "float32":
        return torch.float32
    if spec.dtype == "bfloat16" or spec.effective_adapter != "none":
        return torch.bfloat16
    return torch.float32


def stop_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's and those the model's generation settings name."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    found = {token for token in [tokenizer.eos_token_id, *listed] if token is not None}
    if not found:
        raise UserFailure("The model has no end-of-sequence token, so no completion could ever end.")
    return tuple(sorted(found))
