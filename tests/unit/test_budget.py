"""Budgets: what counts as spent, when it warns and stops, by how much a run may pass its budget, and how it goes on."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain import budget
from microtuning_core.domain.budget import BudgetMark, Budgets, judge, marked, mind_budget, most_over_usd, spendings
from microtuning_core.domain.command import Command
from microtuning_core.domain.cost import CostRef, LedgerEntry, amount_usd, price_of, total
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.lines import compute_entries
from microtuning_core.domain.quota import Limits, Waiting, grant
from microtuning_core.domain.run import Attempt, Run, RunStatus, new_run
from microtuning_core.domain.settle import CloseRun, ExecutionFacts, Facts, StartExecution, StopJob, decide
from microtuning_local.deploy import PARAMETERS
from tests.unit.records import RUN_ID, a_plan, a_spec

S = RunStatus
BEGAN = datetime(2026, 1, 2, 3, 0, tzinfo=UTC)
JOB = f"prod-{RUN_ID}-a001"
TEMPLATE = Path(__file__).parents[2] / "sdk/microtuning_local/template/template.json"
USD = st.decimals(Decimal("0.0001"), Decimal(1000), places=4)
SECONDS = st.integers(0, 200_000)


def an_attempt(**changes: Any) -> Attempt:
    facts = {"attempt": 1, "job_name": JOB, "lineage": 1, "plan": a_plan(), "created_at": BEGAN, "launched_at": BEGAN}
    return Attempt(**(facts | {"started_at": BEGAN} | changes))


def a_run(usd: Any = None, **changes: Any) -> Run:
    """In training since BEGAN on one machine at 1.408 USD an hour."""
    spec = a_spec(**({} if usd is None else {"budget_usd": str(usd)}))
    return new_run(RUN_ID, spec, BEGAN).with_(**({"status": S.TRAINING, "attempts": (an_attempt(),)} | changes))


def after(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def facts(now: datetime, **changes: Any) -> Facts:
    job = {"job_name": JOB, "status": "InProgress", "secondary": "Training", "created_at": BEGAN, "started_at": BEGAN}
    return Facts(now=now, job=JobFacts(**(job | changes)))


# -- when


@given(USD, USD)
def test_it_warns_from_80_percent_on_and_stops_from_100(limit, spent):
    share = spent / limit
    assert judge(limit, spent) == ("nothing" if share < Decimal("0.8") else "warn" if share < 1 else "stop")
    assert judge(None, spent) == "nothing"


# -- what counts


@given(SECONDS, SECONDS, st.sampled_from([True, False]))
def test_what_counts_by_the_clock_is_never_less_than_what_is_billed_then(ran_s, later_s, spot):
    running = an_attempt(plan=a_plan(spot=spot, count=3))
    for billed_s in (ran_s, ran_s // 3):
        billed = amount_usd(billed_s, 3, Decimal("1.408"))
        assert budget.attempt_usd(running, after(ran_s)) >= billed
        ended = running.model_copy(update={"ended_at": after(ran_s), "billed_s": billed_s})
        assert budget.attempt_usd(ended, after(ran_s + later_s)) == billed


@given(SECONDS, st.integers(0, 86_399))
def test_the_days_and_months_of_an_attempt_add_up_to_all_of_it(ran_s, began_s):
    attempt = an_attempt(started_at=after(began_s))
    now = after(began_s + ran_s)
    for window_of in (budget.day_of, budget.month_of):
        window, parts = window_of(attempt.started_at), []
        while window.begin <= now:
            parts.append(budget.attempt_usd(attempt, now, window))
            window = window_of(window.end)
        assert abs(sum(parts) - budget.attempt_usd(attempt, now)) <= len(parts) * Decimal("1e-10")


@pytest.mark.parametrize(
    ("at", "day", "month"),
    [
        ("2026-12-31T23:59:59+00:00", ("2026-12-31", "2027-01-01"), ("2026-12", "2027-01-01")),
        ("2026-12-31T23:59:59-01:00", ("2027-01-01", "2027-01-02"), ("2027-01", "2027-02-01")),
        ("2028-02-29T12:00:00+00:00", ("2028-02-29", "2028-03-01"), ("2028-02", "2028-03-01")),
    ],
)
def test_days_and_months_are_those_of_utc(at, day, month):
    for window, (name, end) in (
        (budget.day_of(datetime.fromisoformat(at)), day),
        (budget.month_of(datetime.fromisoformat(at)), month),
    ):
        assert (window.name, f"{window.end:%Y-%m-%dT%H:%M}") == (name, f"{end}T00:00")


def entries_of(run_id: str, seconds: int, attempt: int = 1, state: str = "Completed") -> list[LedgerEntry]:
    job = JobFacts(
        JOB,
        state,
        state,
        BEGAN,
        started_at=BEGAN,
        ended_at=after(seconds),
        billed_s=seconds,
        instance_type="ml.g5.xlarge",
    )
    return compute_entries(CostRef("acme", run_id, attempt), job, price_of("ml.g5.xlarge"), after(seconds))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), SECONDS), max_size=6), SECONDS, st.randoms())
def test_a_tenant_has_spent_what_its_ledger_says_and_what_runs_by_the_clock_in_any_order_and_however_often(
    jobs, ran_s, random
):
    entries = [entry for number, attempt, s in jobs for entry in entries_of(f"{RUN_ID[:-1]}{number}", s, attempt)]
    window, now = budget.month_of(BEGAN), after(ran_s)
    running = [a_run()]  # a run that the ledger does not know yet
    spent = budget.tenant_usd(entries, running, now, window)
    assert spent == total(entries) + budget.clock_usd(a_run(), now)
    random.shuffle(entries)
    assert budget.tenant_usd(entries + entries[:2], running, now, window) == spent


def test_a_run_that_the_ledger_estimates_already_is_not_counted_twice():
    entries = entries_of(RUN_ID, 600, state="InProgress")
    spent = budget.tenant_usd(entries, [a_run()], after(900), budget.day_of(BEGAN))
    assert spent == amount_usd(900, 1, Decimal("1.408"))


# -- a run's own


def test_a_warning_is_given_once_and_again_after_a_raise():
    run, at_80 = a_run("0.01"), after(21)  # 25.6 s are bought
    warned = mind_budget(run, at_80)
    assert (warned.budget_warned_usd, warned.stop_requested) == (Decimal("0.01"), None)
    assert mind_budget(warned, at_80) == warned
    raised = budget.with_budget(warned, Decimal("0.011"), "c-1")
    assert mind_budget(raised, after(23)).budget_warned_usd == Decimal("0.011")


@pytest.mark.parametrize("changes", [{"outcome": "completed", "ended_at": after(1)}, {"started_at": None}])
def test_what_costs_nothing_any_more_or_yet_is_not_stopped(changes):
    run = a_run("0.0001", attempts=(an_attempt(**changes),))
    assert mind_budget(run, after(3600)).stop_requested is None


def test_a_run_over_its_budget_saves_and_stops_and_says_so():
    asked = decide(a_run("0.01"), facts(after(26)))
    assert asked.actions == (StopJob(JOB),)
    ended = facts(after(30), status="Stopped", secondary="Stopped", ended_at=after(30), billed_s=30)
    run = decide(asked.run, ended).run
    assert (run.verdict, run.reason, run.current.outcome) == ("stopped", asked.run.stop_requested, "stopped")
    assert run.reason.startswith(
        "budget: it has spent 0.0102 USD at most, of 0.0100; raise it with: microtuning runs budget"
    )


def test_a_job_that_completes_before_the_stop_reaches_it_has_completed():
    asked = decide(a_run("0.01"), facts(after(26))).run
    raised = budget.with_budget(asked, Decimal(1), "c-1")
    for run in (asked, raised):
        done = decide(run, facts(after(30), status="Completed", secondary="Completed", billed_s=30)).run
        assert (done.status, done.stop_requested, done.resume_requested) == (S.EVALUATING, None, False)


def test_a_cancel_while_a_budget_stops_the_run_is_its_end():
    asked = budget.with_budget(decide(a_run("0.01"), facts(after(26))).run, Decimal(1), "c-1")
    cancel = Command(verb="cancel", issued_at=BEGAN)
    cancelled = decide(asked, Facts(now=after(27), command=cancel, job=facts(after(27)).job)).run
    assert (cancelled.stop_requested, cancelled.resume_requested) == ("cancelled by its user", False)


def stopped(**changes: Any) -> Run:
    """Over, for its budget of 0.01 USD."""
    asked = decide(a_run("0.01"), facts(after(26))).run
    ended = facts(after(30), status="Stopped", secondary="Stopped", ended_at=after(30), billed_s=30)
    run = decide(asked, ended).run
    return run.with_(**({"status": S.STOPPED, "ended_at": after(31)} | changes))


def test_a_raise_takes_a_stopped_run_up_again_where_it_was_in_its_lineage():
    raised = budget.with_budget(stopped(), Decimal(1), "c-1")
    assert budget.with_budget(raised, Decimal(2), "c-1") == raised  # delivered again
    decision = decide(raised, Facts(now=after(40)))
    run = decision.run
    assert decision.actions == (StartExecution(),)
    assert (run.status, run.lineage, run.execution, run.reopenings) == (S.QUEUED, 1, f"{RUN_ID}-e2", 1)
    assert (run.verdict, run.reason, run.stop_requested, run.resume_requested) == (None, None, None, False)
    assert (run.budget_usd, run.budgeted_spec.budget_usd, run.spec.budget_usd) == (1, 1, Decimal("0.01"))


@pytest.mark.parametrize("reason", ["cancelled by its user", "the job was stopped"])
def test_a_raise_leaves_a_run_that_was_stopped_for_something_else(reason):
    run = stopped(reason=reason, stop_requested=None)
    assert budget.with_budget(run, Decimal(1), "c-1").goes_on is False


def test_a_run_that_is_still_being_closed_when_its_budget_is_raised_is_closed_first():
    raised = budget.with_budget(stopped(status=S.TRAINING, ended_at=None), Decimal(1), "c-1")
    dead = Facts(now=after(40), execution=ExecutionFacts(raised.execution, "FAILED"))
    assert decide(raised, dead).actions == (CloseRun(),)


# -- the run time that a budget buys


def ran_out(run: Run, billed_s: int) -> Run:
    end = {"status": "Stopped", "secondary": "MaxRuntimeExceeded", "ended_at": after(3600), "billed_s": billed_s}
    return decide(run, facts(after(3600), **end)).run


def bought(usd: str, **changes: Any) -> Run:
    return a_run(usd, attempts=(an_attempt(plan=a_plan(max_runtime_s=3600)),), **changes)


def test_the_end_of_the_run_time_that_a_budget_bought_is_an_end_for_the_budget():
    run = ran_out(bought("1.48"), 3600)
    assert (run.verdict, run.reason.startswith("budget: 1.4800 USD bought no more run time")) == ("stopped", True)
    own = ran_out(a_run(attempts=(an_attempt(plan=a_plan(max_runtime_s=3600)),)), 3600)
    assert own.reason == "MaxRuntimeExceeded" or "MaxRuntimeExceeded" in own.reason


@pytest.mark.parametrize(("raised", "billed_s"), [("2", 3600), (None, 1200)])
def test_a_run_goes_on_where_its_budget_was_raised_meanwhile_or_spot_was_billed_less(raised, billed_s):
    run = ran_out(bought("1.48", raised_budget_usd=raised and Decimal(raised)), billed_s)
    assert (run.status, run.verdict) == (S.RECOVERING, None)


# -- by how much a run may pass its budget


def period_s(rate: str) -> int:
    number, unit = re.fullmatch(r"rate\((\d+) (minute|minutes)\)", rate).groups()
    assert unit
    return int(number) * 60


CLOUD_RATE = json.loads(TEMPLATE.read_text())["Parameters"]["ReconcileRate"]["Default"]
RATES = [CLOUD_RATE, PARAMETERS["ReconcileRate"]]


@given(
    rate=st.sampled_from(RATES), phase=st.floats(0, 1), limit=st.decimals("0.001", "20", places=3),
    count=st.integers(1, 4), grace_s=st.integers(0, 120), upload_s=st.integers(0, 600),
)  # fmt: skip
def test_a_run_that_only_the_schedule_looks_at_passes_its_budget_by_no_more_than_is_promised(
    rate, phase, limit, count, grace_s, upload_s
):
    period = period_s(rate)
    plan = a_plan(count=count, max_runtime_s=86_400)
    run, tick_s = a_run(limit, attempts=(an_attempt(plan=plan),)), period * phase
    while not run.stop_requested:
        run = decide(run, facts(after(tick_s))).run
        tick_s += period
    ran_s = tick_s - period + grace_s + upload_s
    cost = amount_usd(int(ran_s) + 1, count, plan.price_usd_per_hour)
    per_hour = plan.price_usd_per_hour * count
    assert cost - limit <= most_over_usd(per_hour, period, upload_s) + per_hour * 2 / 3600  # seconds are whole


def test_the_promise_in_the_docs_is_this_figure():
    page = (Path(__file__).parents[2] / "docs/sdk.md").read_text("utf-8")
    assert period_s(CLOUD_RATE) == 300
    assert f"{most_over_usd(Decimal('1.408'), 300, 60):.2f} USD with a minute of upload" in page


# -- a tenant's


def standing(day: str | None, month: str | None, ran_s: int) -> list[budget.Spending]:
    budgets = Budgets(day and Decimal(day), month and Decimal(month))
    return spendings(budgets, [], [a_run()], after(ran_s))


def test_a_tenant_is_closed_until_the_longest_of_its_used_up_budgets_is_over():
    mark = marked(BudgetMark(), "acme", standing("0.01", "0.01", 60))
    assert mark.closed_until == datetime(2026, 2, 1, tzinfo=UTC)
    assert mark.reason == "budget: tenant acme has spent 0.0235 USD at most in 2026-01 (UTC), of 0.0100"
    day = marked(BudgetMark(), "acme", standing("0.01", "1", 60))
    assert (day.closed_until, "in 2026-01-02 (UTC)" in (day.reason or "")) == (datetime(2026, 1, 3, tzinfo=UTC), True)


def test_a_mark_stays_as_it_is_until_something_else_is_true():
    first = marked(BudgetMark(), "acme", standing("0.01", None, 60))
    assert marked(first, "acme", standing("0.01", None, 600)) == first
    raised = marked(first, "acme", standing("0.03", None, 62))
    assert (raised.closed_until, raised.warned) == (None, ("2026-01-02 0.03",))
    assert marked(raised, "acme", standing("1", None, 62)) == BudgetMark()


def test_a_closed_tenant_gets_no_slot_and_the_others_do():
    waiting = [Waiting(f"{tenant}-sort-0a1b2c3d4e5f", tenant, BEGAN) for tenant in ("acme", "beta")]
    assert grant(budget.without(Limits(2), ["acme"]), {}, waiting) == ["beta-sort-0a1b2c3d4e5f"]


@pytest.mark.parametrize("status", list(S))
def test_what_spends_is_stopped_what_waits_is_told_and_the_rest_is_left(status):
    run = a_run(status=status)
    minded = budget.mind_tenant(run, "budget: used up")
    if status in budget.SPENDS:
        assert minded == run.with_(stop_requested="budget: used up")
    elif status == S.QUEUED:
        assert minded == run.with_(reason="budget: used up")
        assert budget.no_more_waiting(minded) == run
    else:
        assert minded == run
