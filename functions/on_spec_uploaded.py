"""S3 Object Created under tenants/*/specs/ -> queue `specs` -> a run, and its receipt."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)
from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyValidationError
from aws_lambda_powertools.utilities.typing import LambdaContext

from functions._entry import entry, logger
from functions._environment import services
from functions._queue import Body, handle_messages
from microtuning_core.domain.events import ObjectCreated, objects_created
from microtuning_core.domain.layout import SpecKey, parse_spec_key
from microtuning_core.usecases.submit import submit_upload


@entry
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    return handle_messages(event, context, lambda body, _record: _process(body, context), lambda _body: None)


def _process(body: Body, context: LambdaContext) -> None:
    for created in objects_created(body):
        key = parse_spec_key(created.key)
        if key is None:
            logger.info("not a spec", extra={"key": created.key})
            continue
        _submit_once(_identity(created), key, created, context)


def _identity(created: ObjectCreated) -> dict[str, str]:
    """What makes two deliveries the same upload; `size` guards against another body under the same identity."""
    identity = {"bucket": created.bucket, "key": created.key, "etag": created.etag, "sequencer": created.sequencer}
    return {"id": "|".join(identity.values()), "size": str(created.size)}


def _submit_once(identity: dict[str, str], key: SpecKey, created: ObjectCreated, context: LambdaContext) -> None:
    """Once an upload. A function that was killed half-way leaves a mark that expires with its time limit; running it again
    then is harmless, since the run's id and its execution's name follow from the upload."""
    config = IdempotencyConfig(
        event_key_jmespath="id",
        payload_validation_jmespath="size",
        expires_after_seconds=86_400,
        lambda_context=context,
    )

    @idempotent_function(  # type: ignore[untyped-decorator]  # powertools leaves it untyped
        data_keyword_argument="upload", persistence_store=_persistence(), config=config
    )
    def submit(*, upload: dict[str, str]) -> str | None:
        return submit_upload(services(), key.tenant, key.file, created.etag, created.sequencer, created.time)

    try:
        run_id = submit(upload=identity)
    except IdempotencyValidationError:  # never gets better, and the receipt answers the upload that was first
        logger.error("another body under the identity of an upload that was answered", extra=identity)
        return
    logger.info("spec answered", extra={"key": created.key, "run_id": run_id})


@lru_cache(maxsize=1)
def _persistence() -> DynamoDBPersistenceLayer:
    return DynamoDBPersistenceLayer(table_name=services().names.table("idempotency"))
