"""The user's own loss and the user's own loop, run in the training process itself (docs/custom.md).

    loss: {entry: "losses:mine"}                     def mine(logprobs, inputs): return loss, {"name": share}
    algorithm: {type: custom, entry: "loop:train"}   def train(engine, run): …

What they raise, or answer in a wrong form, ends the run as the user's, with the user's file and line.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microtuning_core.domain.errors import MicrotuningError

from .engine import Engine, LossFn, Metrics, MicroBatch
from .failures import JobFailure, PlatformFailure, UserFailure, is_out_of_memory
from .run import Run, Stopped
from .texts import text_of, traceback_of
from .user_code import PICKLED, Refusal, is_ours, load_entry, named, user_frame

Loop = Callable[[Engine, Run], Any]
_RUN_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def chosen_loss(run: Run, default: LossFn) -> LossFn:
    """The loss of the spec, or the recipe's own where the spec names none."""
    return load_loss(run) or default


def load_loss(run: Run) -> LossFn | None:
    """The loss that `loss.entry` names, with every answer checked; None where the spec names none.

    Raises:
        UserFailure: it cannot be loaded.
    """
    if run.spec.loss is None:
        return None
    entry, code = run.spec.loss.entry, run.job.tree.code
    what = f"The loss {named(entry, code)}"
    with blamed_on_user(what, code):
        function = load_entry(entry, code)

    def loss_fn(logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        given = logprobs.detach().requires_grad_()
        with blamed_on_user(what, code):
            answer = function(given, batch)
        try:
            loss, metrics = checked(answer)
        except Refusal as error:
            raise UserFailure(f"{what} {error}.", **definition(function)) from error
        return with_gradient(loss, given, logprobs, what, definition(function), code), metrics

    return loss_fn


def with_gradient(
    loss: Tensor, given: Tensor, logprobs: Tensor, what: str, written: dict[str, Any], code: Path
) -> Tensor:
    """The loss with its gradient taken here, where what goes wrong in it is still the user's, and handed on to `logprobs`.

    Raises:
        UserFailure: it has none, or it cannot be computed.
    """
    with blamed_on_user(what, code, otherwise=written):
        (gradient,) = torch.autograd.grad(loss, given, allow_unused=True)
    if gradient is None:
        raise UserFailure(f"{what} does not depend on logprobs: nothing would be learned from it.", **written)
    carried = (logprobs * gradient).sum()
    return carried + (loss.detach() - carried.detach())


def load_loop(run: Run) -> Loop:
    """The loop that `algorithm.entry` names; what it raises is the user's failure, a stop goes through.

    Raises:
        UserFailure: it cannot be loaded.
    """
    entry, code = run.settings.entry, run.job.tree.code
    what = f"The loop {named(entry, code)}"
    with blamed_on_user(what, code):
        function = load_entry(entry, code)

    if any(is_kind(function) for is_kind in _RUN_LATER):
        raise UserFailure(
            f"{what} is async or a generator: called, nothing of it runs. Write a plain def.", **definition(function)
        )

    def loop(engine: Engine, run: Run) -> None:
        with blamed_on_user(what, code):
            function(engine, run)

    return loop


def checked(answer: Any) -> tuple[Tensor, Metrics]:
    """A loss function's answer, `(loss, metrics)`: one number with a gradient, and metrics that are single numbers.

    Whether the loss is finite is for the optimizer step to see, as with every other loss.

    Raises:
        Refusal: it has another form.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Refusal(f"returned {_kind(answer)}; return a pair: loss, metrics")
    loss, metrics = answer
    if not isinstance(loss, Tensor):
        raise Refusal(f"returned {_kind(loss)} as the loss; return a tensor computed from logprobs")
    if loss.numel() != 1:
        raise Refusal(f"returned a loss of shape {list(loss.shape)}; return one number, as a sum gives it")
    if not loss.is_floating_point():
        raise Refusal(f"returned a loss of type {loss.dtype}, which cannot hold a gradient")
    if not loss.requires_grad:
        raise Refusal("returned a loss without a gradient: it was detached, or not computed from logprobs by torch")
    if not isinstance(metrics, Mapping):
        raise Refusal(f"returned {_kind(metrics)} as metrics; return a dict, {{}} for none")
    return loss.reshape(()), {name: _metric(name, value) for name, value in metrics.items()}


def _metric(name: Any, value: Any) -> Tensor:
    if not isinstance(name, str) or name == "loss":
        raise Refusal(f"named a metric {name!r}; a name is a text, and `loss` is taken")
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(())
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    raise Refusal(f"returned {_kind(value)} as the metric {name!r}; return one number")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


# --- whose fault it is -------------------------------------------------------------------------------------------------


@contextmanager
def blamed_on_user(what: str, code: Path, *, otherwise: dict[str, Any] | None = None) -> Iterator[None]:
    """Turn what user code raises into a UserFailure with its file and line, SystemExit too.

    otherwise: file and line where no frame of the traceback is the user's, as in a backward.

    Not a stop, nor a failure whose class is known, nor memory, nor a disk or network that failed under our own hands.
    """
    try:
        yield
    except Refusal as error:
        raise UserFailure(f"{what}: {error}") from error
    except (JobFailure, MicrotuningError, Stopped):
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        file, line = user_frame(error, code)
        if otherwise and (file is None or is_ours(file) or "site-packages" in file):
            file, line = otherwise["file"], otherwise["line"]
        if isinstance(error, OSError) and _came_through_us(error, file, line):
            raise PlatformFailure(f"{type(error).__name__}: {text_of(error)}") from error
        print(traceback_of(error), file=sys.stderr, flush=True)
        raise UserFailure(f"{what}: {type(error).__name__}: {text_of(error)}", file=file, line=line) from error


def _came_through_us(error: BaseException, file: str | None, line: int | None) -> bool:
    """Whether the user's line had called this package when it happened."""
    names = {PICKLED: file or ""}
    frames = [
        (names.get(each.filename, each.filename), each.lineno) for each in traceback.extract_tb(error.__traceback__)
    ]
    after = frames[frames.index((file or "", line)) + 1 :] if (file, line) in frames else []
    return any(is_ours(name) for name, _ in after)


def definition(function: Any) -> dict[str, Any]:
    """Where a function is written, as the fields of a failure; empty for what has no source."""
    found = inspect.unwrap(getattr(function, "func", function))
    written = getattr(found, "__code__", None)
    return {"file": written.co_filename, "line": written.co_firstlineno} if written else {}
