"""Keys of the bucket: every prefix ends in a slash, every parser refuses what it did not build."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain import layout
from microtuning_core.domain.errors import InvalidName

RUN = "acme-sort-0z3k8q5m1c7t"
OTHER = "acme-sort-0z3k8q5m1c7v"
CASES = Path(__file__).parents[1] / "cases"


def test_what_one_run_owns_is_never_under_the_prefix_of_another_whose_name_begins_alike():
    wanted = json.loads((CASES / "c39_keys.json").read_text())["want"]
    prefixes = [
        layout.run_prefix(RUN),
        layout.config_prefix(RUN, 1),
        layout.checkpoints_prefix(RUN, 1),
        layout.step_prefix(RUN, 1, 10),
        layout.output_prefix(RUN),
        layout.tenant_prefix("acme"),
    ]
    assert all(prefix.endswith(wanted["uri_given_to_training_job_ends_with"]) for prefix in prefixes)
    assert not layout.step_prefix(RUN, 1, 10).startswith(layout.step_prefix(RUN, 1, 1))
    assert not layout.checkpoints_prefix(RUN, 10).startswith(layout.checkpoints_prefix(RUN, 1))
    assert not layout.run_prefix(OTHER).startswith(layout.run_prefix(RUN))


@given(st.integers(1, 99), st.integers(0, 10**9))
def test_a_manifest_key_leads_back_to_its_checkpoint(lineage, step):
    key = layout.step_prefix(RUN, lineage, step) + "manifest.json"
    assert layout.parse_checkpoint_key(key) == layout.CheckpointKey("acme", RUN, lineage, step)


def test_a_progress_key_has_no_step():
    assert layout.parse_checkpoint_key(layout.progress_key(RUN, 2)) == layout.CheckpointKey("acme", RUN, 2, None)


@pytest.mark.parametrize(
    "key",
    [
        "tenants/acme/specs/",
        "tenants/acme/specs/.hidden.yaml",
        "tenants/acme/specs/sub/x.yaml",
        "tenants/acme/specs/_SUCCESS",
        "tenants/acme/datasets/specs/x.yaml",
        "tenants/acme/receipts/x.yaml.json",
        "specs/x.yaml",
        "tenants/acme/specs/x.jsonl",
    ],
)
def test_a_marker_a_nested_key_or_our_own_output_is_no_spec(key):
    assert layout.parse_spec_key(key) is None


@pytest.mark.parametrize("file", ["x.yaml", "my run.yml", "a+b.json", "é%20.yaml"])
def test_a_spec_key_is_taken_as_it_is_without_decoding(file):
    assert layout.parse_spec_key(f"tenants/acme/specs/{file}") == layout.SpecKey("acme", file)


def test_a_data_upload_or_a_folder_marker_starts_nothing():
    events = json.loads((CASES / "c09_events.json").read_text())
    keys = [event["key"] for name, event in events.items() if name != "expect_runs_started"]
    assert len(keys) == 4
    assert [layout.parse_spec_key(key) for key in keys] == [None] * 4


def test_nothing_the_stack_writes_matches_a_pattern_that_triggers_it():
    written = [
        layout.receipt_key("acme", "x.yaml"),
        layout.run_record_key(RUN),
        layout.config_prefix(RUN, 1) + "spec.json",
        layout.model_version_key("acme", "sort", 1),
        layout.output_prefix(RUN) + "model.tar.gz",
    ]
    for key in written:
        assert layout.parse_spec_key(key) is None
        assert layout.parse_command_key(key) is None
        assert layout.parse_checkpoint_key(key) is None


def test_a_key_that_names_a_run_of_another_tenant_is_refused():
    with pytest.raises(InvalidName, match="prefix of the tenant"):
        layout.parse_command_key(f"tenants/other/commands/{RUN}/1.json")
    with pytest.raises(InvalidName):
        layout.parse_checkpoint_key(f"tenants/other/runs/{RUN}/checkpoints/l01/progress.json")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/tenants/acme/../other/x",
        "s3://bucket/a//b",
        "s3://bucket/x#y",
        "s3://bucket/x?y",
        "s3://bucket/./x",
        "s3://bucket/",
        "s3://b/x",
        "https://bucket/x",
        "file:///etc/passwd",
        "/proc/self/root",
        "s3://bucket/a\x00b",
        "s3://bucket/..",
    ],
)
def test_an_s3_uri_that_may_name_another_place_than_it_seems_is_refused(uri):
    with pytest.raises(InvalidName):
        layout.parse_s3_uri(uri)


@pytest.mark.parametrize("name", ["", "..", "a/b", "."])
def test_a_file_name_with_a_path_in_it_is_refused(name):
    with pytest.raises(InvalidName):
        layout.spec_key("acme", name)


def test_a_neighbour_whose_name_begins_alike_does_not_belong_to_the_tenant():
    inside = layout.parse_s3_uri("s3://bucket/tenants/acme/datasets/x.jsonl")
    outside = layout.parse_s3_uri("s3://bucket/tenants/acme2/datasets/x.jsonl")
    elsewhere = layout.parse_s3_uri("s3://other-bucket/tenants/acme/datasets/x.jsonl")
    assert layout.belongs_to(inside, "bucket", "acme")
    assert not layout.belongs_to(outside, "bucket", "acme")
    assert not layout.belongs_to(elsewhere, "bucket", "acme")
