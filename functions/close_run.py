"""State "Close run": the final status, the slot given back, the next run let in."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._environment import services
from functions._queue import is_warm_up, logger, metrics
from microtuning_core.usecases.closing import close_run


@metrics.log_metrics
@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    if is_warm_up(event):
        return {}
    outcome = close_run(services(), event["state"], event["execution"])
    metrics.add_metric(name="RunsClosed", unit=MetricUnit.Count, value=1)
    logger.info("closed", extra=outcome)
    return outcome
