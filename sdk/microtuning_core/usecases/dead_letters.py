"""A message that could not be delivered ends what waited for it, with the last error that its handler met.

Nothing in a message may make this fail: whatever comes back from here is tried again for as long as the queue keeps it.
"""

from __future__ import annotations

from typing import Any

from microtuning_core.domain.errors import InvalidName
from microtuning_core.domain.events import objects_created
from microtuning_core.domain.layout import parse_spec_key, receipt_key
from microtuning_core.domain.names import parse_run_id
from microtuning_core.usecases.services import Services


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
    """The state fails and its machine closes the run. Of a copy whose state has moved on nobody waits for the answer."""
    reason = f"{queue} gave up after several deliveries: {_last_error(services, _run_id(body))}"
    services.executions.fail(body["token"], "Undeliverable", reason)
    return f"its state was told: {reason}"


def _run_id(body: dict[str, Any]) -> str | None:
    state = body.get("input")
    named = body.get("run_id") or (state.get("run_id") if isinstance(state, dict) else None)
    try:
        return parse_run_id(str(named)).run_id
    except InvalidName:
        return None


def _last_error(services: Services, run_id: str | None) -> str:
    if run_id is None:
        return "it names no run"
    errors = [event["message"] for event in services.runs.events(run_id) if event["kind"] == "handler_error"]
    return errors[-1] if errors else "its handler left no error; see its log group"


def _refuse_spec(services: Services, body: dict[str, Any]) -> str:
    for created in objects_created(body):
        key = parse_spec_key(created.key)
        if key:
            error = {"field": "spec", "line": None, "message": "it could not be processed; upload it again"}
            services.objects.put_json(receipt_key(key.tenant, key.file), {"etag": created.etag, "errors": [error]})
    return "its receipt says so"
