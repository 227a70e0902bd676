"""State "Plan attempt": the next machine for this run, and the configuration its job will read."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, logger, metrics
from functions._environment import services
from microtuning_core.usecases.plan import plan_attempt


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    run = plan_attempt(services(), event["run_id"])
    attempt = run.current
    metrics.add_metric(name="AttemptsPlanned", unit=MetricUnit.Count, value=1)
    logger.info(
        "planned", extra={"run_id": run.run_id, "plan": attempt.plan.model_dump(mode="json") if attempt else None}
    )
    return {"run_id": run.run_id, "attempt": attempt.attempt if attempt else 0}
