"""Full weights spread over the processes (FSDP2): each keeps a part of every weight, gradient and moment.

A decoder layer's weights come together when it computes and part again after it. For drawing and for log-probabilities
without a gradient all weights come together once (`whole`) and the processes compute independently: a gathering for every
layer of every token would cost more than it saves. So a GPU must hold the weights whole, but not their gradients and
moments, which are three times as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def shard(model: Any, *, size: int, device: torch.device) -> int:
    """Spread the model's weights, layer by layer; the bytes a process sends for one forward and backward.

    A model may come on the CPU: each layer goes to `device` when it is spread, so that no GPU ever holds all of it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (size,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for part in sharded_parts(model):
        part.set_gradient_divide_factor(1.0)  # gradients are added up, as everywhere
        part.set_force_sum_reduction_for_comms(True)
    layers_bytes = sum(bytes_of(layer) for layer in decoder_layers(model))
    # Layers: gathered for the forward and again for the backward, their gradients scattered. The rest is gathered once.
    return (2 * bytes_of(model) + layers_bytes) * (size - 1) // size


def bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def decoder_layers(model: Any) -> list[Any]:
    """What transformers itself calls the modules that must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def sharded_parts(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_reshard_after_forward")]


@contextmanager
def whole(model: Any) -> Iterator[None]:
    """Inside, every process holds all weights, and a forward without gradient talks to nobody. Entering is a collective.

    A model that is not sharded is whole anyway.
    """
    parts = sharded_parts(model)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread; a collective if it is."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def spread_like(value: Tensor, weight: Any) -> Tensor:
    """`value` as it lies beside `weight`: this process's part of it if the weight is spread."""
    value = value.to(weight.device)
    if not hasattr(weight, "full_tensor") or value.shape != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Everyone read the same file, so nobody needs the main process's copy.
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


def whole_state(model: Any, *, keep: bool) -> Mapping[str, Tensor] | None:
    """All weights of a sharded model on the CPU, one gathered after the other; None for one that save_pretrained can read.

    keep: on the process that writes; the others take part in the gathering.
    """
    if not sharded_parts(model):
        return None
    gathered = ((name, full(weight.detach())) for name, weight in model.named_parameters())
    return {name: weight.cpu() for name, weight in gathered if keep}
