"""Messages of a queue, one by one: only those that failed go back, and a failure is written down where people look."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.batch import BatchProcessor, EventType, process_partial_response
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import logger, metrics
from functions._environment import services
from microtuning_core.domain.errors import MicrotuningError

Body = dict[str, Any]


def handle_messages(
    event: dict[str, Any],
    context: LambdaContext,
    process: Callable[[Body, SQSRecord], None],
    run_of: Callable[[Body], str | None],
) -> dict[str, Any]:
    """Runs `process` on every message's JSON body; the answer names the messages that must come back.

    Args:
        process: does the work; what it raises sends its message back to the queue, and after a few times to the
            dead-letter queue.
        run_of: the run a body is about, where that can be told, so that the run's events can show the error.
    """

    def one(record: SQSRecord) -> None:
        body = _json_object(record.body)
        try:
            process(body, record)
        except Exception as error:
            _write_down(run_of(body), context.function_name, error)
            raise

    metrics.add_metric(name="Messages", unit=MetricUnit.Count, value=len(event["Records"]))
    processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)
    return dict(process_partial_response(event, one, processor, context))


def _json_object(text: str) -> Body:
    """What is no JSON object fails where a field of it is wanted, and ends in the dead-letter queue with its text."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"unreadable": text}


def _write_down(run_id: str | None, function: str, error: Exception) -> None:
    """A function that cannot even do this (its table is denied to it, say) still has its log and the dead-letter queue."""
    message = str(error) if isinstance(error, MicrotuningError) else f"{type(error).__name__}: {error}"
    logger.exception("message failed", extra={"run_id": run_id})
    metrics.add_metric(name="MessagesFailed", unit=MetricUnit.Count, value=1)
    if run_id is None:
        return
    try:
        services().runs.note(run_id, "handler_error", f"{function}: {message}")
    except Exception:
        logger.exception("the error could not be written to the run's events", extra={"run_id": run_id})
