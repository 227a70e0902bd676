"""A schedule -> queue `ticks` -> whatever no event told. `microtuning local tick` invokes it directly."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, logger, metrics
from functions._environment import services
from functions._queue import Body, handle_messages
from microtuning_core.domain.mirror import LATE_MIRRORS
from microtuning_core.usecases.reconciling import reconcile


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    if "Records" in event:
        return handle_messages(event, context, lambda body, _record: _process(body), lambda _body: None)
    return {"looked_at": _tick()}


def _process(_body: Body) -> None:
    _tick()


def _tick() -> list[str]:
    tick = reconcile(services())
    metrics.add_metric(name="OpenRuns", unit=MetricUnit.Count, value=len(tick.looked_at))
    metrics.add_metric(name=LATE_MIRRORS, unit=MetricUnit.Count, value=len(tick.late))
    if tick.oldest_checkpoint_s is not None:
        metrics.add_metric(name="OldestCheckpointAge", unit=MetricUnit.Seconds, value=tick.oldest_checkpoint_s)
    logger.info("reconciled", extra={"looked_at": tick.looked_at, "late": tick.late})
    return tick.looked_at
