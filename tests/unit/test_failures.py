"""Failures: evidence leads to a class, a class and the attempts so far lead to an action."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.failures import (
    ACTIONS,
    Action,
    ActionKind,
    AttemptSummary,
    Failure,
    FailureClass,
    action_for,
    billed_without_progress,
    classify_end,
    classify_execution,
    classify_job,
    classify_refusal,
)
from microtuning_core.domain.job import JobFacts

CASES = Path(__file__).parents[1] / "cases"
FC = FailureClass


def attempt(failure_class=FC.PLATFORM, **changes) -> AttemptSummary:
    facts = {
        "billed_s": 600,
        "checkpoint_step": None,
        "instance_type": "ml.g5.xlarge",
        "micro_batch_size": 8,
        "spot": False,
    }
    return AttemptSummary(failure_class=failure_class, **(facts | changes))


def after(*attempts: AttemptSummary, candidates=None) -> Action:
    """The action after the last of these attempts."""
    return action_for(Failure(attempts[-1].failure_class, "why"), attempts, candidates=candidates)


def no_room(instance_type="ml.g5.xlarge", spot=False) -> AttemptSummary:
    return attempt(FC.CAPACITY, billed_s=0, instance_type=instance_type, spot=spot)


# ------------------------------------------------------------------------------------------------------- evidence

WANTED_C55 = [
    (FC.THROTTLED, ActionKind.RETRY_SAME),
    (FC.QUOTA, ActionKind.NEXT_CANDIDATE),
    (FC.USER, ActionKind.GIVE_UP),
    (FC.CAPACITY, ActionKind.NEXT_CANDIDATE),
    (FC.USER, ActionKind.GIVE_UP),
    (FC.PLATFORM, ActionKind.RETRY_SAME),
    (FC.UNKNOWN, ActionKind.GIVE_UP),
    (FC.DEADLINE, ActionKind.STOP),
]


@pytest.mark.parametrize(
    ("pair", "wanted"), list(zip(json.loads((CASES / "c55_errors.json").read_text()), WANTED_C55, strict=True))
)
def test_one_error_name_with_many_causes_is_told_apart_by_the_cause(pair, wanted):
    failure = classify_execution(pair["Error"], pair["Cause"])
    summary = attempt(failure.failure_class, billed_s=0)
    assert (failure.failure_class, action_for(failure, [summary]).kind) == wanted
    if pair["Cause"] and not pair["Cause"].startswith("{"):
        assert pair["Cause"] in failure.message


def test_a_quota_refusal_names_the_quota_to_raise():
    text = (
        "The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0 Instances, with current "
        "utilization of 0 Instances and a request delta of 1 Instances."
    )
    failure = classify_refusal("ResourceLimitExceeded", text)
    assert failure.failure_class is FC.QUOTA
    assert "Raise the quota 'ml.p4d.24xlarge for training job usage' in Service Quotas" in failure.message


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("ThrottlingException", FC.THROTTLED),
        ("ResourceLimitExceeded", FC.QUOTA),
        ("InternalFailure", FC.PLATFORM),
        ("ValidationException", FC.USER),
        ("AccessDeniedException", FC.USER),
        ("SomethingNew", FC.USER),
    ],
)
def test_a_refusal_is_classified_by_its_code(code, wanted):
    assert classify_refusal(code, "said the service").failure_class is wanted


def test_a_refusal_without_any_words_still_says_something():
    assert classify_refusal("", None) == Failure(FC.USER, "SageMaker gave no reason")


def test_our_failure_line_gives_class_message_file_and_line():
    line = {"class": "user", "message": 'bad "reward" {x}', "file": "rewards.py", "line": 12}
    failure = classify_end("Failed", "Failed", f"AlgorithmError: {json.dumps(line)}, exit code: 1", 30)
    assert failure == Failure(FC.USER, 'bad "reward" {x}', "rewards.py", 12)


@pytest.mark.parametrize("claimed", ["memory", "numerics", "user", "platform"])
def test_a_container_may_claim_four_classes(claimed):
    reason = f'AlgorithmError: {{"class": "{claimed}", "message": "m"}}, exit code: 1'
    assert classify_end("Failed", None, reason, 30).failure_class == claimed


@pytest.mark.parametrize("claimed", ["capacity", "throttled", "stopped", "nonsense", ""])
def test_a_container_may_not_claim_a_class_that_retries_for_ever(claimed):
    reason = f'AlgorithmError: {{"class": "{claimed}", "message": "m"}}, exit code: 1'
    assert classify_end("Failed", None, reason, 30).failure_class is FC.USER


def test_a_line_cut_at_1024_characters_keeps_its_class_and_the_start_of_its_message():
    line = json.dumps({"class": "memory", "message": "out of memory " * 100, "file": "a.py", "line": 3})
    failure = classify_end("Failed", "Failed", f"AlgorithmError: {line}"[:1024], 30)
    assert failure.failure_class is FC.MEMORY
    assert failure.message.startswith("out of memory out of memory")
    assert (failure.file, failure.line) == (None, None)


def test_wherever_a_line_is_cut_after_its_class_the_class_is_kept():
    line = json.dumps({"class": "numerics", "message": 'a "quote", a \\, \u00e9\n', "file": "r.py", "line": 77})
    whole = f"AlgorithmError: {line}, exit code: 1"
    shortest = whole.index("numerics") + len('numerics"')
    classes = {classify_end("Failed", None, whole[:end], 1).failure_class for end in range(shortest, len(whole))}
    assert classes == {FC.NUMERICS}


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ('AlgorithmError: ExecuteUserScriptError: ExitCode 1 ErrorMessage "torch.OutOfMemoryError: CUDA"', FC.MEMORY),
        ("AlgorithmError: DefaultCPUAllocator: can't allocate memory, exit code: 1", FC.MEMORY),
        ("AlgorithmError: , exit code: 137", FC.PLATFORM),
        ("AlgorithmError: ExecuteUserScriptError: ExitCode -9", FC.PLATFORM),
        ("AlgorithmError: CUDA error: uncorrectable ECC error encountered, exit code: 1", FC.PLATFORM),
        ("AlgorithmError: , exit code: 143", FC.PLATFORM),
        ("AlgorithmError: ValueError: bad column, exit code: 1", FC.USER),
        ("ClientError: Data download failed: no such key", FC.USER),
        ("ClientError: Checkpoint download failed: An error occurred (404): Not Found", FC.PLATFORM),
        ("CapacityError: Unable to provision requested ML compute capacity.", FC.CAPACITY),
        ("InternalServerError: We encountered an internal error. Please try again.", FC.PLATFORM),
        ("A sentence nobody has seen before", FC.UNKNOWN),
        ("", FC.UNKNOWN),
        (None, FC.UNKNOWN),
    ],
)
def test_a_failed_job_is_classified_by_its_reason(reason, wanted):
    failure = classify_end("Failed", "Failed", reason, 30)
    assert failure.failure_class is wanted
    assert failure.message


@pytest.mark.parametrize(
    ("secondary", "billed_s", "wanted"),
    [
        ("MaxWaitTimeExceeded", 0, FC.CAPACITY),
        ("MaxWaitTimeExceeded", None, FC.CAPACITY),
        ("MaxWaitTimeExceeded", 45, FC.INTERRUPTED),
        ("MaxRuntimeExceeded", 3600, FC.DEADLINE),
        ("Stopped", 100, FC.STOPPED),
        (None, None, FC.STOPPED),
    ],
)
def test_the_kinds_of_stopped_are_told_apart(secondary, billed_s, wanted):
    assert classify_end("Stopped", secondary, None, billed_s).failure_class is wanted


def test_a_described_job_stopped_by_its_longest_run_time_is_a_deadline():
    detail = json.loads((CASES / "c53_stopped_maxruntime.json").read_text())["detail"]
    job = JobFacts(
        "dev-acme-x-a001", detail["TrainingJobStatus"], detail["SecondaryStatus"], datetime(2026, 1, 2, tzinfo=UTC)
    )
    assert classify_job(job).failure_class is FC.DEADLINE


@given(st.text(), st.none() | st.text(), st.none() | st.text(), st.none() | st.integers())
def test_no_answer_of_the_service_makes_the_classifier_raise(status, secondary, reason, billed_s):
    assert classify_end(status, secondary, reason, billed_s).message
    assert classify_end("Failed", secondary, f'AlgorithmError: {{"class": {reason}', billed_s).message


@given(st.none() | st.text(), st.none() | st.text() | st.dictionaries(st.text(), st.integers()).map(json.dumps))
def test_no_error_of_an_execution_makes_the_classifier_raise(error, cause):
    assert classify_execution(error, cause).message
    assert classify_refusal(error or "", cause).message


# --------------------------------------------------------------------------------------------------------- action


def test_every_class_has_an_action():
    assert set(ACTIONS) == set(FailureClass)


def test_no_capacity_moves_on_at_once_while_candidates_are_left():
    assert after(no_room("ml.g5.xlarge"), candidates=3) == Action(ActionKind.NEXT_CANDIDATE)
    assert after(no_room("ml.g5.xlarge"), no_room("ml.g6.xlarge"), candidates=3).kind is ActionKind.NEXT_CANDIDATE


def test_waits_for_capacity_grow_from_one_minute_to_thirty():
    tried = [no_room() for _ in range(8)]
    waits = [after(*tried[:n], candidates=1).wait_s for n in range(1, 9)]
    assert waits == [60, 120, 240, 480, 960, 1800, 1800, 1800]
    assert after(*tried, candidates=1).kind is ActionKind.WAIT_FOR_CAPACITY


def test_without_a_number_of_candidates_the_wait_begins_when_a_plan_comes_up_again():
    spot, on_demand = no_room(spot=True), no_room(spot=False)
    assert after(spot, on_demand).kind is ActionKind.NEXT_CANDIDATE
    assert after(spot, on_demand, spot) == Action(ActionKind.WAIT_FOR_CAPACITY, 60)
    assert after(spot, on_demand, spot, on_demand) == Action(ActionKind.WAIT_FOR_CAPACITY, 120)


def test_an_attempt_that_ran_ends_the_streak_without_room():
    ran = attempt(FC.PLATFORM, checkpoint_step=10)
    assert after(no_room(), no_room(), ran, no_room(), candidates=2).kind is ActionKind.NEXT_CANDIDATE


def test_attempts_that_cost_nothing_never_end_a_run_however_many():
    assert after(*[no_room() for _ in range(50)], candidates=1).kind is ActionKind.WAIT_FOR_CAPACITY


def test_a_platform_failure_runs_the_same_plan_again():
    assert after(attempt(FC.PLATFORM)) == Action(ActionKind.RETRY_SAME)


def test_the_third_unbilled_platform_failure_in_a_row_waits_so_that_a_free_loop_cannot_spin():
    free = attempt(FC.PLATFORM, billed_s=0)
    assert after(free, free).kind is ActionKind.RETRY_SAME
    assert after(free, free, free) == Action(ActionKind.WAIT_FOR_CAPACITY, 60)


def test_memory_asks_for_another_machine_as_the_container_has_halved_micro_batches_itself():
    assert after(attempt(FC.MEMORY, micro_batch_size=8)) == Action(ActionKind.NEXT_CANDIDATE)


def test_bad_numerics_get_one_new_lineage_and_then_fail_with_the_evidence():
    first = attempt(FC.NUMERICS, checkpoint_step=10)
    assert after(first).kind is ActionKind.NEW_LINEAGE
    second = after(first, attempt(FC.NUMERICS, checkpoint_step=20, lineage=2))
    assert second.kind is ActionKind.GIVE_UP
    assert "again after a new lineage: why" in second.reason


@pytest.mark.parametrize("failure_class", [FC.USER, FC.UNKNOWN])
def test_the_user_s_own_failure_is_never_retried(failure_class):
    assert after(attempt(failure_class)) == Action(ActionKind.GIVE_UP)


@pytest.mark.parametrize("failure_class", [FC.DEADLINE, FC.STOPPED])
def test_a_deadline_and_a_stop_end_the_run_as_stopped(failure_class):
    assert after(attempt(failure_class)) == Action(ActionKind.STOP)


@pytest.mark.parametrize("failure_class", [FC.PLATFORM, FC.INTERRUPTED, FC.MEMORY])
def test_three_billed_attempts_in_a_row_without_a_newer_checkpoint_end_the_run(failure_class):
    stuck = [attempt(failure_class, checkpoint_step=None) for _ in range(3)]
    assert after(*stuck[:2]).kind is not ActionKind.GIVE_UP
    ended = after(*stuck)
    assert ended.kind is ActionKind.GIVE_UP
    assert ended.reason == "3 billed attempts in a row made no newer checkpoint: why"


def test_only_billed_attempts_count_and_a_newer_checkpoint_starts_the_count_again():
    steps = [10, 10, 10]  # the first made a checkpoint, two did not get further
    assert billed_without_progress([attempt(checkpoint_step=step) for step in steps]) == 2
    assert billed_without_progress([attempt(checkpoint_step=step) for step in [*steps, 20]]) == 0
    free = [attempt(FC.CAPACITY, billed_s=0) for _ in range(5)]
    assert billed_without_progress([attempt(), *free, attempt()]) == 2


def test_a_new_lineage_starts_from_an_earlier_step_and_still_makes_progress():
    before = attempt(FC.NUMERICS, checkpoint_step=100, lineage=1)
    assert billed_without_progress([before, attempt(checkpoint_step=90, lineage=2)]) == 0


def test_a_run_that_gets_further_each_time_may_be_interrupted_twenty_times():
    attempts = [attempt(FC.INTERRUPTED, checkpoint_step=step, spot=True) for step in range(0, 200, 10)]
    assert after(*attempts).kind is ActionKind.RETRY_SAME


@given(
    st.lists(
        st.builds(
            attempt,
            st.sampled_from(FailureClass),
            billed_s=st.sampled_from([0, 0, 100]),
            checkpoint_step=st.none() | st.integers(0, 50),
            instance_type=st.sampled_from(["ml.g5.xlarge", "ml.g6.xlarge"]),
            spot=st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    st.none() | st.integers(1, 4),
)
def test_an_action_is_a_pure_function_that_waits_between_1_and_30_minutes_or_not_at_all(attempts, candidates):
    action = after(*attempts, candidates=candidates)
    assert action == after(*attempts, candidates=candidates)
    assert (action.kind is ActionKind.WAIT_FOR_CAPACITY) == (60 <= action.wait_s <= 1800)
