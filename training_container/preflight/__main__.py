"""`python -m training_container.preflight FOLDER`; the folder's `code` holds the user's sources."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from microtuning_core.domain.errors import MicrotuningError

from ..failures import JobFailure
from ..texts import text_of
from .findings import Finding, read_request, write
from .lengths import about_lengths
from .trials import about_user_code


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    request = read_request(folder)
    for about, findings in (
        ("code", about_user_code(folder, request)),
        ("data", about_lengths(folder, request)),
    ):
        for finding in _never_raising(about, findings):
            write(folder, finding)


def _never_raising(about: str, findings: Iterable[Finding]) -> Iterable[Finding]:
    """A check that fails is itself a finding: the run may still be a good one."""
    try:
        yield from findings
    except (MicrotuningError, JobFailure) as error:
        yield Finding("warning", about, text_of(error))
    except Exception as error:  # a tokenizer's own, say
        yield Finding("warning", about, f"could not be checked ({type(error).__name__}: {text_of(error)})")


if __name__ == "__main__":
    main(sys.argv[1:])
