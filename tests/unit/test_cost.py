"""Cost: exact amounts, split at midnight without loss, the same however often and in whatever order facts arrive."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.cost import (
    CostRef,
    LedgerEntry,
    UnitPrice,
    amount_usd,
    cost_so_far,
    days_between,
    latest,
    price_of,
    saving_share,
    shown,
    split_whole,
    superseded,
    total,
)
from microtuning_core.domain.job import JobFacts, job_facts
from microtuning_core.domain.lines import (
    Measured,
    billed_seconds,
    compute_entries,
)

CASES = Path(__file__).parents[1] / "cases"
REF = CostRef("acme", "acme-sort-0a1b2c3d4e5f", 1)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def price(usd: str = "3.60") -> UnitPrice:
    return UnitPrice(Decimal(usd), "a test", date(2026, 1, 1))


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
        "instance_type": "ml.g5.xlarge",
        "instance_count": 1,
    }
    return JobFacts(**(facts | changes))


def described(case: dict) -> JobFacts:
    """The facts of a case's describe answer, which leaves out what the case is not about."""
    name = {"TrainingJobName": "j", "TrainingJobStatus": "Completed", "CreationTime": NOON}
    return job_facts(name | case["describe"])


def entries_of(facts: JobFacts, usd: str = "3.60") -> list[LedgerEntry]:
    return compute_entries(REF, facts, price(usd), NOON + timedelta(days=1))


# ---------------------------------------------------------------------------------------------------------- cases


def test_1805_billed_seconds_on_two_instances_at_7_20_cost_7_22():
    case = json.loads((CASES / "c59_two_instances.json").read_text())
    assert total(entries_of(described(case), case["rate_usd_per_hour"])) == Decimal("7.22") == Decimal(case["want_usd"])


SPOT, NEVER_STARTED, WAITED_IN_VAIN = json.loads((CASES / "c60_spot_and_never_started.json").read_text())


def test_a_spot_job_costs_its_billed_seconds_and_is_not_discounted_again():
    facts = described(SPOT)
    assert total(entries_of(facts, SPOT["rate_usd_per_hour"])) == Decimal("0.40")
    assert saving_share(facts.billed_s, facts.training_s) == Decimal("0.8")


@pytest.mark.parametrize("case", [NEVER_STARTED, WAITED_IN_VAIN], ids=["capacity", "max-wait"])
def test_a_job_that_never_got_a_machine_costs_nothing_and_missing_times_do_not_crash(case):
    assert entries_of(described(case)) == []
    assert total([]) == Decimal(case["want_usd"])


def test_the_same_change_told_four_times_counts_1000_seconds_once():
    case = json.loads((CASES / "c58_duplicates.json").read_text())
    details = [event["detail"] for event in case["arrival_order"]]
    own = [each for each in details if each["TrainingJobName"] != "someone-elses-job"]
    told = [entry for each in own for entry in entries_of(job_facts(each | {"CreationTime": NOON}))]
    assert sum(entry.billed_s for entry in latest(told)) == case["want"]["billable_seconds_counted"] == 1000
    assert total(told) == total(reversed(told)) == Decimal("1.0")  # 1000 s at 3.60 USD/h


# -------------------------------------------------------------------------------------------------------- entries


def test_an_entry_says_whose_what_when_how_much_and_by_which_price():
    measured = Measured({"rollout": 600, "update": 400}, {"sampled": 70}, "tiny-decoder")
    [entry] = compute_entries(REF, job(), price_of("ml.g5.xlarge"), NOON, measured)
    assert entry.id == "acme-sort-0a1b2c3d4e5f#a001#compute#2026-01-02"
    assert (entry.tenant, entry.line, entry.day, entry.state) == ("acme", "compute", date(2026, 1, 2), "final")
    assert (entry.billed_s, entry.quantity, entry.unit) == (1000, Decimal("0.2777777778"), "instance-hour")
    assert (entry.unit_price_usd, entry.price_as_of) == (Decimal("1.408"), date(2026, 9, 1))
    assert entry.amount_usd == Decimal("0.3911111111")  # 1000 x 1.408 / 3600
    assert (entry.metered_ms, entry.phase_ms) == (1000, {"rollout": 600, "update": 400})
    assert (entry.tokens, entry.model, entry.price_region) == ({"sampled": 70}, "tiny-decoder", "us-east-1")


def test_an_entry_keeps_its_amount_exactly_through_json():
    [entry] = entries_of(job(), "0.115")
    assert LedgerEntry.model_validate_json(entry.model_dump_json()) == entry
    assert json.loads(entry.model_dump_json())["amount_usd"] == "0.0319444444"


def test_two_hours_over_midnight_are_two_entries_of_one_hour():
    start = datetime(2026, 1, 2, 23, tzinfo=UTC)
    facts = job(started_at=start, ended_at=start + timedelta(hours=2), billed_s=7200)
    assert [(entry.day.day, entry.billed_s, entry.amount_usd) for entry in entries_of(facts)] == [
        (2, 3600, Decimal("3.6")),
        (3, 3600, Decimal("3.6")),
    ]


def test_a_local_time_is_split_at_the_midnight_of_utc():
    start = datetime.fromisoformat("2026-01-02T23:30:00-05:00")  # 04:30 on the 3rd in UTC
    [entry] = entries_of(job(started_at=start, ended_at=start + timedelta(seconds=10), billed_s=10))
    assert entry.day == date(2026, 1, 3)


def test_a_job_that_runs_is_an_estimate_until_now_and_its_end_replaces_it():
    running = entries_of(job(status="InProgress", ended_at=None, billed_s=None))
    ended = entries_of(job(billed_s=300))
    assert {entry.state for entry in running} == {"estimate"}
    assert sum(entry.billed_s for entry in running) == 86_400
    assert total([*running[:1], *ended]) == total([*ended, *running[:1]]) == Decimal("0.3")


def test_an_estimate_over_two_days_is_replaced_on_both_even_if_spot_billed_almost_nothing():
    start = datetime(2026, 1, 2, 23, tzinfo=UTC)
    facts = job(started_at=start, ended_at=start + timedelta(hours=2), billed_s=1)
    estimate = entries_of(job(status="InProgress", started_at=start, ended_at=None, billed_s=None))
    assert total([*estimate, *entries_of(facts)]) == Decimal("0.001")


def test_an_estimate_of_a_day_after_the_end_that_was_billed_counts_for_nothing():
    late = job(status="InProgress", ended_at=None, billed_s=None)
    overrun = compute_entries(REF, late, price(), NOON + timedelta(hours=13))
    assert [entry.day.day for entry in overrun] == [2, 3]
    assert total([*overrun, *entries_of(job())]) == Decimal("1.0")
    assert superseded([*overrun, *entries_of(job())]) == [overrun[1]]  # the other one is overwritten


def test_an_ended_job_without_billed_seconds_is_estimated_by_its_times():
    [entry] = entries_of(job(billed_s=None))
    assert (entry.billed_s, entry.state) == (1000, "estimate")


def test_a_started_second_counts_as_a_whole_one():
    facts = job(status="InProgress", ended_at=None, billed_s=None)
    assert billed_seconds(facts, NOON + timedelta(milliseconds=1)) == (1, "estimate")
    assert billed_seconds(facts, NOON - timedelta(hours=1)) == (0, "estimate")


def test_cost_so_far_is_zero_before_a_machine_and_counts_all_instances_after():
    assert cost_so_far(None, NOON, Decimal("3.60"), 4) == 0
    assert cost_so_far(NOON, NOON + timedelta(seconds=100), Decimal("3.60"), 4) == Decimal("0.4")


@pytest.mark.parametrize(("billable", "training"), [(None, 500), (100, None), (100, 0), (None, None)])
def test_no_saving_is_claimed_where_there_is_nothing_to_compare(billable, training):
    assert saving_share(billable, training) is None


def test_a_job_on_demand_saved_nothing():
    assert saving_share(500, 500) == saving_share(501, 500) == 0


def test_people_see_four_decimals():
    assert shown(Decimal("7.22")) == "7.2200"
    assert shown(Decimal("0.00005")) == "0.0001"


# ----------------------------------------------------------------------------------------------------------- laws

MOMENTS = st.datetimes(datetime(2026, 1, 1), datetime(2026, 3, 1), timezones=st.just(UTC))
PRICES = st.decimals("0.01", "100", places=6)
MAYBE_MOMENT = st.none() | MOMENTS


@given(MOMENTS, st.integers(0, 10 * 86_400), st.integers(0, 10 * 86_400), PRICES, st.integers(1, 16))
def test_a_split_at_midnight_keeps_every_second_and_every_cent(start, wall_s, billed_s, usd, count):
    facts = job(started_at=start, ended_at=start + timedelta(seconds=wall_s), billed_s=billed_s, instance_count=count)
    measured = Measured({"a": 7, "b": 11}, {"trained": 13})
    entries = compute_entries(REF, facts, UnitPrice(usd, "a test", date(2026, 1, 1)), start, measured)
    assert sum(entry.billed_s for entry in entries) == billed_s
    assert total(entries) == amount_usd(billed_s, count, usd)
    assert sum(entry.metered_ms for entry in entries) == 18
    assert sum(entry.tokens["trained"] for entry in entries) == 13
    assert all(entry.billed_s >= 0 and entry.amount_usd >= 0 for entry in entries)


@given(MOMENTS, st.integers(0, 5 * 86_400), st.randoms(use_true_random=False), st.lists(st.integers(0, 5 * 86_400)))
def test_a_total_does_not_depend_on_order_or_repetition(start, wall_s, random, seen_after_s):
    facts = job(started_at=start, ended_at=start + timedelta(seconds=wall_s), billed_s=wall_s)
    final = compute_entries(REF, facts, price(), start)
    running = job(status="InProgress", started_at=start, ended_at=None, billed_s=None)
    estimates = [
        entry
        for after_s in seen_after_s
        for entry in compute_entries(REF, running, price(), start + timedelta(seconds=min(after_s, wall_s)))
    ]
    arrived = [*final, *final, *estimates]
    random.shuffle(arrived)
    assert total(arrived) == total(final) == sum(entry.amount_usd for entry in latest(arrived))


@given(st.integers(0, 10**7), st.lists(st.integers(0, 10**12), min_size=1, max_size=10))
def test_whole_parts_add_up_and_none_is_off_by_a_unit(whole, weights):
    parts = split_whole(whole, weights)
    assert sum(parts) == whole
    if sum(weights):
        assert all(
            abs(part - whole * weight / sum(weights)) < 1.001 for part, weight in zip(parts, weights, strict=True)
        )


@given(MOMENTS, st.timedeltas(timedelta(0), timedelta(days=5)))
def test_the_days_of_a_span_follow_each_other_and_make_it_up(start, length):
    days = days_between(start, start + length)
    assert sum(days.values()) == length // timedelta(microseconds=1)
    assert list(days) == [start.date() + timedelta(days=i) for i in range(len(days))]


@given(
    st.sampled_from(["Completed", "Failed", "Stopped", "InProgress", "Stopping", "?"]),
    MAYBE_MOMENT,
    MAYBE_MOMENT,
    st.none() | st.integers(-1, 10**6),
    MOMENTS,
)
def test_whatever_is_missing_or_out_of_order_nothing_crashes_and_no_amount_is_negative(status, start, end, billed, now):
    facts = job(status=status, started_at=start, ended_at=end, billed_s=billed)
    entries = compute_entries(REF, facts, price(), now)
    assert total(entries) >= 0
    assert sum(entry.billed_s for entry in entries) == billed_seconds(facts, now)[0]
