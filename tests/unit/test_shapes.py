"""How large a model is, from a config.json that may hold anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.planning import ModelShape
from microtuning_core.domain.shapes import shape_from_config

LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128_256, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "torch_dtype": "bfloat16", "num_local_experts": None,
    "tie_word_embeddings": False,
}  # fmt: skip

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def test_a_usual_config_gives_the_size_within_a_tenth() -> None:
    shape = shape_from_config(LLAMA)
    assert shape is not None
    assert abs(shape.parameters / 8.03e9 - 1) < 0.1
    assert (shape.hidden_size, shape.layers, shape.bytes_per_weight) == (4096, 32, 2)


@given(JSON | st.dictionaries(st.sampled_from(sorted(LLAMA)), JSON).map(lambda given: LLAMA | given))
def test_any_json_gives_a_shape_or_none(config: Any) -> None:
    shape = shape_from_config(json.loads(json.dumps(config)))
    assert shape is None or isinstance(shape, ModelShape)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, True, 1.5, "4096", [4096], {}, 10**400, float("nan")])
def test_a_size_that_is_no_count_is_not_believed(name: str, value: object) -> None:
    assert shape_from_config(LLAMA | {name: value}) is None


@pytest.mark.parametrize("value", [0, -8, "8", [8], 10**400, float("inf")])
def test_a_lesser_name_that_is_no_count_is_as_if_it_were_not_there(value: object) -> None:
    without = {key: each for key, each in LLAMA.items() if key != "num_key_value_heads"}
    assert shape_from_config(LLAMA | {"num_key_value_heads": value}) == shape_from_config(without)
