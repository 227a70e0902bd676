"""The outermost layer of every function: its logger and metrics, and an answer to the local cloud's wake-up call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._environment import services

logger = Logger()
metrics = Metrics()

Handler = Callable[[dict[str, Any], LambdaContext], dict[str, Any]]


def entry(handler: Handler) -> Handler:
    """Log lines carry the request; metrics leave with its end. `{"microtuning": "warm"}` only loads the function and the
    clients that all of them need: there is nothing to do, and nothing to count."""
    logged: Handler = metrics.log_metrics(logger.inject_lambda_context(handler))

    @wraps(handler)
    def enter(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
        if event.get("microtuning") != "warm":
            return logged(event, context)
        return {"table": services().runs.table}

    return enter
