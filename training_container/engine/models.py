"""Where a policy comes from: a preset, a model directory or hub id, or the folder a checkpoint kept it in."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)

from microtuning_core.domain.spec import ModelSpec

from ..failures import UserFailure, loading
from .parallel import World
from .precision import FLOAT32, Precision, choose_precision, computing_in, trained_in_float32
from .presets import character_tokenizer, preset_model

Head = Literal["policy", "score"]

ADAPTER_FILE = "adapter_config.json"


def build_policy(
    spec: ModelSpec,
    *,
    source: str,
    texts: Iterable[str],
    seed: int,
    device: torch.device,
    head: Head = "policy",
    world: World | None = None,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A fresh policy and its tokenizer.

    Args:
        spec: what the user asked for.
        source: directory or hub id of the base model; not read for a preset.
        texts: all text of the data sets, from which a preset's tokenizer is made.
        seed: of the random weights (a preset's, a new adapter's, a new score head's).
        head: "score" gives a row one number in place of a distribution over tokens.
    """
    if spec.arch:
        tokenizer: Any = character_tokenizer(texts)
        model: Any = preset_model(spec.arch, tokenizer, seed, head=head)
    else:
        tokenizer = load_tokenizer(source, spec.revision)
        torch.manual_seed(seed)
        model = load_base(spec, source, where_loaded(spec, device, world), head=head, tokenizer=tokenizer)
        if spec.effective_adapter != "none":
            torch.manual_seed(seed)
            model = get_peft_model(model, lora_config(spec, head))
    return made_ready(model, spec, device, world), tokenizer


def restore_policy(
    spec: ModelSpec,
    folder: Path,
    *,
    source: str,
    device: torch.device,
    head: Head = "policy",
    world: World | None = None,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The policy as `folder` (written by save_pretrained) holds it: all weights, or an adapter on the base model.

    Raises:
        UserFailure: the folder holds an adapter and the spec wants none, or the other way round.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # nosec B615 # a checkpoint's folder
    has_adapter, wants_adapter = (folder / ADAPTER_FILE).exists(), spec.effective_adapter != "none"
    if has_adapter != wants_adapter:
        held = "an adapter" if has_adapter else "all weights"
        raise UserFailure(
            f"model.adapter is {spec.effective_adapter}, but the checkpoint holds {held}. "
            "Resume with the adapter it was made with, or start a new run."
        )
    if has_adapter:
        base = load_base(spec, source, device, head=head, tokenizer=tokenizer)
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    else:
        model = _class_of(head).from_pretrained(folder, dtype=torch.float32)
    return made_ready(model, spec, device, world), tokenizer


def load_frozen(source: str, revision: str | None, device: torch.device) -> Any:
    """A model to be asked and not trained, as a distillation's teacher; half the memory where the GPU has bfloat16."""
    unspecified = ModelSpec(base="any/model", adapter="lora")  # `source` may be a directory, which a spec cannot name
    precision = choose_precision(unspecified, device)
    model = _from_pretrained(source, revision, "policy", what=f"The model {source!r}", dtype=precision.frozen)
    frozen = on_device(model, device).eval().requires_grad_(False)
    return computing_in(frozen, device, precision.computes)


def is_adapter(model: Any) -> bool:
    return isinstance(model, PeftModel)


# --- loading -------------------------------------------------------------------------------------------------------------


def load_base(
    spec: ModelSpec, source: str, device: torch.device, *, head: Head = "policy", tokenizer: Any = None
) -> Any:
    """The model that training begins from: quantized for qlora, in its frozen dtype under an adapter, else in float32."""
    precision, options = choose_precision(spec, device), {}
    if spec.effective_adapter == "qlora":
        refuse_qlora_without_its_needs(device)
        options = {"quantization_config": four_bits(precision), "device_map": {"": device}}
    if head == "score":
        options["pad_token_id"] = padding_apart(tokenizer)
    dtype = precision.frozen if spec.effective_adapter != "none" else torch.float32
    what = f"The model {spec.base!r}"
    model = _from_pretrained(source, spec.revision, head, what=what, dtype=dtype, **options)
    return model if spec.effective_adapter == "qlora" else on_device(model, device)


def _from_pretrained(source: str, revision: str | None, head: Head, *, what: str, **options: Any) -> Any:
    """Raises UserFailure where its files cannot be read, or lack weights that would be random then."""
    if head == "score":
        options["num_labels"] = 1
    with loading(what):
        model, told = _class_of(head).from_pretrained(
            source, revision=revision or "main", trust_remote_code=False, output_loading_info=True, **options
        )
        lacking = sorted(name for name in told["missing_keys"] if head == "policy" or not _is_of_a_head(name))
        if lacking:
            raise UserFailure(
                f"{what} has no weights {', '.join(lacking[:3])}: they would be random. Give a whole model."
            )
        return model


def _is_of_a_head(name: str) -> bool:
    """A model that is to score begins without the head that it learns."""
    return name.split(".")[0] in ("score", "classifier")


def _class_of(head: Head) -> Any:
    return AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM


def on_device(model: Any, device: torch.device) -> Any:
    """transformers types `.to` as taking a model alone."""
    return model.to(device)


def where_loaded(spec: ModelSpec, device: torch.device, world: World | None) -> torch.device:
    """On the CPU when it is spread over GPUs afterwards, of which none may have room for all of it."""
    return torch.device("cpu") if world and world.shards and spec.effective_adapter == "none" else device


def made_ready(model: Any, spec: ModelSpec, device: torch.device, world: World | None) -> Any:
    """To be trained: recomputing, in its dtypes, and on its device or spread over those of all processes."""
    if spec.gradient_checkpointing:
        # By its name before transformers 5.24 or since. The reentrant kind would need an input with a gradient, which an
        # adapter's first layer has not.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    precision = FLOAT32 if spec.arch else choose_precision(spec, device)
    model = computing_in(trained_in_float32(model), device, precision.computes)
    if world and world.shards and not is_adapter(model):
        world.shard(model, device)
        return model
    return model if spec.effective_adapter == "qlora" else on_device(model, device)


def load_tokenizer(source: str, revision: str | None) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserFailure(f"No tokenizer at {source!r}: {str(error).strip().splitlines()[0]}") from error


def padding_apart(tokenizer: Any) -> int:
    """The padding token of a score model, which finds a row's end as its last token that is none: so it may not be the one
    that ends a text. The tokenizer keeps it, so that whoever loads both pads alike."""
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        apart = [
            token for token in (tokenizer.unk_token, tokenizer.bos_token) if token and token != tokenizer.eos_token
        ]
        if not apart:
            raise UserFailure(
                "The model's tokenizer has no token to pad with but the one that ends a text, so a score model could not "
                "tell where a row ends. Give its tokenizer_config.json a pad_token of its own."
            )
        tokenizer.pad_token = apart[0]
    return int(tokenizer.pad_token_id)


# --- adapters ------------------------------------------------------------------------------------------------------------


def lora_config(spec: ModelSpec, head: Head = "policy") -> LoraConfig:
    """LoRA on every linear layer but the head, unless the user names modules. A new score head is trained whole with it."""
    targets = list(spec.target_modules) if spec.target_modules else "all-linear"
    return LoraConfig(
        task_type="SEQ_CLS" if head == "score" else "CAUSAL_LM",
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=spec.dropout,
        target_modules=targets,
    )


def four_bits(precision: Precision) -> BitsAndBytesConfig:
    """Frozen weights as 4-bit normal floats with their scales quantized too (Dettmers et al. 2023, eqs. 4-6)."""
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=precision.computes,
    )


def refuse_qlora_without_its_needs(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserFailure(
            "model.adapter is qlora, which needs a GPU, and this machine has none. Use adapter: lora, or name a GPU "
            "type in compute.instance."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserFailure(
            "model.adapter is qlora, which needs bitsandbytes, and it is not installed. Use our image, `pip install "
            "bitsandbytes` in your own, or use adapter: lora."
        )


def stop_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's and those the model's generation settings name."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    found = {token for token in [tokenizer.eos_token_id, *listed] if token is not None}
    if not found:
        raise UserFailure("The model has no end-of-sequence token, so no completion could ever end.")
    return tuple(sorted(found))
