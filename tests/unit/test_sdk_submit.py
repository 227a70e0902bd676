"""Submitting, against a bucket in memory: what is put in which order, and what Ctrl-C leaves behind."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.errors import StageUnreachable, SubmitRefused
from microtuning_sdk import _submit
from microtuning_sdk._submit import Submitted, await_receipt, submit
from microtuning_sdk._uploads import parcel, put_missing, sha256_of_tree

if TYPE_CHECKING:
    from collections.abc import Callable

RUN_ID = "default-sort-digits-0z3k8q5m1c7t"


@dataclass
class Bucket:
    """Objects by key. `answer` plays the stage: it is called when somebody looks for a receipt."""

    answer: Callable[[Bucket], dict[str, Any] | None]
    objects: dict[str, bytes] = field(default_factory=dict)
    interrupt_while_putting: bool = False

    def put_object(self, *, Bucket: str, Key: str, Body: bytes) -> None:  # noqa: N803 (boto3's own names)
        self.objects[Key] = Body

    def head_object(self, *, Bucket: str, Key: str) -> dict[str, str]:  # noqa: N803
        return {"ETag": f'"{self.etag(Key)}"'}

    def put(self, key: str, body: bytes, *, content_type: str) -> str:
        self.objects[key] = body
        if self.interrupt_while_putting:
            raise KeyboardInterrupt
        return self.etag(key)

    def etag(self, key: str) -> str:
        return hashlib.md5(self.objects[key]).hexdigest()

    def bytes_of(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def read_json(self, key: str) -> dict[str, Any] | None:
        return self.answer(self)

    @property
    def spec_keys(self) -> list[str]:
        return [key for key in self.objects if "/specs/" in key]


def a_stage(bucket: Bucket) -> Any:
    names = SimpleNamespace(stage="local")
    return SimpleNamespace(bucket="bucket", s3=bucket, objects=bucket, names=names, is_local=True)


def a_draft() -> Any:
    spec = SimpleNamespace(tenant="default", name="sort digits")
    return SimpleNamespace(spec=spec, text="name: sort digits\n", parcels=(parcel("tenants/default/x", b"data"),))


def answers(bucket: Bucket) -> dict[str, Any]:
    return {"etag": bucket.etag(bucket.spec_keys[0]), "run_id": RUN_ID}


def test_data_and_code_are_put_before_the_spec_and_the_receipt_names_the_run() -> None:
    bucket = Bucket(answers)
    assert submit(a_stage(bucket), a_draft(), print) == Submitted(RUN_ID, interrupted=False)
    first, second = bucket.objects
    assert first == "tenants/default/x"
    assert second.startswith("tenants/default/specs/sort-digits-")
    assert second.endswith(".yaml")


def test_two_submits_of_the_same_spec_are_two_uploads() -> None:
    bucket = Bucket(answers)
    submit(a_stage(bucket), a_draft(), print)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_submit, "RECEIPT_TIMEOUT_S", 0.2)
        submit(a_stage(bucket), a_draft(), print)
    assert len(bucket.spec_keys) == 2


def test_ctrl_c_while_data_are_uploaded_puts_no_spec() -> None:
    bucket = Bucket(answers)
    said: list[str] = []

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    bucket.put_object = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        submit(a_stage(bucket), a_draft(), said.append)
    assert bucket.spec_keys == []
    assert said[-1] == "interrupted before the spec was put: nothing was started"


def test_ctrl_c_while_the_spec_is_put_asks_the_bucket_whether_it_arrived() -> None:
    arrived = Bucket(answers, interrupt_while_putting=True)
    assert submit(a_stage(arrived), a_draft(), print).run_id == RUN_ID


def test_ctrl_c_while_the_receipt_is_awaited_still_gives_the_runs_id_and_says_so() -> None:
    looks: list[int] = []

    def at_the_second_look(bucket: Bucket) -> dict[str, Any]:
        looks.append(1)
        if len(looks) == 1:
            raise KeyboardInterrupt
        return answers(bucket)

    assert submit(a_stage(Bucket(at_the_second_look)), a_draft(), print) == Submitted(RUN_ID, interrupted=True)


def test_errors_in_the_receipt_are_raised() -> None:
    def refuses(bucket: Bucket) -> dict[str, Any]:
        return {"etag": bucket.etag(bucket.spec_keys[0]), "errors": [{"field": "name", "message": "is taken"}]}

    with pytest.raises(SubmitRefused, match="name: is taken"):
        submit(a_stage(Bucket(refuses)), a_draft(), print)


def test_no_receipt_in_time_says_where_to_look() -> None:
    stage = a_stage(Bucket(lambda _: None))
    with pytest.raises(StageUnreachable, match=r"gave no receipt in 0 s.*receipts/file\.yaml\.json"):
        await_receipt(stage, "default", "file.yaml", "abc", 0.01)


def test_what_is_there_with_its_size_is_not_put_again_and_half_an_object_is() -> None:
    bucket = Bucket(answers, {"whole": b"1234", "half": b"12"})
    said: list[str] = []
    put_missing(a_stage(bucket), [parcel("whole", b"1234"), parcel("half", b"1234")], said.append)
    assert said == ["uploading half (4 bytes)"]
    assert bucket.objects["half"] == b"1234"


def test_the_hash_of_a_folder_depends_on_names_and_contents_and_not_on_their_order() -> None:
    files = [("a", "1"), ("b", "2")]
    assert sha256_of_tree(files) == sha256_of_tree(files[::-1])
    assert len({sha256_of_tree(each) for each in (files, [("a", "2"), ("b", "1")], [("a1", ""), ("b", "2")])}) == 3
