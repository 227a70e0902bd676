"""Reports: every way to group the ledger adds up to it, and phases, outcomes and tokens get their share."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.cost import CostRef, LedgerEntry, UnitPrice, total
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.lines import Measured, attempt_entries
from microtuning_core.domain.reports import GROUPS, report, share_out, usd_per_million_tokens, utilisation_of
from microtuning_core.domain.run import Attempt, Metered, Run, new_run
from tests.unit.records import RUN_ID, a_cpu_plan, a_spec

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
PHASES = {"load": 100_000, "rollout": 400_000, "reward": 50_000, "update": 250_000, "checkpoint": 0, "idle": 100_000}
TOKENS = {"prefill": 100_000, "sampled": 300_000, "trained": 500_000}


def spent(wall_s: int = 1000, phase_ms: dict[str, int] | None = None, **changes) -> list[LedgerEntry]:
    facts = JobFacts(
        "prod-acme-sort-0a1b2c3d4e5f-a001", "Completed", "Completed", NOON, started_at=NOON,
        ended_at=NOON + timedelta(seconds=wall_s), billed_s=wall_s, training_s=wall_s, instance_type="ml.m5.large",
        instance_count=2, volume_gb=50, warm_pool_status="Terminated", warm_pool_s=250, **changes,
    )  # fmt: skip
    measured = Measured(PHASES if phase_ms is None else phase_ms, TOKENS, "tiny")
    price = UnitPrice(Decimal("3.60"), "a test", date(2026, 1, 1))
    return attempt_entries(CostRef("acme", RUN_ID, 1), facts, price, NOON, measured)


def run(*, reached: int = 80, kept: int = 60) -> Run:
    attempt = Attempt(
        attempt=1, job_name=f"prod-{RUN_ID}-a001", lineage=1, plan=a_cpu_plan(), created_at=NOON, outcome="failed",
        checkpoint_step=kept, metered=Metered(step=reached, steps_done=reached),
    )  # fmt: skip
    return new_run(RUN_ID, a_spec(), NOON).with_(attempts=(attempt,))


def amounts(by: str) -> dict[str, Decimal]:
    return {group.key: group.amount_usd for group in report(spent(), by, {RUN_ID: run()})}


def test_machines_are_shared_out_by_phase_and_what_was_not_metered_is_the_start():
    found = amounts("phase")  # 1000 s of two machines at 3.60 USD/h: 2 USD
    assert (found["rollout"], found["update"], found["start"]) == (Decimal("0.8"), Decimal("0.5"), Decimal("0.2"))
    assert "checkpoint" not in found
    assert found["warm_pool"] == Decimal("0.5")


def test_machines_are_shared_out_by_what_became_of_the_steps():
    found = amounts("outcome")  # 700 s made 80 steps, of which 60 were kept
    assert (found["useful"], found["wasted"]) == (Decimal("1.05"), Decimal("0.35"))
    assert found["idle"] == Decimal("0.6") + Decimal("0.5") + sum(
        each.amount_usd for each in spent() if each.line == "storage"
    )


def test_utilisation_counts_the_warm_pool_as_idle():
    assert utilisation_of(spent(), {RUN_ID: run()}) == Decimal(525 * 2) / (1250 * 2)
    assert utilisation_of([], {}) is None


def test_machines_of_which_nothing_was_measured_are_neither_useful_nor_idle():
    found = {group.key for group in report(spent(phase_ms={}), "outcome", {RUN_ID: run()})}
    assert found == {"unmetered", "idle"}
    assert [group.key for group in report(spent(phase_ms={})[:1], "phase", {})] == ["start"]


def test_a_million_tokens_have_a_price_of_each_kind():
    assert usd_per_million_tokens(spent()) == {"prefill": 2, "sampled": 2, "trained": 1}
    assert usd_per_million_tokens([]) == {}


def test_a_group_says_how_many_machine_seconds_and_whether_it_is_final():
    (group,) = report(spent(), "tenant", {})
    assert (group.key, group.machine_s, group.states) == ("acme", 2500, {"final"})
    assert [group.key for group in report(spent(), "type", {})] == ["ml.m5.large"]
    assert [group.key for group in report(spent(), "model", {})] == ["tiny"]


@pytest.mark.parametrize("by", GROUPS)
@given(
    wall_s=st.integers(0, 3 * 86_400),
    phases=st.dictionaries(st.sampled_from(list(PHASES)), st.integers(0, 10**9)),
    reached=st.integers(0, 100),
    kept=st.integers(0, 100),
)
def test_whatever_it_is_grouped_by_the_sum_is_the_ledger(by, wall_s, phases, reached, kept):
    entries = spent(wall_s, phases)
    groups = report(entries, by, {RUN_ID: run(reached=reached, kept=kept)})
    assert sum((group.amount_usd for group in groups), Decimal(0)) == total(entries)
    machine_s = sum(each.billed_s * 2 for each in entries if each.line in ("compute", "warm_pool"))
    assert sum((group.machine_s for group in groups), Decimal(0)) == machine_s
    assert all(group.amount_usd >= 0 for group in groups)


@given(st.decimals("0", "1000000", places=10), st.dictionaries(st.text(max_size=3), st.integers(0, 10**6), min_size=1))
def test_shares_add_up_exactly(amount, weights):
    assert sum(share_out(amount, weights).values(), Decimal(0)) == amount
