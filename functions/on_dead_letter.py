"""Every dead-letter queue -> whoever waited for the message is told, with the last error its handler met."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, logger, metrics
from functions._environment import environment, services
from functions._queue import Body, handle_messages
from microtuning_core.usecases.dead_letters import bury


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, _process, lambda _body: None)


def _process(body: Body, record: SQSRecord) -> None:
    queue = record.event_source_arn.rsplit(":", 1)[-1]
    queue = queue.removeprefix(f"{environment().names.stack}-").removesuffix("-dlq")
    metrics.add_metric(name="DeadLetters", unit=MetricUnit.Count, value=1)
    logger.error("dead letter", extra={"queue": queue, "body": body, "done": _bury(queue, body)})


def _bury(queue: str, body: Body) -> str:
    try:
        return bury(services(), queue, body)
    except (LookupError, TypeError, ValueError) as error:  # a body of no shape we know; trying again would not help
        return f"nothing: {type(error).__name__}: {error}"
