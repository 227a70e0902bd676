"""A run asks to be let in: its token waits in the table until `grant` gives it a slot. Nothing polls."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from microtuning_core.domain.errors import InvalidName, InvalidSpec, Problem, RunNotFound
from microtuning_core.domain.names import check_tenant, new_run_id, parse_run_id
from microtuning_core.domain.run import Run, RunStatus, new_run
from microtuning_core.domain.settle import WaitingState
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import begin_planning, deliver, grant_slots
from microtuning_core.usecases.submit import check_spec
from microtuning_core.usecases.tenancy import current_limits, queue_problems, wanted_gpus


def admit(services: Services, token: str, execution: str, state: Any, sent_at: datetime) -> None:
    """Answers the token at once where the answer is known, else queues the run.

    Args:
        state: `{"run_id": …}`, or `{"tenant": …, "spec": {…}}` from "Start execution" in the console.
        sent_at: when the message was sent; it is part of the id of a run started from the console.
    """
    try:
        run_id = _run_of(services, state) or _from_console(services, execution, state, sent_at)
    except (InvalidSpec, InvalidName, RunNotFound) as error:
        services.executions.fail(token, type(error).__name__, str(error))
        return
    services.runs.put_token(run_id, WaitingState("admit", token, execution))
    run = services.runs.update(run_id, _queued)
    if run.waits_out(datetime.now(UTC)):
        # Whoever sent it back to the queue may not have come to that yet.
        services.admissions.release(run_id, run.reopenings)
    if services.admissions.holds(run_id):
        begin_planning(services, run_id)
    elif run.is_final or run.verdict:
        deliver(services, run_id)
    else:
        gpus = wanted_gpus(services, run, current_limits(services))
        services.admissions.wait(run_id, run.tenant, run.created_at, run.not_before, life=run.reopenings, gpus=gpus)
        grant_slots(services)


def _queued(run: Run) -> Run:
    """A new run enters the queue. One that is taken up again stays where it stands."""
    return run.moved_to(RunStatus.QUEUED) if run.status == RunStatus.SUBMITTED and not run.verdict else run


def _run_of(services: Services, state: Any) -> str | None:
    """The run that the input names; a person may have typed anything, and repeating the message would not help."""
    if not isinstance(state, dict) or "run_id" not in state:
        return None
    return services.runs.get(parse_run_id(str(state["run_id"])).run_id).run_id


def _from_console(services: Services, execution: str, state: Any, sent_at: datetime) -> str:
    """The run that an execution started by hand asks for; its id follows from the execution, so it is made once."""
    if not isinstance(state, dict) or "tenant" not in state or "spec" not in state:
        raise InvalidSpec([Problem("input", 'the input is {"run_id": …} or {"tenant": …, "spec": {…}}')])
    tenant = check_tenant(str(state["tenant"]))
    document = state["spec"]
    document = {"tenant": tenant, **document} if isinstance(document, dict) else document
    spec = check_spec(services, tenant, parse_spec(document))
    run_id = new_run_id(tenant, spec.name, sent_at, "execution", execution)
    if services.runs.find(run_id) is None and (problems := queue_problems(services, tenant)):
        raise InvalidSpec(problems)
    services.admissions.remember(tenant)
    if services.runs.create(new_run(run_id, spec, datetime.now(UTC), execution=execution)):
        services.runs.note(run_id, "submitted", f"started from the console as execution {execution}")
    return run_id
