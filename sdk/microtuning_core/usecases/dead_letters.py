"""A message that could not be delivered ends what waited for it, with the last error that its handler met."""

from __future__ import annotations

from typing import Any

from microtuning_core.domain.events import objects_created
from microtuning_core.domain.layout import parse_spec_key, receipt_key
from microtuning_core.domain.settle import fail_run
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import deliver


def bury(services: Services, queue: str, body: dict[str, Any]) -> str:
    """What was done about it, for the log.

    Args:
        queue: the name of the queue that gave up, without the stage's prefix and `-dlq`.
        body: the message's JSON body.
    """
    if "token" in body:
        return _end_waiting(services, queue, body)
    if queue == "specs":
        return _refuse_spec(services, body)
    return "nothing waits for it; the next reconcile looks at its run again"


def _end_waiting(services: Services, queue: str, body: dict[str, Any]) -> str:
    run_id = body.get("run_id") or body.get("input", {}).get("run_id")
    run = services.runs.find(run_id) if run_id else None
    if run is None:
        services.executions.fail(body["token"], "Undeliverable", f"{queue} gave up on the message")
        return "its state was told"
    reason = f"{queue} gave up after several deliveries: {_last_error(services, run.run_id)}"
    failed = services.runs.update(run.run_id, lambda run: fail_run(run, reason))
    deliver(services, failed)
    services.executions.fail(body["token"], "Undeliverable", failed.reason or reason)
    return f"run {run.run_id} was failed"


def _last_error(services: Services, run_id: str) -> str:
    errors = [event["message"] for event in services.runs.events(run_id) if event["kind"] == "handler_error"]
    return errors[-1] if errors else "its handler left no error; see its log group"


def _refuse_spec(services: Services, body: dict[str, Any]) -> str:
    for created in objects_created(body):
        key = parse_spec_key(created.key)
        if key:
            error = {"field": "spec", "line": None, "message": "it could not be processed; upload it again"}
            services.objects.put_json(receipt_key(key.tenant, key.file), {"etag": created.etag, "errors": [error]})
    return "its receipt says so"
