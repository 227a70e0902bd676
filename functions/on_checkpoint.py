"""S3 …/manifest.json and …/progress.json -> queue `checkpoints` -> checkpoint sync: verify, register, prune; liveness."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry
from functions._environment import services
from functions._queue import Body, handle_messages
from microtuning_core.domain.events import objects_created
from microtuning_core.domain.layout import parse_checkpoint_key
from microtuning_core.usecases.checkpoint import hear_progress, register


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, lambda body, _record: _process(body), lambda _body: None)


def _process(body: Body) -> None:
    for created in objects_created(body):
        key = parse_checkpoint_key(created.key)
        if key is None or services().runs.find(key.run_id) is None:
            continue
        if key.step is None:
            hear_progress(services(), key)
        else:
            register(services(), key)
