"""SageMaker Training Job State Change -> queue `training-events` -> failure recovery: the run is looked at again."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, logger
from functions._environment import services
from functions._jobs import own_job, run_of_job
from functions._queue import Body, handle_messages
from microtuning_core.usecases.settle import settle


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, lambda body, _record: _process(body), run_of_job)


def _process(body: Body) -> None:
    job = own_job(body)
    if job and services().runs.find(job.run_id):
        run = settle(services(), job.run_id)
        logger.info("settled", extra={"run_id": run.run_id, "status": run.status, "verdict": run.verdict})
