"""Keys and values of what a model has read, made larger and smaller row by row. Any transformers cache will do."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer with room for what will come: new tokens are written in place, where DynamicLayer copies all it has."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys_P_H_L_D: Tensor, values_P_H_L_D: Tensor, rows: Tensor, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.is_initialized = keys_P_H_L_D.device, True
        self._keys, self._values = (_with_room(each, rows, room) for each in (keys_P_H_L_D, values_P_H_L_D))
        self._show(keys_P_H_L_D.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start, end = self._length, self._length + key_states.shape[2]
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._keys, self._values = self._keys[beam_idx], self._values[beam_idx]
        self._show(self._length)

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]


def _with_room(states_P_H_L_D: Tensor, rows_K: Tensor, room: int) -> Tensor:
    _, heads, length, size = states_P_H_L_D.shape
    found = states_P_H_L_D.new_empty(len(rows_K), heads, length + room, size)
    found[:, :, :length] = states_P_H_L_D[rows_K]
    return found


def fork(cache: Any, rows: Tensor, *, room: int = 0) -> None:
    """Make the cache hold these of its rows (one may be taken several times, or not at all), with room for more tokens."""
    if not room or not hasattr(cache, "layers"):
        cache.reorder_cache(rows)
        return
    for index, layer in enumerate(cache.layers):
        if _is_whole(layer):
            cache.layers[index] = GrowingLayer(layer.keys, layer.values, rows, room)
        else:
            layer.reorder_cache(rows)


def is_whole(cache: Any) -> bool:
    """Whether every layer keeps every token, in the order they came."""
    return hasattr(cache, "layers") and all(_is_whole(layer) for layer in cache.layers)


def _is_whole(layer: Any) -> bool:
    return type(layer) is DynamicLayer and layer.keys is not None and layer.keys.dim() == 4
