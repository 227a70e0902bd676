"""S3 Object Created under tenants/*/commands/ -> queue `commands` -> the run does as its user says."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry
from functions._environment import services
from functions._queue import Body, handle_messages
from microtuning_core.domain.events import objects_created
from microtuning_core.domain.layout import parse_command_key
from microtuning_core.usecases.command import obey


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, lambda body, _record: _process(body), _run_of)


def _process(body: Body) -> None:
    for created in objects_created(body):
        key = parse_command_key(created.key)
        if key:
            obey(services(), created.key, key)


def _run_of(body: Body) -> str | None:
    keys = [parse_command_key(created.key) for created in objects_created(body)]
    return next((key.run_id for key in keys if key), None)
