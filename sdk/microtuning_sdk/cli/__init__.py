"""The command `microtuning`: the verbs of the SDK, one module a group, each of which adds its own parsers.

Exit status: 0 success (also after Ctrl-C on a run that goes on), 1 a failed run or a stage that cannot be reached, 2 a
mistake in the request, 3 a stopped run. Results go to stdout, everything else to stderr; no traceback is ever shown, but
with MICROTUNING_DEBUG=1 that of an error nobody foresaw.

Importing this module loads next to nothing: the rest is loaded in `main`, where Ctrl-C is answered.
To add a verb: `add_parsers` of its module, the heading in docs/cli.md (a test compares the two).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as typing's, which would take its time
if TYPE_CHECKING:
    from collections.abc import Sequence

SUCCESS, FAILED, USAGE, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Without `argv` it is the program itself, about to end."""
    is_program = argv is None
    try:
        _load(leave_when_interrupted=is_program)
        from microtuning_sdk._interrupts import one_interrupt
        from microtuning_sdk.cli._parser import build_parser

        with one_interrupt(ends_program=is_program):
            arguments = build_parser().parse_args(argv)
            return int(arguments.verb(arguments) or SUCCESS)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; without this, Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except Exception as error:
        text, status = _explained(error)
        print(f"microtuning: {text}", file=sys.stderr)
        return status


def _load(*, leave_when_interrupted: bool) -> None:
    """Loads the rest. Nothing is begun yet, and an interrupt inside an import may get lost; so it ends the program."""
    from signal import SIGINT, default_int_handler, getsignal, signal

    is_ours = leave_when_interrupted and getsignal(SIGINT) is default_int_handler
    if is_ours:
        signal(SIGINT, lambda *_: os._exit(INTERRUPTED))
    import microtuning_sdk._interrupts
    import microtuning_sdk.cli._parser  # noqa: F401

    if is_ours:
        signal(SIGINT, default_int_handler)


def _explained(error: Exception) -> tuple[str, int]:
    """What is said of an error, and the exit status."""
    from botocore.exceptions import BotoCoreError, ClientError

    from microtuning_core.domain.errors import MicrotuningError, sentence

    if isinstance(error, MicrotuningError):
        return str(error), status_of(error)
    if isinstance(error, BotoCoreError | ClientError):
        return f"The stage did not do what was asked: {sentence(str(error))} See `microtuning doctor`.", FAILED
    if isinstance(error, OSError):
        return sentence(str(error)), FAILED
    return _bug(error), FAILED


def _bug(error: Exception) -> str:
    """An error that nobody foresaw; its traceback is for those who asked for it."""
    from traceback import print_exception

    from microtuning_core.domain.errors import sentence

    if os.environ.get("MICROTUNING_DEBUG") == "1":
        print_exception(error)
    words = sentence(f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
    return f"{words} This is a bug; run again with MICROTUNING_DEBUG=1 for the traceback."


def status_of(error: Exception) -> int:
    """By kind: a run that was stopped, a mistake in the request, or anything else."""
    from microtuning_core.domain import errors

    mistakes = (
        errors.BudgetExceeded,
        errors.InvalidCode,
        errors.InvalidData,
        errors.InvalidName,
        errors.InvalidSpec,
        errors.LocalRequestRefused,
        errors.NothingFits,
        errors.RunNotFound,
        errors.RunWouldFail,
        errors.SubmitRefused,
        errors.UnknownTenant,
    )
    if isinstance(error, errors.RunStopped):
        return STOPPED
    return USAGE if isinstance(error, mistakes) else FAILED


__all__ = ["FAILED", "INTERRUPTED", "STOPPED", "SUCCESS", "USAGE", "main", "status_of"]
