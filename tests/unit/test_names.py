"""Names: built and parsed by one module, valid for SageMaker, and traceable to their run."""

import json
import re
import string
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain import names
from microtuning_core.domain.errors import InvalidName

CASE = json.loads((Path(__file__).parents[1] / "cases" / "c47_names.json").read_text("utf-8"))
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
SAGEMAKER_NAME = re.compile(CASE["rules"]["regex"])


def a_run_id(name: str = "sort digits", tenant: str = "acme", at: datetime = NOON, *evidence: str) -> str:
    return names.new_run_id(tenant, name, at, *(evidence or ("bucket", "key", "etag", "1")))


def test_every_accepted_run_name_of_the_case_gives_distinct_valid_job_names_that_lead_back():
    accepted = [name for name in CASE["run_names"] if name]
    jobs = {
        names.job_name("local", a_run_id(name, "acme", NOON, name), attempt) for name in accepted for attempt in (1, 2)
    }
    assert len(jobs) == 2 * len(accepted)
    for job in jobs:
        assert SAGEMAKER_NAME.fullmatch(job) and len(job) <= CASE["rules"]["max"]
        assert not job.endswith("-") and "--" not in job
        assert names.parse_job_name(job).tenant == "acme"


@pytest.mark.parametrize("name", ["", "   ", "x" * 201])
def test_an_empty_or_endless_run_name_is_refused(name):
    with pytest.raises(InvalidName, match="run name"):
        a_run_id(name)


@given(
    st.text(min_size=1, max_size=200).filter(str.strip),
    st.from_regex(r"[a-z][a-z0-9]{1,15}", fullmatch=True),
    st.from_regex(r"[a-z][a-z0-9]{1,5}", fullmatch=True),
    st.integers(1, 999),
)
def test_any_name_survives_the_way_to_a_job_and_back(name, tenant, stage, attempt):
    run_id = a_run_id(name, tenant)
    job = names.job_name(stage, run_id, attempt)
    assert names.parse_job_name(job) == names.JobName(stage, run_id, attempt)
    assert names.parse_run_id(run_id).tenant == tenant
    assert len(job) <= 62 and SAGEMAKER_NAME.fullmatch(job)


def test_the_same_event_names_the_same_run_and_a_second_upload_a_new_one():
    first = a_run_id("x", "acme", NOON, "b", "k", "etag", "seq-1")
    assert first == a_run_id("x", "acme", NOON, "b", "k", "etag", "seq-1")
    assert first != a_run_id("x", "acme", NOON, "b", "k", "etag", "seq-2")


@given(st.integers(0, 10**8), st.integers(1, 10**6))
def test_run_ids_of_one_name_sort_by_time(seconds, later):
    then = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    assert a_run_id("x", "acme", then) < a_run_id("x", "acme", then + timedelta(seconds=later))


@pytest.mark.parametrize(
    "job", ["someone-elses-job", "local-acme-sort-a001", "rl-acme-run7-a1", "local--x-a001", "", "a" * 63, "local-x-a1"]
)
def test_a_job_name_that_we_could_not_have_given_is_refused(job):
    with pytest.raises(InvalidName):
        names.parse_job_name(job)


def test_the_second_execution_of_a_run_leads_back_to_it():
    run_id = a_run_id()
    assert names.execution_name(run_id) == run_id
    assert names.parse_execution_name(run_id) == (run_id, 1)
    assert names.parse_execution_name(names.execution_name(run_id, 12)) == (run_id, 12)
    with pytest.raises(InvalidName):
        names.parse_execution_name("my-own-try")


@pytest.mark.parametrize("stage", ["", "x", "Local", "toolong", "a-b", "1ab"])
def test_a_stage_that_breaks_the_length_budget_of_job_names_is_refused(stage):
    with pytest.raises(InvalidName):
        names.check_stage(stage)


def test_the_alphabet_of_run_ids_has_no_letter_that_reads_like_another():
    assert not set("ilou") & set(names._ALPHABET)
    assert set(names._ALPHABET) <= set(string.ascii_lowercase + string.digits)
