"""Reading logs, on the local cloud: every line once, across pages, streams, readers and processes."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from microtuning_core.domain.names import TRAINING_LOG_GROUP
from microtuning_sdk._logs import LogTail, load_cursor, save_cursor

if TYPE_CHECKING:
    from microtuning_sdk import Stage


def a_stream(stage: Stage, job: str, host: str = "algo-1") -> str:
    groups = stage.cloudwatch_logs.describe_log_groups(logGroupNamePrefix=TRAINING_LOG_GROUP)["logGroups"]
    if not groups:
        stage.cloudwatch_logs.create_log_group(logGroupName=TRAINING_LOG_GROUP)
    stream = f"{job}/{host}"
    stage.cloudwatch_logs.create_log_stream(logGroupName=TRAINING_LOG_GROUP, logStreamName=stream)
    return stream


def write(stage: Stage, stream: str, lines: list[tuple[int, str]]) -> None:
    stage.cloudwatch_logs.put_log_events(
        logGroupName=TRAINING_LOG_GROUP,
        logStreamName=stream,
        logEvents=[{"timestamp": at_ms, "message": text} for at_ms, text in lines],
    )


def test_a_new_reader_goes_on_after_the_last_line_even_within_one_millisecond(stage: Stage) -> None:
    job, now = f"job-{uuid.uuid4().hex}", int(time.time() * 1000)
    stream = a_stream(stage, job)
    write(stage, stream, [(now, "one"), (now, "two")])
    first = LogTail(stage.cloudwatch_logs)
    assert [line.text for line in first.read([job])] == ["one", "two"]
    assert list(first.read([job])) == []
    write(stage, stream, [(now, "three"), (now + 1, "four")])
    second = LogTail(stage.cloudwatch_logs, first.cursor)
    assert [line.text for line in second.read([job])] == ["three", "four"]
    assert [line.text for line in first.read([job])] == ["three", "four"]


def test_a_thousand_lines_of_two_lives_of_a_job_come_in_order(stage: Stage) -> None:
    job, now = f"job-{uuid.uuid4().hex}", int(time.time() * 1000)
    texts = [f"line {number}" for number in range(1000)]
    older = a_stream(stage, job, "algo-1-1")
    write(stage, older, [(now + i, text) for i, text in enumerate(texts[:600])])
    time.sleep(0.01)
    newer = a_stream(stage, job, "algo-1-2")
    write(stage, newer, [(now + 600 + i, text) for i, text in enumerate(texts[600:])])
    assert [line.text for line in LogTail(stage.cloudwatch_logs).read([job])] == texts


def test_another_jobs_lines_are_never_among_them(stage: Stage) -> None:
    job, now = f"job-{uuid.uuid4().hex}", int(time.time() * 1000)
    write(stage, a_stream(stage, f"{job}0"), [(now, "of run 10")])
    assert list(LogTail(stage.cloudwatch_logs).read([job])) == []


def test_how_far_this_user_has_read_is_kept_by_run(stage: Stage) -> None:
    run_id = "default-x-0z3k8q5m1c7t"
    assert load_cursor(stage, run_id) == {}
    save_cursor(stage, run_id, {"stream": [5, 2]})
    assert load_cursor(stage, run_id) == {"stream": [5, 2]}
