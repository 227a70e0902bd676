"""Two functions at work on one run at once: meetings that went wrong before, each by name. test_interleavings.py looks for
others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from microtuning_core.domain.cost import total
from microtuning_core.domain.layout import progress_key
from microtuning_core.domain.run import Run, RunStatus
from tests.unit.small_cloud import Died, Message, SmallCloud


def stage() -> SmallCloud:
    """One run, whose first attempt waits to be launched."""
    cloud = SmallCloud(run_count=1, quota=1)
    cloud.deliver_all(rounds=2)
    return cloud


def trained() -> SmallCloud:
    """One run in training, with a checkpoint."""
    cloud = stage()
    cloud.deliver_all()
    cloud.jobs.get_a_machine(job_of(cloud, 1))
    cloud.jobs.save(job_of(cloud, 1), 4)
    cloud.deliver_all()
    return cloud


def the_run(cloud: SmallCloud) -> Run:
    (run,) = cloud.runs.records.values()
    return run


def job_of(cloud: SmallCloud, attempt: int) -> str:
    return the_run(cloud).attempts[attempt - 1].job_name


def message(cloud: SmallCloud, queue: str) -> Message:
    return next(each for each in reversed(cloud.messages) if each.queue == queue)


def says(cloud: SmallCloud, verb: str) -> None:
    """The user's command, obeyed at once."""
    cloud.command(the_run(cloud).run_id, len(cloud.objects.bodies), verb=verb)
    cloud.deliver(message(cloud, "commands"))


def just_before(port: Any, method: str, happens: Callable[[], object]) -> None:
    """The next call of that method comes a moment too late."""
    real = getattr(port, method)

    def call(*args: Any, **named: Any) -> Any:
        setattr(port, method, real)
        happens()
        return real(*args, **named)

    setattr(port, method, call)


def dies() -> None:
    raise Died


# -- the launch


@pytest.mark.parametrize(("verb", "then"), [("cancel", "stopped"), ("rollback", None)])
def test_a_word_that_comes_while_the_job_is_asked_for_waits_for_that_job_and_its_bill(verb, then):
    cloud = trained()
    cloud.jobs.end(job_of(cloud, 1), "lost")
    cloud.deliver(message(cloud, "training-events"))
    cloud.deliver(message(cloud, "invoke"))
    just_before(cloud.jobs, "create", lambda: says(cloud, verb))
    cloud.deliver(message(cloud, "launches"))
    second = job_of(cloud, 2)
    assert (cloud.jobs.made[second].status, the_run(cloud).current.is_settled) == ("Stopping", False)
    cloud.jobs.end(second, "stopped")
    cloud.deliver_all()
    run = the_run(cloud)
    assert (run.attempts[1].outcome, run.attempts[1].launched_at is not None, run.verdict) == ("stopped", True, then)


def test_the_job_of_a_launch_that_came_twice_and_was_refused_first_is_stopped_and_paid():
    cloud = stage()
    launch = message(cloud, "launches")

    def refused() -> None:
        cloud.jobs.refusals = [("ResourceLimitExceeded", False)]
        cloud.deliver(launch, again=True)

    just_before(cloud.jobs, "create", refused)
    cloud.deliver(launch)
    assert_given_up(cloud)


def test_the_job_of_a_launch_that_came_twice_and_was_accepted_while_the_refusal_is_written_is_stopped_and_paid():
    cloud = stage()
    launch = message(cloud, "launches")
    cloud.jobs.refusals = [("ResourceLimitExceeded", False)]
    accepted = partial(cloud.deliver, launch, again=True)
    just_before(cloud.runs, "put", lambda: just_before(cloud.runs, "put", accepted))  # asked for; then refused
    cloud.deliver(launch)
    assert_given_up(cloud)


def assert_given_up(cloud: SmallCloud) -> None:
    first = the_run(cloud).attempts[0]
    assert (first.outcome, cloud.jobs.made[first.job_name].status) == ("failed", "Stopping")
    cloud.jobs.end(first.job_name, "completed")
    cloud.tick()
    assert the_run(cloud).cost_usd == cloud.jobs.bill_usd(the_run(cloud).run_id) > 0
    assert the_run(cloud).attempts[0].billed_s == cloud.jobs.made[first.job_name].billed_s > 0


def test_a_bill_that_comes_after_the_end_reaches_the_attempt_and_the_ledger_with_the_tick():
    cloud = trained()
    name = job_of(cloud, 1)
    cloud.jobs.late_bills.add(name)
    cloud.now += timedelta(minutes=2)
    cloud.jobs.end(name, "completed")
    cloud.deliver_all(rounds=4)
    run = the_run(cloud)
    assert (run.status, run.attempts[0].billed_s, run.attempts[0].paid_s) == (RunStatus.COMPLETED, None, 120)
    assert (run.attempts[0].cost_state, cloud.runs.open) == ("estimate", {run.run_id})
    cloud.jobs.send_bill(name)
    cloud.tick()
    run = the_run(cloud)
    assert (run.attempts[0].billed_s, run.attempts[0].cost_state, cloud.runs.open) == (120, "final", set())
    entries = cloud.ledger.entries(run.tenant, run.run_id)
    assert total(each for each in entries if each.line == "compute") == cloud.jobs.bill_usd(run.run_id) > 0


def test_the_last_sign_of_a_lost_machine_is_heard_with_its_end_where_no_message_told_it():
    cloud = trained()
    first = the_run(cloud).attempts[0]
    restart = {"cause": "killed by signal 9", "at": cloud.now.isoformat(), "detect_ms": 1, "first_step_ms": 900}
    said = {
        "run_id": the_run(cloud).run_id, "attempt": 1, "lineage": 1, "step": 6, "total_steps": 20,
        "at": cloud.now.isoformat(), "restarts": [restart], "starts": [{"at": cloud.now.isoformat(), "restore_ms": 3}],
    }  # fmt: skip
    cloud.objects.bodies[progress_key(the_run(cloud).run_id, 1)] = json.dumps(said).encode()
    cloud.jobs.end(first.job_name, "lost")
    cloud.deliver_all()
    first = the_run(cloud).attempts[0]
    assert first.is_settled and [each.first_step_ms for each in first.recoveries] == [900]
    assert [each.restore_ms for each in first.starts] == [3]
    assert [each.cause for _, each in cloud.services.recoveries] == ["killed by signal 9"]  # a metric, once


def test_a_run_that_completed_names_its_last_checkpoint_before_the_message_of_it_has_come():
    cloud = trained()
    cloud.jobs.save(job_of(cloud, 1), 8)
    late = message(cloud, "checkpoints")
    cloud.messages.remove(late)
    cloud.jobs.end(job_of(cloud, 1), "completed")
    cloud.deliver_all(rounds=4)
    run = the_run(cloud)
    assert run.status == RunStatus.COMPLETED
    last = max(each.step for each in cloud.runs.checkpoints(run.run_id))
    assert run.last_checkpoint and run.last_checkpoint.step == last >= 8
    cloud.messages.append(late)
    cloud.deliver(late)
    assert the_run(cloud).last_checkpoint == run.last_checkpoint


def test_a_refusal_of_one_of_two_deliveries_is_no_news_of_a_job_that_is_there():
    cloud = stage()
    launch = message(cloud, "launches")
    cloud.jobs.refusals = [("ResourceLimitExceeded", True)]
    cloud.deliver(launch)
    assert (the_run(cloud).status, the_run(cloud).current.is_settled) == (RunStatus.TRAINING, False)


def test_a_refusal_that_comes_late_is_not_one_of_the_next_attempt():
    cloud = stage()

    def goes_on() -> None:
        cloud.jobs.refusals = [("InternalServerError", False)]
        cloud.deliver(launch, again=True)
        cloud.deliver(message(cloud, "invoke"))
        cloud.deliver(message(cloud, "launches"))
        cloud.jobs.refusals = [("ResourceLimitExceeded", False)]

    launch = message(cloud, "launches")
    just_before(cloud.jobs, "create", goes_on)
    cloud.deliver(launch)
    run = the_run(cloud)
    assert [each.outcome for each in run.attempts] == ["failed", None]


def test_a_launch_that_died_while_asking_is_not_asked_for_again_by_a_run_that_is_cancelled():
    cloud = stage()
    launch = message(cloud, "launches")
    cloud.jobs.refusals = [("ThrottlingException", False)]
    cloud.deliver(launch)
    says(cloud, "cancel")
    cloud.deliver(launch)
    run = the_run(cloud)
    assert (run.verdict, run.current.outcome, run.current.billed_s, cloud.jobs.made) == ("stopped", "stopped", 0, {})


# -- the end


def closed_while_it_trains() -> SmallCloud:
    """The state Train failed for a reason of its own; its job is stopping."""
    cloud = trained()
    run = the_run(cloud)
    cloud.executions.fail(cloud.executions.by_name[run.execution].token or "", "States.Timeout", "30 days")
    cloud.deliver(message(cloud, "invoke"))
    assert (the_run(cloud).status, cloud.jobs.made[job_of(cloud, 1)].status) == (RunStatus.FAILED, "Stopping")
    return cloud


def test_a_run_that_is_over_notes_how_its_last_job_ended_and_what_it_cost():
    cloud = closed_while_it_trains()
    cloud.jobs.end(job_of(cloud, 1), "stopped")
    cloud.deliver_all()
    run = the_run(cloud)
    assert (run.status, run.current.outcome) == (RunStatus.FAILED, "stopped")
    assert run.current.billed_s == cloud.jobs.made[job_of(cloud, 1)].billed_s > 0


def test_a_run_that_is_over_is_taken_up_when_its_last_job_has_ended_and_not_beside_it():
    cloud = closed_while_it_trains()
    says(cloud, "rollback")
    cloud.deliver_all(rounds=3)
    assert (the_run(cloud).status, len(cloud.jobs.made)) == (RunStatus.FAILED, 1)
    cloud.jobs.end(job_of(cloud, 1), "stopped")
    cloud.deliver_all(rounds=4)
    assert (the_run(cloud).status, len(cloud.jobs.made)) == (RunStatus.TRAINING, 2)


def completed() -> SmallCloud:
    cloud = trained()
    cloud.jobs.end(job_of(cloud, 1), "completed")
    cloud.deliver_all(rounds=4)
    assert (the_run(cloud).status, cloud.runs.open) == (RunStatus.COMPLETED, set())
    return cloud


def test_a_wish_to_go_back_of_a_run_that_is_over_and_paid_is_seen_by_the_next_tick():
    cloud = completed()
    cloud.command(the_run(cloud).run_id, 1, verb="rollback")
    just_before(cloud.runs, "mirror", dies)
    cloud.deliver(message(cloud, "commands"))
    assert the_run(cloud).rollback_to is not None
    cloud.messages.clear()
    cloud.tick()
    assert the_run(cloud).reopenings == 1


def test_old_news_of_an_end_does_not_answer_the_state_of_the_run_taken_up_again():
    cloud = completed()
    old = cloud.executions.by_name[the_run(cloud).execution]
    cloud.send("execution-events", execution=old.name)
    news = message(cloud, "execution-events")

    def goes_back() -> None:
        says(cloud, "rollback")
        cloud.deliver_all(rounds=3)

    just_before(cloud.runs, "tokens", goes_back)
    cloud.deliver(news)
    run = the_run(cloud)
    assert (run.status, cloud.executions.by_name[run.execution].state) == (RunStatus.TRAINING, "Train")


def test_a_run_taken_up_while_it_is_closed_keeps_its_slot():
    cloud = trained()
    cloud.jobs.end(job_of(cloud, 1), "completed")
    cloud.deliver_all(rounds=2)
    assert cloud.executions.by_name[the_run(cloud).execution].state == "Close run"

    closing = message(cloud, "invoke")

    def goes_back() -> None:
        says(cloud, "rollback")
        for _ in range(2):
            for each in [each for each in cloud.messages if each is not closing]:
                cloud.deliver(each)

    just_before(cloud.admissions, "forget", goes_back)
    cloud.deliver(closing)
    cloud.deliver_all(rounds=2)
    run = the_run(cloud)
    assert (run.reopenings, run.run_id in cloud.admissions.held) == (1, True)


def test_a_late_closing_does_not_end_the_run_that_was_taken_up_meanwhile():
    cloud = trained()
    cloud.jobs.end(job_of(cloud, 1), "completed")
    cloud.deliver_all(rounds=2)
    cloud.executions.die(the_run(cloud).execution, "ABORTED")
    died = message(cloud, "execution-events")

    def closed_and_taken_up() -> None:
        cloud.tick()
        says(cloud, "rollback")
        cloud.deliver_all(rounds=3)

    just_before(cloud.executions, "status", closed_and_taken_up)
    cloud.deliver(died)
    assert (the_run(cloud).status, the_run(cloud).reopenings) == (RunStatus.TRAINING, 1)


def test_the_second_of_two_closings_leaves_the_slot_of_the_run_taken_up_between_them():
    cloud = trained()
    cloud.jobs.end(job_of(cloud, 1), "completed")
    cloud.deliver_all(rounds=2)
    closing = message(cloud, "invoke")

    def closed_and_taken_up() -> None:
        cloud.deliver(closing, again=True)
        says(cloud, "rollback")
        for _ in range(2):
            for each in [each for each in cloud.messages if each is not closing]:
                cloud.deliver(each)

    just_before(cloud.admissions, "forget", closed_and_taken_up)
    cloud.deliver(closing)
    run = the_run(cloud)
    assert (run.reopenings, run.status, run.run_id in cloud.admissions.held) == (1, RunStatus.TRAINING, True)


@pytest.mark.parametrize("port", ["forget", "grant"])
def test_a_closing_that_is_killed_while_it_frees_the_slot_is_finished_by_the_tick(port):
    cloud = SmallCloud(run_count=2, quota=1)
    cloud.deliver_all(rounds=3)
    first, second = cloud.runs.records
    cloud.jobs.get_a_machine(cloud.runs.records[first].attempts[0].job_name)
    waits = cloud.executions.by_name[cloud.runs.records[first].execution]
    cloud.executions.fail(waits.token or "", "States.Timeout", "30 days")  # no rule of ours gave a verdict
    just_before(cloud.admissions, port, dies)
    cloud.deliver(message(cloud, "invoke"))
    cloud.lose_hints()
    for _ in range(2):
        cloud.tick()
        cloud.deliver_all()
    ended = cloud.runs.records[first]
    assert (ended.status, ended.reason, ended.executions) == (RunStatus.FAILED, "30 days", 1)
    assert cloud.jobs.made[ended.attempts[0].job_name].status == "Stopping"
    assert (cloud.runs.records[second].status, set(cloud.admissions.held)) == (RunStatus.TRAINING, {second})
