"""Every source of chance in a training process, saved to and restored from plain JSON and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state(generators: dict[str, torch.Generator]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors) of python's, numpy's, torch's and these generators' states."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    tensors = {"torch": torch.get_rng_state()}
    tensors |= {f"generator.{name}": generator.get_state() for name, generator in generators.items()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return plain, tensors


def restore_random_state(
    plain: dict[str, Any], tensors: dict[str, Tensor], generators: dict[str, torch.Generator]
) -> None:
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for name, generator in generators.items():
        generator.set_state(tensors[f"generator.{name}"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
