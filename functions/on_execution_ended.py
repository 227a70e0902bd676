"""Step Functions Execution Status Change -> queue `execution-events` -> one that died is taken up again, each is paid."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, logger
from functions._environment import services
from functions._queue import Body, handle_messages
from microtuning_core.domain.errors import InvalidName
from microtuning_core.domain.events import execution_changed
from microtuning_core.domain.names import parse_execution_name
from microtuning_core.usecases.costing import record_orchestration
from microtuning_core.usecases.settle import settle


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, lambda body, _record: _process(body), _run_of)


def _process(body: Body) -> None:
    run_id = _run_of(body)
    if run_id and services().runs.find(run_id):
        run = settle(services(), run_id, ask_execution=True)
        record_orchestration(services(), run_id)
        logger.info("settled", extra={"run_id": run_id, "execution": run.execution})


def _run_of(body: Body) -> str | None:
    """None for executions that a person named; the reconciler knows which run they carry."""
    try:
        return parse_execution_name(execution_changed(body).execution)[0]
    except InvalidName:
        return None
