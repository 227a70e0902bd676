"""Budgets act: at 80 % a warning, at 100 % what runs is stopped with a checkpoint saved, and may go on after a raise.

    what was spent, the limit -> judge -> nothing | warn | stop

What was spent is never taken for less than it may become: of an attempt whose bill is not known yet (spot's least of all)
the machines count at the on-demand price by the clock; of a run the larger of that and what the ledger says.

A run that is looked at every `period_s` is stopped at most that long after its budget was used up, and costs until it has
saved and left: most_over_usd. MaxRuntimeInSeconds (planning.py) bounds the same with none of our code alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Literal

from microtuning_core.domain.cost import LedgerEntry, amount_usd, latest, shown, whole_seconds
from microtuning_core.domain.planning import SHORTEST_RUNTIME_S, STOP_RESERVE_S
from microtuning_core.domain.quota import Limits
from microtuning_core.domain.record import UtcTime, Value
from microtuning_core.domain.run import REMEMBERED_COMMANDS, Attempt, Run, RunStatus
from microtuning_core.domain.warm_pools import kept_usd

WARN_SHARE = Decimal("0.8")
GRACE_S = 120  # between SIGTERM and the end
REASON = "budget: "  # how the reason of every run begins that a budget stopped
WARNINGS, STOPS = "BudgetWarnings", "BudgetStops"  # the metrics that count them

Act = Literal["nothing", "warn", "stop"]
# A run that has its slot and goes on to cost something; what is being evaluated has cost what it will.
SPENDS = frozenset({RunStatus.PLANNING, RunStatus.TRAINING, RunStatus.RECOVERING})


@dataclass(frozen=True)
class Budgets:
    """What the runs of a tenant may cost together on one UTC day and in one UTC month; None = no limit."""

    per_day_usd: Decimal | None = None
    per_month_usd: Decimal | None = None


@dataclass(frozen=True)
class Window:
    """A time that a tenant's budget is for: "2026-12-03" or "2026-12"."""

    name: str
    begin: datetime
    end: datetime

    def has(self, day: date) -> bool:
        return self.begin.date() <= day < self.end.date()


def day_of(now: datetime) -> Window:
    begin = datetime.combine(now.astimezone(UTC).date(), time(), UTC)
    return Window(f"{begin:%Y-%m-%d}", begin, begin + timedelta(days=1))


def month_of(now: datetime) -> Window:
    begin = day_of(now).begin.replace(day=1)
    return Window(f"{begin:%Y-%m}", begin, (begin + timedelta(days=31)).replace(day=1))


def judge(limit_usd: Decimal | None, spent_usd: Decimal) -> Act:
    if limit_usd is None or spent_usd < limit_usd * WARN_SHARE:
        return "nothing"
    return "stop" if spent_usd >= limit_usd else "warn"


def most_over_usd(usd_per_hour: Decimal, period_s: int, upload_s: int) -> Decimal:
    """By how much a run may pass its budget: it is looked at every `period_s`, saves within the grace, and uploads."""
    return amount_usd(period_s + GRACE_S + upload_s, 1, usd_per_hour)


# -- what was spent


def attempt_usd(attempt: Attempt, now: datetime, window: Window | None = None) -> Decimal:
    """What the machines of an attempt cost, in all or in the window: as billed, and until that is known at most."""
    return amount_usd(_seconds(attempt, now, window), attempt.plan.count, attempt.plan.price_usd_per_hour)


def _seconds(attempt: Attempt, now: datetime, window: Window | None) -> int:
    if attempt.started_at is None:
        return attempt.billed_s or 0
    begin, end = attempt.started_at, attempt.ended_at or now
    if window is not None:
        begin, end = max(begin, window.begin), min(end, window.end)
    elif attempt.billed_s is not None:
        return attempt.billed_s
    ran_s = whole_seconds(begin, end)
    return ran_s if attempt.billed_s is None else min(ran_s, attempt.billed_s)


def clock_usd(run: Run, now: datetime) -> Decimal:
    """What a run's machines cost until now, at most."""
    return sum((attempt_usd(each, now) for each in run.attempts), Decimal(0)) + kept_usd(run.attempts, now)


def run_usd(run: Run, now: datetime) -> Decimal:
    """What a run has spent, at most."""
    return max(run.cost_usd or Decimal(0), clock_usd(run, now))


def tenant_usd(entries: Iterable[LedgerEntry], open_runs: Iterable[Run], now: datetime, window: Window) -> Decimal:
    """What all runs of a tenant have spent in the window, at most.

    Args:
        entries: of the tenant's ledger, of the window and of any other time.
        open_runs: those that may cost more than the ledger knows yet.
    """
    by_run: dict[str, Decimal] = defaultdict(Decimal)
    for entry in latest(entries):
        if window.has(entry.day):
            by_run[entry.run_id] += entry.amount_usd
    for run in open_runs:
        clock = sum((attempt_usd(each, now, window) for each in run.attempts), Decimal(0))
        by_run[run.run_id] = max(by_run[run.run_id], clock)
    return sum(by_run.values(), Decimal(0))


# -- a run and its own budget


def mind_budget(run: Run, now: datetime) -> Run:
    """The run with the warning noted, or asked to stop, if what it has spent so far says so. Only while it spends."""
    attempt, limit = run.current, run.budget_usd
    if attempt is None or attempt.is_settled or run.verdict or run.stop_requested or limit is None:
        return run
    spent = run_usd(run, now)
    match judge(limit, spent):
        case "stop":
            return run.with_(stop_requested=f"{spent_up(spent, limit)}; {_raise_it(run)}")
        case "warn" if run.budget_warned_usd != limit:
            return run.with_(budget_warned_usd=limit)
    return run


def spent_up(spent_usd: Decimal, limit_usd: Decimal) -> str:
    return f"{REASON}it has spent {shown(spent_usd)} USD at most, of {shown(limit_usd)}"


def too_dear(run: Run, why: str) -> str:
    """The reason of a run whose next attempt its budget does not buy."""
    return f"{REASON}{why} {_raise_it(run).capitalize()}"


def _raise_it(run: Run) -> str:
    return f"raise it with: microtuning runs budget {run.run_id} --usd N"


def used_up(run: Run, attempt: Attempt) -> str | None:
    """The reason of a run whose job ran as long as its budget bought; None where it is the spec's own limit."""
    if run.budget_usd is None or attempt.plan.max_runtime_s >= run.spec.compute.max_runtime_s:
        return None
    return f"{REASON}{shown(run.budget_usd)} USD bought no more run time; {_raise_it(run)}"


def buys_more(run: Run, attempt: Attempt, now: datetime) -> bool:
    """Whether the same machines can be paid again for the shortest run time: the budget was raised, or spot billed less."""
    usd_per_s = attempt.plan.price_usd_per_hour * attempt.plan.count / 3600
    left = (run.budget_usd or Decimal(0)) - run_usd(run, now)
    return left >= usd_per_s * (SHORTEST_RUNTIME_S + STOP_RESERVE_S)


def is_budget(reason: str | None) -> bool:
    return reason is not None and reason.startswith(REASON)


def stopped_for_budget(run: Run) -> bool:
    """Whether a budget stopped the run, or is about to."""
    return is_budget(run.reason if run.verdict == "stopped" else run.stop_requested)


def with_budget(run: Run, usd: Decimal, command_id: str) -> Run:
    """Another budget, once a command; a run that was stopped for the old one wants to go on."""
    if command_id in run.obeyed:
        return run
    obeyed = (*run.obeyed, command_id)[-REMEMBERED_COMMANDS:]
    return run.with_(raised_budget_usd=usd, obeyed=obeyed, resume_requested=stopped_for_budget(run))


# -- a tenant and its budgets


@dataclass(frozen=True)
class Spending:
    """How a tenant stands against one of its budgets."""

    window: Window
    limit_usd: Decimal
    spent_usd: Decimal

    @property
    def act(self) -> Act:
        return judge(self.limit_usd, self.spent_usd)

    @property
    def key(self) -> str:
        """What a warning is given of once: after a raise it is another budget."""
        return f"{self.window.name} {self.limit_usd}"

    def reason(self, tenant: str) -> str:
        spent, limit = shown(self.spent_usd), shown(self.limit_usd)
        return f"{REASON}tenant {tenant} has spent {spent} USD at most in {self.window.name} (UTC), of {limit}"


class BudgetMark(Value):
    """What is remembered of a tenant from one tick to the next; `closed_until` its budget is used up, for that reason."""

    warned: tuple[str, ...] = ()
    closed_until: UtcTime | None = None
    reason: str | None = None


def spendings(
    budgets: Budgets, entries: Iterable[LedgerEntry], open_runs: Iterable[Run], now: datetime
) -> list[Spending]:
    """How a tenant stands against each budget it has; the one that ends last comes first."""
    known, runs = list(entries), list(open_runs)
    limits = ((month_of(now), budgets.per_month_usd), (day_of(now), budgets.per_day_usd))
    return [
        Spending(window, limit, tenant_usd(known, runs, now, window)) for window, limit in limits if limit is not None
    ]


def marked(before: BudgetMark, tenant: str, found: Iterable[Spending]) -> BudgetMark:
    """As it stands now. The reason stays what it was while the same budget is used up."""
    standing = list(found)
    warned = tuple(each.key for each in standing if each.act != "nothing")
    over = next((each for each in standing if each.act == "stop"), None)
    if over is None:
        return BudgetMark(warned=warned)
    if over.window.end == before.closed_until and over.key in before.warned:
        return before.model_copy(update={"warned": warned})
    return BudgetMark(warned=warned, closed_until=over.window.end, reason=over.reason(tenant))


def without(limits: Limits, closed: Iterable[str]) -> Limits:
    """No slot for these tenants."""
    return replace(limits, per_tenant={**limits.per_tenant, **dict.fromkeys(closed, 0)})


def no_more_waiting(run: Run) -> Run:
    """Of a run that waited for the budget of its tenant, and waits for a slot again."""
    waits = run.status == RunStatus.QUEUED and not run.verdict and is_budget(run.reason)
    return run.with_(reason=None) if waits else run


def mind_tenant(run: Run, reason: str) -> Run:
    """A run of a tenant that has spent its budget: what spends is asked to stop, what waits is told why."""
    if run.is_final or run.verdict or run.stop_requested:
        return run
    if run.status == RunStatus.QUEUED:
        return run.with_(reason=reason)
    return run.with_(stop_requested=reason) if run.status in SPENDS else run
