"""What a tenant may have now, what a run would take of it, and where the tenant stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from microtuning_core.aws.admissions import Granted
from microtuning_core.domain.catalog import find
from microtuning_core.domain.errors import BudgetExceeded, InvalidSpec, NothingFits, Problem, UnknownTenant
from microtuning_core.domain.planning import choose_plan
from microtuning_core.domain.quota import Gpus, Limits, places_in_queue
from microtuning_core.domain.run import Run, RunStatus
from microtuning_core.domain.settle import history
from microtuning_core.domain.tenants import TenantLimits, standing
from microtuning_core.usecases.plan import limited_request
from microtuning_core.usecases.services import Services

_NOT_STARTED = frozenset({RunStatus.SUBMITTED, RunStatus.QUEUED})


def current_limits(services: Services, changes: Mapping[str, TenantLimits] | None = None) -> Limits:
    """As declared, but for what was changed since."""
    known = services.admissions.limit_changes() if changes is None else changes
    return services.settings.tenants.quota(services.settings.max_running_runs, known)


def limits_of(services: Services, tenant: str) -> TenantLimits:
    return services.settings.tenants.limits_of(tenant, services.admissions.limit_changes())


def gpus_of(instance_type: str, count: int) -> dict[str, int]:
    row = find(instance_type)
    return {row.gpu_family: row.gpus * count} if row.gpu_family else {}


def wanted_gpus(services: Services, run: Run, limits: Limits) -> Gpus:
    """What the next attempt would take, where its tenant's GPUs are limited; Plan attempt says what cannot be planned."""
    limited = limits.gpus_of(run.tenant)
    if not limited:
        return {}
    try:
        plan = choose_plan(limited_request(services, run.spec), history(run))
    except (NothingFits, BudgetExceeded, InvalidSpec):
        return {}
    return {family: count for family, count in gpus_of(plan.instance_type, plan.count).items() if family in limited}


def problems_of_tenant(services: Services, tenant: str) -> list[Problem]:
    """Whether the stage serves the tenant at all."""
    try:
        services.settings.tenants.check(tenant)
    except UnknownTenant as error:
        return [Problem("tenant", f"{error.message} {error.next_step}")]
    return []


def queue_problems(services: Services, tenant: str) -> list[Problem]:
    """Whether one more run of the tenant may wait."""
    most = limits_of(services, tenant).max_waiting_runs
    if most is None:
        return []
    held = services.admissions.slots().held
    others = [run_id for run_id in services.runs.open_run_ids(tenant) if run_id not in held]
    if len(others) < most:  # runs that are over but not paid for yet are among them: looked at only where it matters
        return []
    runs = filter(None, map(services.runs.find, others))
    waiting = sum(run.status in _NOT_STARTED for run in runs)
    if waiting < most:
        return []
    message = f"{tenant} has {waiting} runs in the queue, and {most} may wait; submit again when one has started"
    return [Problem("tenant", message)]


def tell_standing(
    services: Services, granted: Granted, changes: Mapping[str, TenantLimits], about: Iterable[str], now: datetime
) -> None:
    """Writes down, for their own people, where those tenants stand that wait or for whom something changed."""
    places = places_in_queue(current_limits(services, changes), granted.held, granted.waiting)
    given = {granted.held[run_id].tenant for run_id in granted.run_ids if run_id in granted.held}
    for tenant in sorted({each.tenant for each in granted.waiting} | given | set(about)):
        limits = services.settings.tenants.limits_of(tenant, changes)
        services.admissions.put_standing(standing(tenant, now, limits, granted.held, places))


def refresh_standings(services: Services) -> None:
    """Makes known who is declared, and puts right what was written down of anybody and holds no more."""
    known, changes = services.admissions.tenants(), services.admissions.limit_changes()
    for tenant in services.settings.tenants.tenants.keys() - set(known):
        services.admissions.remember(tenant)
    now = datetime.now(UTC)
    held, waiting = services.admissions.slots().held, services.admissions.waiting(now)
    places = places_in_queue(current_limits(services, changes), held, waiting)
    for tenant in sorted({*known, *services.settings.tenants.tenants}):
        new = standing(tenant, now, services.settings.tenants.limits_of(tenant, changes), held, places)
        old = services.admissions.standing(tenant)
        if old is None or old.model_copy(update={"at": now}) != new:
            services.admissions.put_standing(new)
