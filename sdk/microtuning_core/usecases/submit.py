"""A spec becomes a run: checked, recorded, its execution started, its receipt written.

Repeating any of it is safe: the run_id is a function of the upload, the record is created once, and the execution has the
run's own name. A handler that was killed between two steps is simply run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from datetime import UTC, datetime
from typing import Any

from microtuning_core.domain.errors import InvalidSpec, MicrotuningError, Problem
from microtuning_core.domain.layout import receipt_key, spec_key
from microtuning_core.domain.names import execution_name, new_run_id
from microtuning_core.domain.planning import choose_plan
from microtuning_core.domain.run import Run, new_run
from microtuning_core.domain.spec import RunSpec, foreign_locations, locations
from microtuning_core.domain.spec_checks import parse_spec, with_lines
from microtuning_core.spec_files import MAX_BYTES, read_spec_text
from microtuning_core.usecases.data_checks import data_problems
from microtuning_core.usecases.plan import limited_request
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.tenancy import problems_of_tenant, queue_problems


def submit_upload(services: Services, tenant: str, file: str, etag: str, sequencer: str, at: datetime) -> str | None:
    """The run that an uploaded spec asked for; None when it was refused, and then the receipt says why.

    Also None when the file was replaced before it was read: one run a spec, and each the run of its own spec.
    """
    key = spec_key(tenant, file)
    stored = services.objects.read_with_etag(key, at_most=MAX_BYTES)
    if stored is None:
        raise MicrotuningError(f"The uploaded spec {key} is not there.", next_step="Upload it again.")
    body, stored_etag = stored
    if stored_etag != etag:
        return None  # another spec was put under this name meanwhile; its own event asks for its run
    try:
        spec = checked_spec(services, tenant, body, file)
    except InvalidSpec as error:
        _answer(services, tenant, file, {"etag": etag, "errors": [each.as_dict() for each in error.problems]})
        return None
    run_id = new_run_id(tenant, spec.name, at, services.names.bucket, key, etag, sequencer)
    # A run that is there already was let in when its upload was heard of first.
    if services.runs.find(run_id) is None and (problems := queue_problems(services, tenant)):
        _answer(services, tenant, file, {"etag": etag, "errors": [each.as_dict() for each in problems]})
        return None
    begin_run(services, new_run(run_id, spec, datetime.now(UTC)))
    _answer(services, tenant, file, {"etag": etag, "run_id": run_id})
    return run_id


def _answer(services: Services, tenant: str, file: str, receipt: dict[str, Any]) -> None:
    services.objects.put_json(receipt_key(tenant, file), receipt)


def begin_run(services: Services, run: Run) -> None:
    """Tenant, record, then execution: the other way round a run could start that the reconciler does not know."""
    services.admissions.remember(run.tenant)
    if services.runs.create(run):
        services.runs.note(run.run_id, "submitted", f"submitted as {run.name!r}")
    services.executions.start(execution_name(run.run_id), {"run_id": run.run_id})


def checked_spec(services: Services, tenant: str, body: bytes, file: str) -> RunSpec:
    """The spec in an uploaded file, or InvalidSpec with every problem by field and line."""
    document, lines = read_spec_text(body, file)
    if isinstance(document, dict):
        document = {"tenant": tenant, **document}
    return check_spec(services, tenant, parse_spec(document, lines), lines)


def check_spec(services: Services, tenant: str, spec: RunSpec, lines: Mapping[str, int] | None = None) -> RunSpec:
    """What only the stage can judge: whose it is, that all it reads is the tenant's, there and good, that it fits."""
    problems = [*problems_of_tenant(services, tenant), *foreign_locations(spec, services.names.bucket)]
    if spec.tenant != tenant:
        problems.insert(0, Problem("tenant", f"the spec says {spec.tenant!r} and was uploaded by {tenant!r}"))
    if not problems:  # else the next questions would be asked of what is not this tenant's
        missing = _missing_objects(services, spec)
        absent = {problem.field for problem in missing}
        problems = [*missing, *data_problems(services, spec, absent), *_does_not_fit(services, spec, absent)]
    if problems:
        raise InvalidSpec(with_lines(problems, lines or {}))
    return spec


def _missing_objects(services: Services, spec: RunSpec) -> list[Problem]:
    problems = []
    for field, uri in locations(spec):
        key = uri.removeprefix(f"s3://{services.names.bucket}/")
        if key.endswith("/"):
            there = next(iter(services.objects.walk(key)), None) is not None
        else:
            there = services.objects.bytes_of(key) is not None
        if not there:
            problems.append(Problem(field, f"there is nothing at {uri}"))
    return problems


def _does_not_fit(services: Services, spec: RunSpec, absent: Set[str]) -> list[Problem]:
    if "model.base" in absent:
        return []
    try:
        choose_plan(limited_request(services, spec), [])
    except InvalidSpec as error:
        return error.problems
    except MicrotuningError as error:
        return [Problem("compute", f"{error.message} {error.next_step}".strip())]
    return []
