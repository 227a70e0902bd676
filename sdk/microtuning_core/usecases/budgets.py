"""The budgets of tenants, looked at on every tick: what runs is stopped, what waits is told why and waits on.

A run's own budget is minded wherever the run is decided (domain/settle.py); this is about all runs of a tenant together.
That a tenant's budget is used up is marked until its day or month is over, and no run of it gets a slot meanwhile.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from microtuning_core.domain.budget import (
    SPENDS,
    STOPS,
    WARNINGS,
    BudgetMark,
    Budgets,
    Spending,
    marked,
    mind_tenant,
    no_more_waiting,
    spendings,
)
from microtuning_core.domain.errors import UnknownTenant
from microtuning_core.domain.run import Run
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import settle


def budgets_of(services: Services, tenant: str) -> Budgets:
    """None for a tenant that the stage does not serve any more."""
    try:
        limits = services.settings.tenants.limits_of(tenant, services.admissions.limit_changes())
    except UnknownTenant:
        return Budgets()
    return Budgets(limits.budget_usd_per_day, limits.budget_usd_per_month)


def mind_budgets(services: Services, tenant: str) -> None:
    """Warns, stops or lets go on, as the tenant stands now."""
    now = datetime.now(UTC)
    before = services.budget_marks.all().get(tenant, BudgetMark())
    budgets = budgets_of(services, tenant)
    if budgets == Budgets() and before == BudgetMark():
        return
    runs = [services.runs.get(run_id) for run_id in services.runs.open_run_ids(tenant)]
    found = spendings(budgets, services.ledger.month(tenant, f"{now:%Y-%m}"), runs, now)
    after = marked(before, tenant, found)
    if after != before:
        services.budget_marks.put(tenant, after)
    for each in found:
        if each.act == "warn" and each.key not in before.warned:
            _warn(services, tenant, each, runs)
    for run in runs:
        _act(services, run, after.reason)


def _warn(services: Services, tenant: str, spending: Spending, runs: list[Run]) -> None:
    services.count(WARNINGS)
    for run in runs:
        if run.status in SPENDS:
            services.runs.note(run.run_id, "budget_warning", spending.reason(tenant))


def _act(services: Services, run: Run, reason: str | None) -> None:
    change = partial(mind_tenant, reason=reason) if reason else no_more_waiting
    changed = services.runs.update(run.run_id, change)
    if reason and changed.stop_requested == reason != run.stop_requested:
        services.count(STOPS)
        services.runs.note(run.run_id, "budget_stop", reason)
        settle(services, run.run_id)
