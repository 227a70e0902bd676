"""The lines of the ledger beside compute, and the law of all sums: totals are the sum of entries, whatever arrives how."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.cost import CostRef, LedgerEntry, UnitPrice, latest, price_of, total
from microtuning_core.domain.job import JobFacts, job_facts
from microtuning_core.domain.lines import (
    VOLUME_PRICE,
    attempt_entries,
    attempt_state,
    compute_entries,
    plan_price,
    storage_entries,
    warm_pool_entries,
)
from tests.unit.records import a_cpu_plan, a_plan

CASES = Path(__file__).parents[1] / "cases"
REF = CostRef("acme", "acme-sort-0a1b2c3d4e5f", 1)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
PRICE = UnitPrice(Decimal("3.60"), "a test", date(2026, 1, 1))


def job(**changes) -> JobFacts:
    facts = {
        "job_name": "dev-acme-sort-0a1b2c3d4e5f-a001",
        "status": "Completed",
        "secondary": "Completed",
        "created_at": NOON - timedelta(minutes=5),
        "started_at": NOON,
        "ended_at": NOON + timedelta(seconds=1000),
        "billed_s": 1000,
        "training_s": 1000,
        "instance_type": "ml.m5.large",
        "instance_count": 2,
        "volume_gb": 50,
    }
    return JobFacts(**(facts | changes))


# ------------------------------------------------------------------------------------------------------- warm pools


def test_a_pool_that_ended_is_paid_for_every_machine_on_the_day_it_was_kept():
    late = job(ended_at=datetime(2026, 1, 2, 23, 59, tzinfo=UTC), warm_pool_status="Terminated", warm_pool_s=120)
    entries = warm_pool_entries(REF, late, PRICE)
    assert [(each.day.day, each.billed_s, each.amount_usd, each.state) for each in entries] == [
        (2, 60, Decimal("0.12"), "final"),
        (3, 60, Decimal("0.12"), "final"),
    ]


def test_a_pool_that_is_still_kept_is_an_estimate_and_so_is_its_attempt():
    kept = job(warm_pool_status="Available", warm_pool_s=10)
    assert [each.state for each in warm_pool_entries(REF, kept, PRICE)] == ["estimate"]
    assert attempt_state(kept, NOON) == "estimate"
    ended = job(warm_pool_status="Reused", warm_pool_s=30)
    assert attempt_state(ended, NOON) == "final"
    assert total([*warm_pool_entries(REF, kept, PRICE), *warm_pool_entries(REF, ended, PRICE)]) == Decimal("0.06")


@pytest.mark.parametrize("kept_s", [None, 0])
def test_a_job_without_a_pool_has_no_such_line(kept_s):
    assert warm_pool_entries(REF, job(warm_pool_s=kept_s), PRICE) == []


# --------------------------------------------------------------------------------------------------------- volumes


def test_a_volume_is_paid_by_the_second_on_every_machine_of_a_type_without_disks():
    month = job(ended_at=NOON + timedelta(days=30), billed_s=30 * 86_400, training_s=30 * 86_400)
    entries = storage_entries(REF, month, NOON)
    assert total(entries) == 2 * 50 * VOLUME_PRICE.usd == Decimal("14.00")
    assert {(each.unit, each.price_source) for each in entries} == {("GB-month", VOLUME_PRICE.source)}


def test_types_with_their_own_disks_have_no_volume_to_pay():
    assert storage_entries(REF, job(instance_type="ml.g5.xlarge"), NOON) == []


def test_spot_saves_nothing_on_the_volume():
    spot = job(spot=True, billed_s=300)
    assert [each.billed_s for each in storage_entries(REF, spot, NOON)] == [1000]


# ------------------------------------------------------------------------------------------------------------ spot


def test_what_spot_saved_is_said_in_dollars_and_only_once_it_is_known():
    spot = job(spot=True, billed_s=200)
    [entry] = compute_entries(REF, spot, PRICE, NOON)
    assert (entry.amount_usd, entry.training_s, entry.saved_usd) == (Decimal("0.4"), 1000, Decimal("1.6"))
    [running] = compute_entries(REF, job(spot=True, status="InProgress", billed_s=None, ended_at=None), PRICE, NOON)
    assert running.saved_usd == 0
    [on_demand] = compute_entries(REF, job(), PRICE, NOON)
    assert on_demand.saved_usd == 0


# ----------------------------------------------------------------------------------------------------------- prices


def test_an_attempt_keeps_the_price_it_was_planned_with():
    planned = a_plan(
        price_usd_per_hour=Decimal("9.99"),
        price_source="Price List API",
        price_as_of=date(2026, 12, 1),
        price_region="eu-west-1",
    )
    assert plan_price(planned, NOON.date()) == UnitPrice(
        Decimal("9.99"), "Price List API", date(2026, 12, 1), "eu-west-1"
    )
    assert plan_price(a_cpu_plan(), NOON.date()) == price_of("ml.m5.large")
    older = plan_price(a_plan(price_usd_per_hour=Decimal("5")), NOON.date())
    assert (older.usd, older.source, older.as_of) == (Decimal("5"), "the attempt's plan", NOON.date())


# ----------------------------------------------------------------------------------------------------------- cases


def test_jobs_that_never_got_a_machine_cost_nothing_on_any_line():
    for case in json.loads((CASES / "c60_spot_and_never_started.json").read_text())[1:]:
        name = {"TrainingJobName": "j", "TrainingJobStatus": "Failed", "CreationTime": NOON}
        described = job_facts(name | case["describe"])
        assert attempt_entries(REF, described, PRICE, NOON) == []


def test_an_entry_of_before_there_were_tokens_can_still_be_read():
    stored = {
        "schema_version": 1, "id": "acme-sort-0a1b2c3d4e5f#a001#compute#2026-01-02", "tenant": "acme",
        "run_id": "acme-sort-0a1b2c3d4e5f", "attempt": 1, "line": "compute", "day": "2026-01-02", "phase_ms": {},
        "metered_ms": 0, "billed_s": 36, "instance_type": "ml.m5.large", "instance_count": 1, "quantity": "0.01",
        "unit": "instance-hour", "unit_price_usd": "0.115", "price_source": "a list", "price_as_of": "2026-09-01",
        "amount_usd": "0.0011500000", "state": "final",
    }  # fmt: skip
    entry = LedgerEntry.model_validate_json(json.dumps(stored))
    assert (entry.tokens, entry.charges, entry.execution, entry.saved_usd) == ({}, (), 0, 0)


# ------------------------------------------------------------------------------------------------------------ laws


class Table:
    """The condition of the ledger's table: a final entry is never replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_id: dict[str, LedgerEntry] = {}

    def put(self, entry: LedgerEntry) -> None:
        with self._lock:
            stands = self.by_id.get(entry.id)
            if stands is None or stands.state == "estimate":
                self.by_id[entry.id] = entry


RUNS = [("acme", "acme-a-000000000000"), ("acme", "acme-b-000000000000"), ("umbra", "umbra-a-000000000000")]
JOBS = st.tuples(
    st.sampled_from(RUNS),
    st.integers(1, 3),  # attempt
    st.integers(0, 40 * 86_400),  # begins so many seconds after NOON
    st.integers(1, 3 * 86_400),  # and takes so long
    st.booleans(),  # spot
    st.integers(0, 7200),  # its pool
    st.lists(st.integers(0, 3 * 86_400), max_size=3),  # when it was looked at on the way
)


def told(one: tuple) -> list[list[LedgerEntry]]:
    """What is written of one attempt: once each time it is looked at, and once at its end."""
    (tenant, run_id), attempt, after_s, wall_s, spot, pool_s, looks_s = one
    start = NOON + timedelta(seconds=after_s)
    ended = job(
        started_at=start, ended_at=start + timedelta(seconds=wall_s), training_s=wall_s, spot=spot,
        billed_s=wall_s // 3 if spot else wall_s, warm_pool_s=pool_s, warm_pool_status="Terminated",
    )  # fmt: skip
    running = job(status="InProgress", started_at=start, ended_at=None, billed_s=None, training_s=None, spot=spot)
    ref = CostRef(tenant, run_id, attempt)
    seen = [start + timedelta(seconds=min(look, wall_s)) for look in looks_s]
    return [attempt_entries(ref, running, PRICE, now) for now in seen] + [attempt_entries(ref, ended, PRICE, start)]


@given(st.lists(JOBS, max_size=4, unique_by=lambda one: (one[0], one[1])), st.randoms(use_true_random=False))
def test_totals_of_runs_tenants_days_and_months_are_the_sum_of_their_entries(jobs, random):
    writes = [entry for one in jobs for entries in told(one) for entry in entries]
    final = [entry for one in jobs for entry in told(one)[-1]]
    arrived = writes + writes[::2]
    random.shuffle(arrived)
    table = Table()
    for entry in arrived:
        table.put(entry)
    stored = latest(table.by_id.values())
    assert stored == latest(final)
    whole = sum((entry.amount_usd for entry in final), Decimal(0))
    for key in ("run_id", "tenant", "day", "month"):
        sums: dict[object, Decimal] = defaultdict(Decimal)
        for entry in stored:
            sums[f"{entry.day:%Y-%m}" if key == "month" else getattr(entry, key)] += entry.amount_usd
        assert sum(sums.values(), Decimal(0)) == whole == total(table.by_id.values())


def test_writers_at_the_same_time_leave_what_one_writer_leaves():
    jobs = [(run, attempt, 7000 * attempt, 90_000, True, 600, [1, 50_000]) for run in RUNS for attempt in (1, 2, 3)]
    writes = [entry for one in jobs for entries in told(one) for entry in entries]
    table, start = Table(), threading.Barrier(4)

    def write(order: list[LedgerEntry]) -> None:
        start.wait()
        for entry in order:
            table.put(entry)

    orders = [writes, writes[::-1], writes[1::2] + writes[::2], writes[len(writes) // 2 :] + writes]
    threads = [threading.Thread(target=write, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert latest(table.by_id.values()) == latest(entry for one in jobs for entry in told(one)[-1])
