"""Slots: limits hold, shares are fair, nothing starves, and asking twice changes nothing."""

from __future__ import annotations

import runpy
import sys
import threading
import types
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.quota import Holding, Limits, Waiting, grant, has_room, places_in_queue, used_gpus

CASES = Path(__file__).parents[1] / "cases"
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def waits(run_id: str, tenant: str = "acme", minute: int = 0) -> Waiting:
    return Waiting(run_id, tenant, NOON + timedelta(minutes=minute))


def held_by(**runs: str) -> dict[str, Holding]:
    """Runs with a slot, by the tenant they belong to."""
    return {run_id: Holding(tenant) for run_id, tenant in runs.items()}


def queue_of(**counts: int) -> list[Waiting]:
    """`acme=3` is three waiting runs acme-0 … acme-2, in that order; tenants joined one after the other."""
    return [waits(f"{tenant}-{i}", tenant, i) for tenant, count in counts.items() for i in range(count)]


def test_an_empty_queue_grants_nothing():
    assert grant(Limits(total=5), {}, []) == []


def test_five_slots_admit_five_of_twenty_in_the_order_they_came():
    assert grant(Limits(total=5), {}, queue_of(acme=20)) == [f"acme-{i}" for i in range(5)]


def test_a_redelivered_run_that_holds_a_slot_is_not_counted_twice():
    held = {f"acme-{i}": Holding("acme") for i in range(4)}
    assert grant(Limits(total=5), held, [waits("acme-0"), waits("acme-0"), waits("acme-4")]) == ["acme-4"]


def test_a_free_slot_goes_to_the_tenant_furthest_below_its_share():
    held = held_by(a1="acme", a2="acme", b1="beta")
    assert grant(Limits(total=4), held, [waits("a3", "acme", 0), waits("b2", "beta", 9)]) == ["b2"]


def test_three_tenants_share_six_slots_evenly_whoever_came_first():
    granted = grant(Limits(total=6), {}, queue_of(acme=20, beta=20, coda=20))
    assert Counter(run_id.split("-")[0] for run_id in granted) == {"acme": 2, "beta": 2, "coda": 2}


def test_a_tenant_alone_may_use_everything():
    assert len(grant(Limits(total=6), {}, queue_of(acme=20))) == 6


def test_a_weight_of_three_to_one_gives_three_of_four_slots():
    granted = grant(Limits(total=4, weights={"acme": 3}), {}, queue_of(acme=9, beta=9))
    assert Counter(run_id.split("-")[0] for run_id in granted) == {"acme": 3, "beta": 1}


def test_a_tenants_own_limit_holds_while_slots_are_free():
    limits = Limits(total=10, per_tenant_default=2, per_tenant={"beta": 3})
    granted = grant(limits, {}, queue_of(acme=9, beta=9))
    assert Counter(run_id.split("-")[0] for run_id in granted) == {"acme": 2, "beta": 3}


def test_equal_tenants_are_served_by_waiting_time():
    assert grant(Limits(total=1), {}, [waits("b1", "beta", 1), waits("a1", "acme", 2)]) == ["b1"]


def test_a_total_that_was_lowered_below_what_is_held_grants_nothing():
    assert grant(Limits(total=1), held_by(a1="acme", a2="acme"), queue_of(beta=3)) == []


def test_the_place_in_the_queue_is_the_order_of_the_coming_grants():
    queue = [waits("a1", "acme", 0), waits("a2", "acme", 1), waits("b1", "beta", 2)]
    assert places_in_queue(Limits(total=1), held_by(x="coda"), queue) == {"a1": 1, "b1": 2, "a2": 3}


def test_a_run_whose_tenant_is_at_its_limit_stands_behind_the_others():
    limits = Limits(total=9, per_tenant={"acme": 1})
    queue = [waits("a2", "acme", 0), waits("b1", "beta", 5)]
    assert places_in_queue(limits, held_by(a1="acme"), queue)["a2"] == 2


def test_a_run_that_holds_a_slot_has_no_place():
    assert places_in_queue(Limits(total=1), held_by(held="acme"), [waits("held"), waits("a1")]) == {"a1": 1}


# ------------------------------------------------------------------------------------------------------------ GPUs

FOUR_A10G = Limits(total=9, gpus={"acme": {"A10G": 4}})


def wants(run_id: str, tenant: str = "acme", minute: int = 0, **gpus: int) -> Waiting:
    return Waiting(run_id, tenant, NOON + timedelta(minutes=minute), gpus)


def test_a_tenants_gpus_of_a_family_hold_while_slots_are_free():
    queue = [wants(f"a{n}", minute=n, A10G=1) for n in range(6)] + [wants("b", "beta", A10G=8)]
    assert sorted(grant(FOUR_A10G, {}, queue)) == ["a0", "a1", "a2", "a3", "b"]
    held = {"x": Holding("acme", {"A10G": 3})}
    assert grant(FOUR_A10G, held, [wants("a", A10G=1), wants("b", A10G=1, minute=1)]) == ["a"]


def test_a_run_of_another_family_passes_one_that_waits_for_gpus_and_one_of_the_same_does_not():
    held = {"x": Holding("acme", {"A10G": 2})}
    queue = [
        wants("large", A10G=4),
        wants("small", minute=1, A10G=1),
        wants("other", minute=2, H100=8),
        wants("cpu", minute=3),
    ]
    assert grant(FOUR_A10G, held, queue) == ["other", "cpu"]
    assert grant(FOUR_A10G, {}, queue) == ["large", "other", "cpu"]


def test_a_run_that_can_never_have_its_gpus_keeps_nobody_back():
    assert grant(FOUR_A10G, {}, [wants("never", A10G=8), wants("small", minute=1, A10G=1)]) == ["small"]


def test_gpus_are_limited_for_the_tenants_that_are_not_named_too():
    limits = Limits(total=9, gpus_default={"H100": 8}, gpus={"acme": {}})
    queue = [
        wants("b1", "beta", H100=8),
        wants("b2", "beta", 1, H100=8),
        wants("a1", H100=8),
        wants("a2", minute=1, H100=8),
    ]
    assert sorted(grant(limits, {}, queue)) == ["a1", "a2", "b1"]


def test_room_for_another_claim_counts_what_others_hold():
    held = {"a": Holding("acme", {"A10G": 1}), "b": Holding("acme", {"A10G": 2}), "c": Holding("beta", {"A10G": 9})}
    assert has_room(FOUR_A10G, held, "a", Holding("acme", {"A10G": 2}))
    assert not has_room(FOUR_A10G, held, "a", Holding("acme", {"A10G": 3}))
    assert has_room(FOUR_A10G, held, "a", Holding("acme", {"H100": 64}))
    assert not has_room(FOUR_A10G, held, "gone", Holding("acme"))


# ----------------------------------------------------------------------------------------------------------- laws

TENANTS = st.sampled_from(["acme", "beta", "coda"])
FAMILIES = st.sampled_from(["A10G", "H100"])
CLAIMS = st.dictionaries(FAMILIES, st.integers(1, 4), max_size=1)
LIMITS = st.builds(
    Limits,
    total=st.integers(0, 8),
    per_tenant_default=st.none() | st.integers(0, 4),
    per_tenant=st.dictionaries(TENANTS, st.integers(0, 5), max_size=2),
    weights=st.dictionaries(TENANTS, st.integers(0, 5), max_size=3),
    gpus=st.dictionaries(TENANTS, st.dictionaries(FAMILIES, st.integers(0, 6), max_size=2), max_size=2),
)
RUNS = st.integers(0, 15).map("run-{}".format)
MOMENTS = st.integers(0, 5).map(lambda minute: NOON + timedelta(minutes=minute))
QUEUES = st.lists(st.builds(Waiting, RUNS, TENANTS, MOMENTS, CLAIMS), max_size=15, unique_by=lambda each: each.run_id)
HELD = st.dictionaries(RUNS, st.builds(Holding, TENANTS, CLAIMS), max_size=6)


def holdings(held, waiting) -> dict[str, Holding]:
    """What every run holds, or would."""
    return {each.run_id: Holding(each.tenant, each.gpus) for each in waiting} | held


def tenants_of(held, waiting) -> dict[str, str]:
    return {run_id: holding.tenant for run_id, holding in holdings(held, waiting).items()}


@given(LIMITS, HELD, QUEUES)
def test_no_limit_is_ever_passed(limits, held, waiting):
    granted = grant(limits, held, waiting)
    tenant_of = tenants_of(held, waiting)
    assert len(granted) == len(set(granted)) and not set(granted) & set(held)
    assert not granted or len(held) + len(granted) <= limits.total
    running = Counter(tenant_of[run_id] for run_id in [*held, *granted])
    assert all(running[tenant_of[run_id]] <= limits.of(tenant_of[run_id]) for run_id in granted)


@given(LIMITS, HELD, QUEUES)
def test_no_tenant_passes_its_gpus_of_a_family(limits, held, waiting):
    granted = grant(limits, held, waiting)
    of = holdings(held, waiting)
    used = used_gpus(of[run_id] for run_id in [*held, *granted])
    for run_id in granted:
        tenant = of[run_id].tenant
        most = limits.gpus_of(tenant)
        assert all(used[tenant, family] <= most[family] for family in of[run_id].gpus if family in most)


@given(LIMITS, HELD, QUEUES)
def test_no_slot_stays_free_while_somebody_may_have_it(limits, held, waiting):
    granted = grant(limits, held, waiting)
    of = holdings(held, waiting)
    now_held = held | {run_id: of[run_id] for run_id in granted}
    running = Counter(holding.tenant for holding in now_held.values())
    left = [each for each in waiting if each.run_id not in now_held]
    if len(now_held) < limits.total:
        for each in left:
            most, used = limits.gpus_of(each.tenant), used_gpus(now_held.values())
            limited = {family for family in each.gpus if family in most}
            # It waits for GPUs, or stands behind one of its tenant that does.
            behind = [other for other in left if other.tenant == each.tenant and limited & other.gpus.keys()]
            short = any(
                used[each.tenant, family] + other.gpus[family] > most[family]
                for other in behind for family in limited & other.gpus.keys()
            )  # fmt: skip
            assert running[each.tenant] >= limits.of(each.tenant) or short


@given(LIMITS, HELD, QUEUES)
def test_granting_again_after_the_grant_was_written_changes_nothing(limits, held, waiting):
    granted = grant(limits, held, waiting)
    now_held = held | {run_id: holdings(held, waiting)[run_id] for run_id in granted}
    assert grant(limits, now_held, waiting) == []
    assert grant(limits, now_held, [each for each in waiting if each.run_id not in granted]) == []


@given(LIMITS, HELD, QUEUES)
def test_one_slot_a_write_gives_the_same_slots_as_all_at_once(limits, held, waiting):
    now_held, one_by_one = dict(held), []
    while chosen := grant(limits, now_held, waiting)[:1]:
        now_held |= {chosen[0]: holdings(held, waiting)[chosen[0]]}
        one_by_one += chosen
    assert one_by_one == grant(limits, held, waiting)


@given(LIMITS, HELD, QUEUES, st.randoms(use_true_random=False))
def test_the_order_of_the_queue_table_does_not_matter(limits, held, waiting, random):
    shuffled = [*waiting, *waiting]
    random.shuffle(shuffled)
    assert grant(limits, dict(reversed(held.items())), shuffled) == grant(limits, held, waiting)


@given(QUEUES)
def test_every_waiting_run_gets_a_slot_in_the_end(waiting):
    limits, served = Limits(total=1), []
    while chosen := grant(limits, {}, [each for each in waiting if each.run_id not in served]):
        served += chosen
    assert sorted(served) == sorted(each.run_id for each in waiting)


@given(LIMITS, HELD, QUEUES)
def test_places_are_1_to_n_and_begin_with_what_is_granted_now(limits, held, waiting):
    queue = [each.run_id for each in waiting if each.run_id not in held]
    places = places_in_queue(limits, held, waiting)
    assert sorted(places.values()) == list(range(1, len(queue) + 1)) and places.keys() == set(queue)
    granted = grant(limits, held, waiting)
    assert sorted(places, key=lambda run_id: places[run_id])[: len(granted)] == granted


# ----------------------------------------------------------------------------------- twenty racing starts, five slots


class Slots:
    """A table with one conditional write: `take` works only at the revision that was read."""

    def __init__(self) -> None:
        self.revision, self.held = 0, {}
        self._one_write = threading.Lock()

    def take(self, revision: int, held: dict[str, Holding]) -> bool:
        with self._one_write:
            if revision != self.revision:
                return False
            self.revision, self.held = revision + 1, held
            return True


def starter(slots: Slots):
    def try_start(tenant: str, run_id: str) -> bool:
        while True:
            revision, held = slots.revision, slots.held
            if run_id in held:
                return True
            if run_id not in grant(Limits(total=20, per_tenant_default=5), held, [Waiting(run_id, tenant, NOON)]):
                return False
            if slots.take(revision, held | {run_id: Holding(tenant)}):
                return True

    return try_start


def test_twenty_threads_that_race_for_five_slots_get_exactly_five(monkeypatch, capsys):
    slots, module = Slots(), types.ModuleType("racing_starts")
    module.try_start = starter(slots)
    monkeypatch.setitem(sys.modules, "racing_starts", module)
    monkeypatch.setattr(sys, "argv", ["c63_quota_race.py", "racing_starts:try_start"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(CASES / "c63_quota_race.py"))
    assert (ended.value.code, capsys.readouterr().out) == (False, "admitted 5 want 5\n")
    again = next(iter(slots.held))  # a redelivery: still five, and it is not counted twice
    assert module.try_start("acme", again) and len(slots.held) == 5
