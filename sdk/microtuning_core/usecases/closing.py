"""Close run: the last word of the state machine. It also hears of the failures that no rule of ours saw coming."""

from __future__ import annotations

import json
from typing import Any

from microtuning_core.domain.errors import InvalidName
from microtuning_core.domain.names import parse_execution_name, parse_run_id
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import close


def close_run(services: Services, state: dict[str, Any], execution: str) -> dict[str, str]:
    """Ends the run of this execution and says how: `{"run_id", "outcome", "reason"}`.

    Args:
        state: the machine's state, with `error` {"Error", "Cause"} when a Task failed.
    """
    error = error_text(state.get("error"))
    run_id = _known(services, str(state.get("run_id"))) or _run_of(services, execution)
    if run_id is None:  # what was asked for in the console was refused and never became a run
        return {"run_id": "", "outcome": "failed", "reason": error or "no run was started"}
    run = services.runs.get(run_id)
    if run.execution != execution and not run.is_final and _parsed(execution) == run_id:
        return {"run_id": run_id, "outcome": "stopped", "reason": f"the run goes on as {run.execution}"}
    run = close(services, run, error)
    return {"run_id": run_id, "outcome": str(run.status), "reason": run.reason or ""}


def _run_of(services: Services, execution: str) -> str | None:
    run_id = _parsed(execution)
    return _known(services, run_id) if run_id else None


def _parsed(execution: str) -> str | None:
    """The run that an execution of ours carries, by its name; None for one started by hand."""
    try:
        return parse_execution_name(execution)[0]
    except InvalidName:
        return None


def _known(services: Services, run_id: str) -> str | None:
    try:
        parse_run_id(run_id)
    except InvalidName:
        return None
    return run_id if services.runs.find(run_id) else None


def error_text(error: dict[str, Any] | None) -> str | None:
    """One sentence from a Task's Error and Cause; a Lambda's Cause is JSON with the exception's message in it."""
    if not error:
        return None
    cause = error.get("Cause") or ""
    try:
        details = json.loads(cause)
        message = details.get("errorMessage", cause) if isinstance(details, dict) else cause
    except json.JSONDecodeError:
        message = cause
    return str(message or error.get("Error") or "a state failed without saying why")
