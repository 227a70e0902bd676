"""The trainer's whole state at one moment: taken in milliseconds, written to disk while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from .models import is_adapter
from .randomness import State, write_random_states

WEIGHTS, OPTIMIZER = "model", "optimizer.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """What `save_state` writes.

    weights: copies by name (of an adapter its own alone), or None for the live model's.
    """

    model: Any
    tokenizer: Any
    weights: Mapping[str, Tensor] | None
    moments: Mapping[str, Tensor]
    chances: Sequence[State]

    def write(self, folder: Path) -> None:
        """As from_pretrained and `Engine.restore` read it; safetensors and JSON only."""
        write_weights(self.model, self.tokenizer, self.weights, folder / WEIGHTS)
        save_file(dict(self.moments), folder / OPTIMIZER)
        write_random_states(folder, self.chances)


def write_weights(model: Any, tokenizer: Any, weights: Mapping[str, Tensor] | None, folder: Path) -> None:
    # Without the flag peft asks the hub whether the vocabulary grew.
    options = {"save_embedding_layers": False} if is_adapter(model) else {}
    model.save_pretrained(folder, state_dict=weights, **options)
    tokenizer.save_pretrained(folder)


def bytes_of_state(model: Any) -> int:
    """Of a copy on the host: the weights that are kept, and two moments of those that are trained."""
    weights = list(model.parameters())
    whole = sum(int(weight.numel() * weight.element_size()) for weight in weights)
    trained = sum(int(weight.numel() * weight.element_size()) for weight in weights if weight.requires_grad)
    return 2 * trained + (trained if is_adapter(model) else whole)


def copied_weights(model: Any) -> dict[str, Tensor]:
    """Of an adapter what is trained, else all; two names of one tensor stay two names of one."""
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    wanted = {name: tensor for name, tensor in model.state_dict().items() if not is_adapter(model) or name in trained}
    copies = {_place(tensor): tensor for tensor in wanted.values()}
    copies = {place: copied(tensor) for place, tensor in copies.items()}
    return {name: copies[_place(tensor)] for name, tensor in wanted.items()}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


def copied(tensor: Tensor) -> Tensor:
    """On the host, in memory of its own."""
    return tensor.detach().to("cpu", copy=True)
