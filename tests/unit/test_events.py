"""Events: what is read from them, and that each kind of key is decoded once or not at all."""

import json
from pathlib import Path

import pytest

from microtuning_core.domain import events
from microtuning_core.domain.errors import InvalidName

CASES = Path(__file__).parents[1] / "cases"


def test_a_classic_notification_key_is_decoded_once():
    body = json.loads((CASES / "c11_s3_event_encoded.json").read_text())
    (created,) = events.objects_created(body)
    assert created.key == "incoming/acme/my data+v2 café 日本.jsonl"
    assert created.etag == "0123456789abcdef0123456789abcdef"


def test_bytes_that_are_no_text_are_refused_and_so_end_in_the_dead_letter_queue():
    with pytest.raises(InvalidName, match="percent-encoded UTF-8"):
        events.decode_classic_key("incoming/%ff%fe")


def test_an_eventbridge_key_is_not_decoded():
    body = {
        "time": "2026-01-02T03:04:05Z",
        "detail": {"bucket": {"name": "b"}, "object": {"key": "in/pc%20t+x.yaml", "etag": '"e"', "sequencer": "1"}},
    }
    (created,) = events.objects_created(body)
    assert (created.key, created.etag) == ("in/pc%20t+x.yaml", "e")


def test_a_batch_of_the_case_names_each_object():
    records = json.loads((CASES / "c13_sqs_batch.json").read_text())["Records"]
    keys = [created.key for record in records for created in events.objects_created(json.loads(record["body"]))]
    assert keys == ["incoming/acme/ok1.json", "incoming/acme/missing.json", "incoming/acme/ok2.json"]


def test_a_job_event_is_believed_only_for_its_name():
    body = json.loads((CASES / "c53_stopped_maxruntime.json").read_text())
    assert events.job_changed(body).job_name == "rl-acme-run7-a1"
