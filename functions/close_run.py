"""State "Close run": the final status, the slot given back, the next run let in."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, logger, metrics
from functions._environment import services
from microtuning_core.usecases.closing import close_run


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    outcome = close_run(services(), event["state"], event["execution"])
    metrics.add_metric(name="RunsClosed", unit=MetricUnit.Count, value=1)
    logger.info("closed", extra=outcome)
    return outcome
