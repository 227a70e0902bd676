"""The command `microtuning`: the verbs of the SDK, one module a group, each of which adds its own parsers.

Exit status: 0 success (also after Ctrl-C on a run that goes on), 1 a failed run or a stage that cannot be reached, 2 a
mistake in the request, 3 a stopped run. Results go to stdout, everything else to stderr; no traceback is ever shown.

To add a verb: `add_parsers` of its module, the heading in docs/cli.md (a test compares the two).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from microtuning_core.domain.errors import (
    BudgetExceeded,
    InvalidCode,
    InvalidData,
    InvalidName,
    InvalidSpec,
    MicrotuningError,
    NothingFits,
    RunNotFound,
    RunStopped,
    SubmitRefused,
)
from microtuning_sdk.cli._parser import build_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

SUCCESS, FAILED, USAGE, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130

_MISTAKES = (
    BudgetExceeded,
    InvalidCode,
    InvalidData,
    InvalidName,
    InvalidSpec,
    NothingFits,
    RunNotFound,
    SubmitRefused,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.verb(arguments) or SUCCESS)
    except MicrotuningError as error:
        print(f"microtuning: {error}", file=sys.stderr)
        return status_of(error)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; without this, Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except (BotoCoreError, ClientError) as error:
        print(f"microtuning: The stage did not do what was asked: {error} See `microtuning doctor`.", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"microtuning: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def status_of(error: MicrotuningError) -> int:
    if isinstance(error, RunStopped):
        return STOPPED
    return USAGE if isinstance(error, _MISTAKES) else FAILED


__all__ = ["FAILED", "INTERRUPTED", "STOPPED", "SUCCESS", "USAGE", "main", "status_of"]
