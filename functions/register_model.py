"""State "Register model": a completed run becomes a model version, or is refused for want of its metrics."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, metrics
from functions._environment import services
from microtuning_core.usecases.registering import register_model


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    run = register_model(services(), event["run_id"])
    metrics.add_metric(name="ModelsLookedAt", unit=MetricUnit.Count, value=1)
    return {"run_id": run.run_id, "outcome": run.verdict or str(run.status)}
