"""SageMaker Training Job State Change -> queue `cost-events` -> cost aggregation: the ledger, once per attempt and line."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry
from functions._environment import services
from functions._jobs import own_job, run_of_job
from functions._queue import Body, handle_messages
from microtuning_core.domain.names import job_name
from microtuning_core.usecases.costing import record_cost


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, lambda body, _record: _process(body), run_of_job)


def _process(body: Body) -> None:
    job = own_job(body)
    if job:
        record_cost(services(), job_name(job.stage, job.run_id, job.attempt))
