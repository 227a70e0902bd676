"""Every source of chance in a training process, saved to and restored from plain JSON and tensors."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

State = tuple[dict[str, Any], dict[str, Tensor]]
Generators = dict[str, torch.Generator]


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Python's and numpy's numbers are the same on every process, for what they all decide alike; torch's, which dropout
    draws from, are each process's own."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed if rank == 0 else _own_seed(str(seed).encode(), rank))


def _own_seed(origin: bytes, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(origin + f"|{rank}".encode()).digest()[:7], "big")


def write_random_states(folder: Path, states: Sequence[State]) -> None:
    """One JSON and one tensor file a process; the first one's have no number."""
    for rank, (plain, tensors) in enumerate(states):
        json_path, tensors_path = _paths(folder, rank)
        json_path.write_text(json.dumps(plain), encoding="utf-8")
        save_file(tensors, tensors_path)


def read_random_state(folder: Path, rank: int, generators: Generators) -> None:
    """Go on with this process's numbers. One that the checkpoint does not know begins at a seed made from the first
    one's state and its rank, so that the same change of processes always gives the same numbers."""
    json_path, tensors_path = _paths(folder, rank)
    is_new = not json_path.exists()
    json_path, tensors_path = _paths(folder, 0) if is_new else (json_path, tensors_path)
    tensors = load_file(tensors_path)
    restore_random_state(json.loads(json_path.read_text("utf-8")), tensors, generators)
    if is_new:
        torch.manual_seed(_own_seed(tensors["torch"].numpy().tobytes(), rank))


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    name = f"random.rank{rank}" if rank else "random"
    return folder / f"{name}.json", folder / f"{name}.safetensors"


def random_state(generators: Generators) -> State:
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


def restore_random_state(plain: dict[str, Any], tensors: dict[str, Tensor], generators: Generators) -> None:
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for name, generator in generators.items():
        generator.set_state(tensors[f"generator.{name}"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
