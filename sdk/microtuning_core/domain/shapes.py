"""How large a model is, from what is known before it is loaded: its config.json, or the size in its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from microtuning_core.domain.planning import ModelShape

_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s?([bm])(?![a-z0-9])", re.IGNORECASE)
_MOST = 10**9  # of anything that a config.json counts
_MOST_PARAMETERS = 10**14  # a name may hold any number
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def shape_from_config(config: Any) -> ModelShape | None:
    """The shape in a transformers config.json, or None when it lacks the usual names or holds something else in them.

    Parameters are counted as embeddings (twice unless tied) and per layer the attention (with grouped keys and values) and
    a gated MLP: 4 to 10 % from the truth on Llama, Qwen and Gemma.
    """
    if not isinstance(config, Mapping):
        return None
    hidden = _count(config, "hidden_size", "n_embd")
    layers = _count(config, "num_hidden_layers", "n_layer")
    vocabulary = _count(config, "vocab_size")
    if hidden is None or layers is None or vocabulary is None:
        return None
    heads = _count(config, "num_attention_heads", "n_head") or 1
    key_value_share = (_count(config, "num_key_value_heads") or heads) / heads
    inner = _count(config, "intermediate_size") or 4 * hidden
    experts = _count(config, "num_local_experts") or 1
    per_layer = 2 * hidden * hidden * (1 + key_value_share) + 3 * hidden * inner * experts
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return ModelShape(
        parameters=int(embeddings + layers * per_layer),
        hidden_size=hidden,
        layers=layers,
        vocabulary=vocabulary,
        bytes_per_weight=_DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4),
    )


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a number of things; a file may hold anything under any name."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 < value <= _MOST), None)


def shape_from_name(name: str) -> ModelShape | None:
    """A rough shape from "Qwen3-0.6B" or "SmolLM2-135M": layers and width of the usual decoder of that size."""
    match = _SIZE.search(name.replace("-", " ").replace("_", " "))
    if not match:
        return None
    size = float(match[1]) * (1e9 if match[2].lower() == "b" else 1e6)
    if not 0 < size <= _MOST_PARAMETERS:
        return None
    parameters = int(size)
    # Usual decoders are about 100 times as wide as deep and have 12 x width^2 weights a layer.
    hidden = max(256, round((parameters * 100 / 12) ** (1 / 3) / 64) * 64)
    layers = max(4, round(hidden / 100))
    return ModelShape(parameters=parameters, hidden_size=hidden, layers=layers, vocabulary=151_936, bytes_per_weight=2)
