"""State "Admit run" -> queue `admissions` -> the run waits for a slot, or has one at once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry
from functions._environment import services
from functions._queue import Body, handle_messages
from microtuning_core.usecases.admit import admit


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, _process, _run_of)


def _run_of(body: Body) -> str | None:
    state = body["input"]
    return state.get("run_id") if isinstance(state, dict) else None


def _process(body: Body, record: SQSRecord) -> None:
    sent_at = datetime.fromtimestamp(int(record.attributes.sent_timestamp or 0) / 1000, UTC)
    admit(services(), body["token"], body["execution"], body["input"], sent_at)
