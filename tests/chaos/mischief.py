"""A loss that misbehaves when asked to: the faults that only a training process can have itself.

A file of its name in the folder of wishes asks for a fault; whoever meets it takes the file away and suffers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_S = 0.25  # so that there is a middle of a run to do something in
FOR_GOOD = "nan_for_good"  # the one wish that stays


def mischievous(wishes: str) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """The plain policy gradient where there are advantages, the likelihood elsewhere; slow, and open to wishes."""
    folder = wishes  # a closure that travels by value; the job runs on this machine

    def loss(logprobs: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        import time

        from tests.chaos.mischief import STEP_S, suffer

        time.sleep(STEP_S)
        weight = inputs.advantages_N if inputs.advantages_N.numel() else 1.0
        return suffer(folder, -(weight * logprobs).sum() / inputs.totals.tokens), {}

    return loss


def suffer(folder: str, loss: Any) -> Any:
    """What is asked for, once; else the loss as it is."""
    if (Path(folder) / FOR_GOOD).exists():
        return _not_a_number(loss)
    for name, happens in _HAPPENINGS.items():
        if _taken(Path(folder) / name):
            return happens(loss)
    return loss


def _taken(wish: Path) -> bool:
    """Whether this process is the one that the wish comes to."""
    try:
        wish.rename(wish.with_suffix(".done"))
    except FileNotFoundError:
        return False
    return True


def _hang(loss: Any) -> Any:
    import time

    time.sleep(3600)
    return loss


def _run_out_of_memory(loss: Any) -> Any:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _not_a_number(loss: Any) -> Any:
    return loss * float("nan")


def _fill_the_disk(loss: Any) -> Any:
    """From here on no manifest of this process can be written."""
    import errno

    from training_container import checkpoints

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints.write_durably = full
    return loss


def _die_while_writing(loss: Any) -> Any:
    """The next checkpoint ends in its second file, and the process with it."""
    import os
    import signal

    from training_container import checkpoints

    seal, sealed = checkpoints._seal, []

    def dying(folder: Path, path: Path) -> Any:
        sealed.append(path)
        if len(sealed) > 1:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return seal(folder, path)

    checkpoints._seal = dying
    return loss


_HAPPENINGS = {
    "hang": _hang,
    "oom": _run_out_of_memory,
    "nan": _not_a_number,
    "disk_full": _fill_the_disk,
    "torn": _die_while_writing,
}
