"""Planning: what fits, what it may cost, and what comes after a failure."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.catalog import find
from microtuning_core.domain.errors import BudgetExceeded, InvalidName, NothingFits
from microtuning_core.domain.failures import AttemptSummary, FailureClass
from microtuning_core.domain.planning import (
    TINY_DECODER,
    ModelShape,
    Plan,
    PlanRequest,
    candidates,
    choose_plan,
    estimate_memory,
    steps_between_checkpoints,
)
from microtuning_core.domain.warm_pools import KEEP_ALIVE_S

FC = FailureClass
HALF_B = ModelShape(parameters=494_000_000, hidden_size=896, layers=24, vocabulary=151_936, bytes_per_weight=2)
SEVEN_B = ModelShape(parameters=7_000_000_000, hidden_size=4096, layers=32, vocabulary=32_000, bytes_per_weight=2)


def tiny(**changes) -> PlanRequest:
    return PlanRequest(**({"model": TINY_DECODER, "max_length": 64, "batch_size": 256} | changes))


def lora(model=HALF_B, **changes) -> PlanRequest:
    return PlanRequest(**({"model": model, "adapter": "lora", "batch_size": 16, "max_length": 1024} | changes))


def failed(plan: Plan, failure_class: FailureClass, billed_s: int = 100) -> AttemptSummary:
    return AttemptSummary(
        failure_class=failure_class,
        billed_s=billed_s,
        checkpoint_step=None,
        instance_type=plan.instance_type,
        micro_batch_size=plan.micro_batch_size,
        spot=plan.spot,
    )


def plans_after(request: PlanRequest, *failures: FailureClass) -> list[Plan]:
    """The plan of the first attempt, and of each one after these failures."""
    plans, history = [choose_plan(request, [])], []
    for failure_class in failures:
        history.append(failed(plans[-1], failure_class))
        plans.append(choose_plan(request, history))
    return plans


# --------------------------------------------------------------------------------------------------------- memory


def test_gradient_checkpointing_keeps_one_element_a_layer_and_computes_one_layer_at_a_time():
    kept = estimate_memory(HALF_B, "lora", "adamw", 1024, 8)
    again = estimate_memory(HALF_B, "lora", "adamw", 1024, 8, gradient_checkpointing=True)
    assert again.activations_gib / kept.activations_gib == pytest.approx((24 + 32) / (24 * 32))
    assert again.static_gib == kept.static_gib


def test_a_teacher_takes_its_weights_and_nothing_else():
    alone = estimate_memory(HALF_B, "lora", "adamw", 1024, 1)
    taught = estimate_memory(HALF_B, "lora", "adamw", 1024, 1, frozen=[SEVEN_B])
    assert taught.total_gib - alone.total_gib == pytest.approx(7e9 * 2 / 2**30)


def test_a_teacher_may_ask_for_a_larger_machine():
    alone, taught = choose_plan(lora(), []), choose_plan(lora(frozen=(SEVEN_B,)), [])
    assert find(taught.instance_type).memory_for_training_gib > find(alone.instance_type).memory_for_training_gib


def test_qlora_is_planned_for_a_gpu():
    assert find(choose_plan(lora(adapter="qlora", batch_size=1, max_length=64), []).instance_type).gpus


@pytest.mark.parametrize("bytes_per_weight", [2, 4])
def test_full_fine_tuning_takes_16_bytes_a_parameter_in_16_and_in_32_bits(bytes_per_weight):
    model = ModelShape(parameters=2**30, hidden_size=64, layers=1, vocabulary=64, bytes_per_weight=bytes_per_weight)
    assert estimate_memory(model, "none", "adamw", 1, 1).static_gib == 16.0


def test_a_7b_model_needs_13_gib_of_weights_with_lora_and_under_4_with_qlora():
    assert 13 < estimate_memory(SEVEN_B, "lora", "adamw", 1024, 1).weights_gib < 13.5
    assert 3.4 < estimate_memory(SEVEN_B, "qlora", "adamw", 1024, 1).weights_gib < 4


def test_logits_of_1024_tokens_in_a_vocabulary_of_152k_take_2_gib_of_16_bits():
    # 1024 x 151936 x (2 + 12) bytes = 2.03 GiB
    assert estimate_memory(HALF_B, "lora", "adamw", 1024, 1).logits_gib == pytest.approx(2.03, abs=0.01)


def test_activations_grow_with_the_micro_batch_and_weights_do_not():
    one, four = (estimate_memory(HALF_B, "none", "adamw", 512, size) for size in (1, 4))
    assert four.activations_gib == pytest.approx(4 * one.activations_gib)
    assert four.static_gib == one.static_gib


@given(st.integers(1, 64), st.integers(1, 8192), st.sampled_from(["none", "lora", "qlora"]))
def test_more_tokens_never_need_less_memory(micro_batch, max_length, adapter):
    less = estimate_memory(HALF_B, adapter, "adamw", max_length, micro_batch).total_gib
    assert estimate_memory(HALF_B, adapter, "adamw", max_length + 1, micro_batch).total_gib > less


# ----------------------------------------------------------------------------------------------------- candidates


def test_a_tiny_model_is_planned_onto_the_cheapest_cpu_type_on_demand():
    plan = candidates(tiny())[0]
    assert (plan.instance_type, plan.spot, plan.micro_batch_size) == ("ml.m5.large", False, None)
    assert plan.price_usd_per_hour == Decimal("0.115")


def test_half_a_billion_parameters_go_to_a_gpu_and_not_to_a_cpu():
    types = {plan.instance_type for plan in candidates(lora())}
    assert all(find(each).gpus for each in types)


def test_a_named_cpu_type_is_taken_at_the_users_word():
    plan = candidates(lora(instance="ml.m5.2xlarge"))[0]
    assert plan.instance_type == "ml.m5.2xlarge"


def test_full_fine_tuning_of_7b_fits_nowhere_and_says_how_much_it_needs():
    with pytest.raises(NothingFits) as error:
        candidates(PlanRequest(model=SEVEN_B, batch_size=8))
    assert error.value.largest_gib == 80
    assert error.value.needed_gib > 110


def test_a_named_type_that_the_weights_alone_overfill_is_refused():
    with pytest.raises(NothingFits, match=r"has 24\.0 GiB"):
        candidates(PlanRequest(model=SEVEN_B, instance="ml.g5.xlarge"))


def test_lora_on_7b_fits_a_24_gib_gpu_with_a_micro_batch_below_the_batch():
    plan = next(plan for plan in candidates(lora(SEVEN_B, max_length=256)) if plan.instance_type == "ml.g6.xlarge")
    assert plan.micro_batch_size in (1, 2, 4)


def test_candidates_are_sorted_by_price_and_never_cost_eight_times_the_cheapest():
    prices = [plan.price_usd_per_hour for plan in candidates(tiny())]
    assert prices == sorted(prices)
    assert prices[-1] <= 8 * prices[0]


def test_a_named_type_comes_first_and_its_fallbacks_follow_in_the_users_order():
    request = tiny(instance="ml.g5.xlarge", fallbacks=("ml.m5.xlarge", "ml.c5.xlarge"))
    assert [plan.instance_type for plan in candidates(request)] == ["ml.g5.xlarge", "ml.m5.xlarge", "ml.c5.xlarge"]


def test_an_unknown_type_is_refused_with_its_nearest_match():
    with pytest.raises(InvalidName, match=r"ml\.m5\.large"):
        candidates(tiny(instance="ml.m5.larg"))


def test_a_script_with_an_unknown_model_gets_a_gpu():
    plan = candidates(PlanRequest(model=None))[0]
    assert (plan.instance_type, plan.micro_batch_size) == ("ml.g4dn.xlarge", None)


def test_bfloat16_asked_for_skips_types_without_it_but_a_named_one_only_gets_a_notice():
    assert candidates(lora(dtype="bfloat16"))[0].instance_type == "ml.g6.xlarge"  # g4dn is cheaper, without bf16
    plan = candidates(tiny(dtype="bfloat16", instance="ml.m5.large"))[0]
    assert plan.notices == ("ml.m5.large has no bfloat16 in hardware: float32 is used instead",)
    assert candidates(tiny(instance="ml.m5.large"))[0].notices == ()


# ----------------------------------------------------------------------------------------------------------- spot


def test_spot_auto_tries_spot_and_then_the_same_type_on_demand_when_a_checkpoint_is_in_reach():
    first, second = candidates(lora(total_steps=1000))[:2]
    assert (first.instance_type, first.spot, second.spot) == (second.instance_type, True, False)


def test_spot_auto_means_on_demand_when_the_length_of_the_run_is_not_known():
    assert not any(plan.spot for plan in candidates(lora(total_steps=None)))


@pytest.mark.parametrize(("expected_s", "spot"), [(None, False), (599, False), (600, True)])
def test_a_short_cpu_run_never_waits_for_spot(expected_s, spot):
    assert candidates(tiny(total_steps=1000, expected_s=expected_s))[0].spot is spot


def test_fast_recovery_means_on_demand_on_machines_that_are_kept():
    kept = {(plan.spot, plan.keep_alive_s) for plan in candidates(lora(total_steps=1000, recovery="fast"))}
    assert kept == {(False, KEEP_ALIVE_S)}


def test_cheap_recovery_keeps_no_machines_on_spot_or_on_demand():
    kept = {(plan.spot, plan.keep_alive_s) for plan in candidates(lora(total_steps=1000))}
    assert kept == {(True, 0), (False, 0)}


def test_a_fast_run_is_planned_the_same_again_so_that_it_fits_the_machines_kept_for_it():
    first, again = plans_after(lora(total_steps=1000, recovery="fast"), FC.PLATFORM)
    assert again == first


def test_a_budget_leaves_what_the_kept_machines_may_cost():
    request = tiny(budget_usd=Decimal(1))
    cheap, fast = (choose_plan(request.model_copy(update={"recovery": each}), []) for each in ("cheap", "fast"))
    assert cheap.max_runtime_s - fast.max_runtime_s == KEEP_ALIVE_S


@pytest.mark.parametrize("spot", [True, False])
def test_a_user_who_says_spot_true_or_false_gets_just_that(spot):
    assert {plan.spot for plan in candidates(tiny(spot=spot))} == {spot}


def test_an_interval_longer_than_the_run_is_corrected_so_that_six_steps_save_at_two():
    # 90 rows in batches of 1 x 16 are 6 steps: an interval of 50 never saves
    every, notice = steps_between_checkpoints(50, 6)
    assert every == 2
    assert notice == "checkpoints every 2 steps instead of every 50 steps: the run has 6"
    assert notice in candidates(tiny(spot=True, total_steps=6, checkpoint_every_steps=50))[0].notices


@pytest.mark.parametrize(("every", "total"), [(500, None), (50, 51), (1, 1), (1, 2)])
def test_an_interval_that_saves_before_the_end_is_kept(every, total):
    assert steps_between_checkpoints(every, total) == (every, None)


@given(st.integers(1, 1000), st.integers(2, 1000))
def test_a_run_of_two_steps_or_more_always_saves_before_its_end(every, total):
    assert steps_between_checkpoints(every, total)[0] < total


# --------------------------------------------------------------------------------------------------------- budget


def test_a_budget_shortens_the_run_time_by_what_it_buys_less_180_seconds():
    # 0.115 USD buy one hour of ml.m5.large: 3600 - 180 = 3420 s
    assert candidates(tiny(instance="ml.m5.large", budget_usd=Decimal("0.115")))[0].max_runtime_s == 3420


def test_what_was_spent_already_counts():
    request = tiny(instance="ml.m5.large", budget_usd=Decimal("0.23"), spent_usd=Decimal("0.115"))
    assert candidates(request)[0].max_runtime_s == 3420


def test_two_instances_halve_what_a_budget_buys():
    request = tiny(instance="ml.m5.large", count=2, budget_usd=Decimal("0.115"))
    assert candidates(request)[0].max_runtime_s == 1620


def test_a_large_budget_leaves_the_users_own_limit():
    assert candidates(tiny(max_runtime_s=3600, budget_usd=Decimal(100)))[0].max_runtime_s == 3600


def test_a_budget_that_does_not_buy_300_seconds_and_the_reserve_is_refused_with_the_price_of_that():
    with pytest.raises(BudgetExceeded) as error:
        candidates(tiny(budget_usd=Decimal("0.01")))
    # 480 s of ml.m5.large: 0.01534 USD, rounded up
    assert (error.value.cheapest_usd, error.value.instance_type) == (Decimal("0.0154"), "ml.m5.large")


def test_a_budget_leaves_out_only_the_types_it_cannot_pay():
    types = {plan.instance_type for plan in candidates(tiny(budget_usd=Decimal("0.02")))}
    assert types == {"ml.m5.large"}


@given(st.decimals("0.02", "500", places=4), st.integers(300, 100_000), st.integers(1, 8))
def test_no_plan_can_cost_more_than_the_budget(budget_usd, max_runtime_s, count):
    request = tiny(budget_usd=budget_usd, max_runtime_s=max_runtime_s, count=count)
    try:
        plans = candidates(request)
    except BudgetExceeded:
        return
    for plan in plans:
        assert 300 <= plan.max_runtime_s <= max_runtime_s
        assert (plan.max_runtime_s + 180) * plan.price_usd_per_hour * count / 3600 <= budget_usd + Decimal("1e-20")


# -------------------------------------------------------------------------------------------------- after failures


def test_a_capacity_failure_moves_to_the_next_cheapest_instance():
    types = [plan.instance_type for plan in plans_after(tiny(), FC.CAPACITY, FC.CAPACITY)]
    assert types == ["ml.m5.large", "ml.c5.xlarge", "ml.m5.xlarge"]


def test_no_spot_capacity_moves_to_the_same_type_on_demand():
    spot, on_demand = plans_after(lora(total_steps=1000), FC.CAPACITY)
    assert (spot.spot, on_demand.spot) == (True, False)
    assert spot.instance_type == on_demand.instance_type


def test_when_all_were_tried_the_cheapest_is_tried_again():
    request = tiny(instance="ml.m5.large", fallbacks=("ml.c5.xlarge",))
    types = [plan.instance_type for plan in plans_after(request, FC.CAPACITY, FC.QUOTA, FC.CAPACITY)]
    assert types == ["ml.m5.large", "ml.c5.xlarge", "ml.m5.large", "ml.c5.xlarge"]


def test_a_platform_failure_runs_on_the_same_plan():
    first, second = plans_after(lora(total_steps=1000), FC.PLATFORM)
    assert first == second


def test_a_run_that_found_room_on_the_third_type_stays_there_after_a_platform_failure():
    types = [plan.instance_type for plan in plans_after(tiny(), FC.CAPACITY, FC.CAPACITY, FC.PLATFORM)]
    assert types[-1] == types[-2] == "ml.m5.xlarge"


def test_out_of_memory_takes_a_larger_type_as_the_container_has_halved_in_place():
    first, larger, largest = plans_after(tiny(), FC.MEMORY, FC.MEMORY)
    assert [plan.micro_batch_size for plan in (first, larger, largest)] == [None, None, None]
    assert first.instance_type == "ml.m5.large"
    assert larger.instance_type == "ml.m5.xlarge"  # 16 GiB; ml.c5.xlarge is cheaper and has 8
    assert find(largest.instance_type).memory_for_training_gib > find(larger.instance_type).memory_for_training_gib


def test_a_larger_type_is_kept_after_a_later_failure_of_another_kind():
    _, larger, again = plans_after(tiny(), FC.MEMORY, FC.PLATFORM)
    assert larger == again


def test_without_a_larger_type_micro_batches_go_below_what_the_container_tried():
    plans = plans_after(tiny(instance="ml.m5.large", batch_size=256), FC.MEMORY, FC.MEMORY)
    assert [plan.micro_batch_size for plan in plans] == [None, 16, 1]


def test_a_run_whose_smallest_micro_batch_was_tried_ends_in_nothing_fits():
    with pytest.raises(NothingFits):
        plans_after(tiny(instance="ml.m5.large", batch_size=8), FC.MEMORY)


def test_a_micro_batch_of_one_that_still_does_not_fit_on_the_only_type_ends_in_nothing_fits():
    with pytest.raises(NothingFits):
        plans_after(tiny(instance="ml.m5.large", batch_size=1), FC.MEMORY)


def test_a_script_that_runs_out_of_memory_goes_straight_to_a_larger_type():
    first, larger = plans_after(tiny(batch_size=None), FC.MEMORY)
    assert find(larger.instance_type).memory_gib > find(first.instance_type).memory_gib


def test_a_budget_that_shrank_shortens_the_next_attempt():
    first = choose_plan(tiny(budget_usd=Decimal("0.115")), [])
    history = [failed(first, FC.PLATFORM)]
    later = choose_plan(tiny(budget_usd=Decimal("0.115"), spent_usd=Decimal("0.0575")), history)
    assert (first.max_runtime_s, later.max_runtime_s) == (3420, 1620)


@given(st.lists(st.sampled_from(FailureClass), max_size=8))
def test_whatever_failed_before_the_next_plan_is_one_of_the_candidates(failures):
    request = lora(total_steps=1000)
    allowed = {(plan.instance_type, plan.spot) for plan in candidates(request)}
    try:
        plans = plans_after(request, *failures)
    except NothingFits:
        return
    grown = FC.MEMORY in failures  # a larger type may lie beyond the price limit of the first list
    assert grown or {(plan.instance_type, plan.spot) for plan in plans} <= allowed
