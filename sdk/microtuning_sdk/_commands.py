"""A word to a run that exists: put as an object, done by the stage, answered in a file of its own.

tenants/<t>/commands/<run_id>/<id>.json   ->   tenants/<t>/receipts/<run_id>.<id>.json
{"verb": "rollback", "step": 40, …}            {"command_id": …, "run_id": …}  or  {"command_id": …, "errors": […]}
"""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.command import MOST_USD, Command, Verb
from microtuning_core.domain.errors import CommandRefused, InvalidSpec, Problem, StageUnreachable
from microtuning_core.domain.layout import answer_key, command_key

if TYPE_CHECKING:
    from microtuning_sdk._connection import Stage

ANSWER_TIMEOUT_S = 180.0
_POLLS_S = (0.05, 0.1, 0.2, 0.4, 0.8)


def give(stage: Stage, run_id: str, verb: Verb, **details: Any) -> str:
    """Puts the command; its id. What becomes of it is for `answer_to` to tell."""
    command = Command(verb=verb, issued_at=datetime.now(UTC), client_id="microtuning-sdk", **details)
    command_id = uuid.uuid4().hex
    stage.objects.put(command_key(run_id, command_id), command.model_dump_json().encode())
    return command_id


def budget_of(usd: Decimal | float | str) -> Decimal:
    """The amount, or InvalidSpec by field; a float counts as it is written."""
    try:
        amount = Decimal(str(usd))
    except InvalidOperation:
        amount = Decimal("NaN")
    if not Decimal(0) < amount < MOST_USD:  # false of NaN, too
        raise InvalidSpec([Problem("usd", f"is an amount above 0 and below {MOST_USD:,} USD, and not {str(usd)!r}")])
    return amount


def answer_to(stage: Stage, run_id: str, command_id: str) -> dict[str, Any]:
    """What the stage did.

    Raises:
        CommandRefused: it did nothing; with the reasons by field.
        StageUnreachable: no answer in time.
    """
    key, tries = answer_key(run_id, command_id), 0
    ends_at_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < ends_at_s:
        answer = stage.objects.read_json(key)
        if answer is not None:
            return _accepted(run_id, answer)
        time.sleep(_POLLS_S[min(tries, len(_POLLS_S) - 1)])
        tries += 1
    raise StageUnreachable(
        stage.names.stage, f"gave no answer in {ANSWER_TIMEOUT_S:.0f} s", next_step=_look(stage, key)
    )


def _look(stage: Stage, key: str) -> str:
    return (
        f"The command is put and may still be done: look for s3://{stage.bucket}/{key}, then at `microtuning doctor`."
    )


def _accepted(run_id: str, answer: dict[str, Any]) -> dict[str, Any]:
    if errors := answer.get("errors"):
        raise CommandRefused(run_id, [Problem(each["field"], each["message"], each.get("line")) for each in errors])
    return answer
