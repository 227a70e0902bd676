"""State "Train" -> queue `launches` -> CreateTrainingJob, and the token kept until the job has ended."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry
from functions._environment import services
from functions._queue import Body, handle_messages
from microtuning_core.usecases.launch import launch


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, lambda body, _record: _process(body), lambda body: body["run_id"])


def _process(body: Body) -> None:
    launch(services(), body["token"], body["execution"], body["run_id"], int(body["attempt"]))
