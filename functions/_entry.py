"""The outermost layer of every function: its logger and metrics, and an answer to the local cloud's wake-up call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._environment import services
from microtuning_core.domain.recovery import STAGES, total_ms
from microtuning_core.domain.run import Recovery

logger = Logger()
metrics = Metrics()


def _add_counts(counts: Counter[str]) -> None:
    """What use cases counted leaves with the metrics of the invocation that did it."""
    for name, value in counts.items():
        metrics.add_metric(name=name, unit=MetricUnit.Count, value=value)
    counts.clear()


def _add_recoveries(recoveries: list[tuple[str, Recovery]]) -> None:
    """One metric a stage that was measured, and all of them together."""
    for run_id, recovery in recoveries:
        stages = {name: getattr(recovery, name) for name in STAGES} | {"total_ms": total_ms(recovery)}
        for name, value in stages.items():
            if value is not None:
                metric = "Recovery" + name.removesuffix("_ms").title().replace("_", "")
                metrics.add_metric(name=metric, unit=MetricUnit.Milliseconds, value=value)
        logger.info("recovered", extra={"run_id": run_id, "cause": recovery.cause, **stages})
    recoveries.clear()


Handler = Callable[[dict[str, Any], LambdaContext], dict[str, Any]]


def entry(handler: Handler) -> Handler:
    """Log lines carry the request; metrics leave with its end. `{"microtuning": "warm"}` only loads the function and the
    clients that all of them need: there is nothing to do, and nothing to count."""

    @wraps(handler)
    def counted(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
        try:
            return handler(event, context)
        finally:
            _add_counts(services().counts)
            _add_recoveries(services().recoveries)

    logged: Handler = metrics.log_metrics(logger.inject_lambda_context(counted))

    @wraps(handler)
    def enter(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
        if event.get("microtuning") != "warm":
            return logged(event, context)
        return {"table": services().runs.table}

    return enter
