"""The local cloud under attack: what is put into the bucket, what knocks at the servers. Nothing runs, leaks or ends."""

from __future__ import annotations

import http.client
import io
import json
import os
import pickle
import uuid
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.layout import answer_key, checkpoints_prefix, code_key, command_key, progress_key

if TYPE_CHECKING:
    from microtuning_local.cloud import LocalCloud

    from .conftest import StageUnderTest

pytestmark = pytest.mark.cloud


class Canary:
    """Loaded by pickle, it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.place),))


def refused(stage: StageUnderTest, body: str, file: str = "") -> dict[str, str]:
    """Field -> message of the receipt that an uploaded spec got."""
    receipt = stage.receipt(*stage.upload(body, file))
    assert "errors" in receipt, receipt
    return {each["field"]: each["message"] for each in receipt["errors"]}


# --- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"data": {"train": "s3://{bucket}/tenants/globex/datasets/x.jsonl"}}, "data.train"),
        ({"data": {"train": "s3://another-bucket/tenants/default/x.jsonl"}}, "data.train"),
        ({"data": {"train": "file:///etc/passwd"}}, "data.train"),
        ({"model": {"base": "s3://{bucket}/tenants/default/../globex/m/"}}, "model.base"),
        ({"tenant": "globex"}, "tenant"),
        ({"tenant": "dеfault"}, "tenant"),
        ({"name": "\x1b[2J"}, "name"),
        ({"seed": 10**4000}, "seed"),
        ({"environment_variables": {"HF_TOKEN": "hunter2hunter2"}}, "environment_variables.HF_TOKEN"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_spec_that_reaches_out_is_answered_by_field(
    change: dict[str, Any], field: str, stage: StageUnderTest
) -> None:
    text = json.dumps(stage.spec() | change).replace("{bucket}", stage.names.bucket)
    found = refused(stage, text)
    assert field in found
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("a: &a [x,x]\nb: [*a,*a,*a]\n", "anchors and aliases"),
        ("[" * 500_000, "nested too deeply"),
        ("a: !!python/object/apply:os.system [id]\n", "tags such as"),
        ("x" * 3_000_000, "at most 1000000"),
        ("\0", "not valid YAML"),
    ],
    ids=["laughs", "brackets", "tag", "long", "nul"],
)
def test_a_file_that_would_hold_up_the_reader_is_answered(body: str, words: str, stage: StageUnderTest) -> None:
    assert words in refused(stage, body)["spec"]


def test_a_pickle_in_code_is_never_loaded_by_the_control_plane(stage: StageUnderTest, tmp_path: Path) -> None:
    """The whole way of a run, whose container here loads nothing: whoever else did would make the folder."""
    canary = Canary(tmp_path / "canary")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("reward.pkl", pickle.dumps(canary))
    key = code_key("default", "c" * 64)
    stage.put(key, packed.getvalue())
    code = {"uri": f"s3://{stage.names.bucket}/{key}", "sha256": "c" * 64}
    run = stage.ended(stage.submit(loss={"entry": "pickle:reward.pkl"}, code=code))
    assert run.status == "completed", stage.story(run.run_id)
    assert not canary.place.exists()


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_run_id(stage: StageUnderTest) -> str:
    run_id = stage.submit()
    stage.ended_and_paid(run_id)
    return run_id


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "command"),
        (b"\xff\xfe", "command"),
        (b"[" * 100_000, "command"),
        (b'{"verb": "delete", "issued_at": "2026-01-02T03:04:05Z"}', "verb"),
        (b'{"verb": "cancel"}', "issued_at"),
        (b'{"verb": "cancel", "issued_at": "2026-01-02T03:04:05Z", "root": true}', "root"),
        (b'{"verb": "rollback", "issued_at": "2026-01-02T03:04:05Z", "step": 1e400}', "step"),
        (b"x" * 2_000_000, "command"),
    ],
    ids=["empty", "no text", "deep", "verb", "time", "more", "huge", "long"],
)
def test_a_broken_command_is_answered_by_field_and_comes_to_no_dead_letter(
    body: bytes, field: str, stage: StageUnderTest, a_run_id: str
) -> None:
    command_id = uuid.uuid4().hex
    stage.put(command_key(a_run_id, command_id), body)
    answer = stage.until(lambda: stage.services.objects.read_json(answer_key(a_run_id, command_id)), "no answer")
    assert [each["field"] for each in answer["errors"]] == [field]


def test_a_command_for_a_run_that_never_was_is_answered(stage: StageUnderTest) -> None:
    nobody, command_id = "default-nobody-0a1b2c3d4e5f", uuid.uuid4().hex
    stage.put(command_key(nobody, command_id), b'{"verb": "cancel", "issued_at": "2026-01-02T03:04:05Z"}')
    answer = stage.until(lambda: stage.services.objects.read_json(answer_key(nobody, command_id)), "no answer")
    assert [each["field"] for each in answer["errors"]] == ["run_id"]


# --- what a job leaves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[" * 50_000, b"\x80\x04}.", b'{"step": 1e999}', b"x" * 9_000_000],
    ids=["empty", "bare", "deep", "pickle", "inf", "long"],
)
def test_a_manifest_or_progress_that_is_none_is_written_down_and_nothing_more(
    body: bytes, stage: StageUnderTest, a_run_id: str
) -> None:
    told = len(stage.events(a_run_id, "checkpoint_refused"))
    before = stage.run(a_run_id)
    manifest = f"{checkpoints_prefix(a_run_id, 1)}step-77/manifest.json"
    for key in (manifest, progress_key(a_run_id, 1)):
        assert stage.deliver("on_checkpoint", stage.object_event(key, stage.put(key, body))) == []
    assert len(stage.events(a_run_id, "checkpoint_refused")) >= told + 2
    assert stage.run(a_run_id).model_dump(exclude={"revision"}) == before.model_dump(exclude={"revision"})


# --- the servers -----------------------------------------------------------------------------------------------------


def asked(
    port: int, method: str = "POST", path: str = "/", headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, str, dict[str, str]]:
    """Raw: nothing is added but what HTTP itself needs."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        given = {"Host": f"127.0.0.1:{port}", "Content-Length": str(len(body))} | (headers or {})
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace"), {k.lower(): v for k, v in answer.getheaders()}
    finally:
        connection.close()


TRICKS = {
    "another name": {"Host": "evil.example"},
    "another name with our port": {"Host": "evil.example:80"},
    "our name before another": {"Host": "127.0.0.1.evil.example"},
    "our name as user": {"Host": "127.0.0.1@evil.example"},
    "localhost before another": {"Host": "localhost.evil.example"},
    "no name": {"Host": ""},
    "a page": {"Origin": "http://evil.example"},
    "a page of ours, it says": {"Origin": "http://127.0.0.1"},
    "a sandboxed page": {"Origin": "null"},
}


@pytest.fixture
def ports(cloud: LocalCloud) -> dict[str, int]:
    return {"emulator": cloud.endpoint.port, "sagemaker": cloud.endpoint.sagemaker_port}


@pytest.mark.parametrize("server", ["emulator", "sagemaker"])
@pytest.mark.parametrize("trick", TRICKS)
def test_only_programs_on_this_machine_are_answered(trick: str, server: str, ports: dict[str, int]) -> None:
    for method, path in (("GET", "/_ministack/health"), ("POST", "/_ministack/reset"), ("POST", "/")):
        status, text, headers = asked(ports[server], method, path, TRICKS[trick])
        assert status == 403, text
        assert "Only programs on this machine" in text
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("path", ["reset", "config", "sqs/messages", "sns/sms-messages", "lambda-code/x", "RESET"])
def test_the_emulators_own_administration_is_closed_to_everybody(path: str, ports: dict[str, int]) -> None:
    for method in ("GET", "POST", "PUT"):
        status, text, _ = asked(ports["emulator"], method, f"/_ministack/{path}", body=b"{}")
        assert status == 403, text


def test_a_page_cannot_even_ask_whether_it_may(ports: dict[str, int]) -> None:
    asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "PUT"}
    for port in ports.values():
        status, _, headers = asked(port, "OPTIONS", "/", asks)
        assert status in (403, 501)
        assert "access-control-allow-origin" not in headers
    status, _, _ = asked(ports["emulator"], "GET", "/_ministack/health", {"Sec-Fetch-Site": "cross-site"})
    assert status == 403


def test_two_host_names_are_none(ports: dict[str, int]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", ports["emulator"], timeout=10)
    connection.putrequest("POST", "/_ministack/reset", skip_host=True)
    for host in (f"127.0.0.1:{ports['emulator']}", "evil.example"):
        connection.putheader("Host", host)
    connection.putheader("Content-Length", "0")
    connection.endheaders()
    assert connection.getresponse().status in (400, 403)
    connection.close()


@pytest.mark.parametrize(
    "token", [None, "", "Bearer ", "Bearer x", "Bearer \u00e9", "Basic Og==", "AWS4-HMAC-SHA256 x"]
)
def test_the_admin_paths_ask_for_the_token(token: str | None, ports: dict[str, int]) -> None:
    headers = {} if token is None else {"Authorization": token}
    for method, path in (("GET", "/_local/health"), ("POST", "/_local/faults"), ("POST", "/_local/reclaim"),
                         ("GET", "/_local/credentials")):  # fmt: skip
        status, text, _ = asked(ports["sagemaker"], method, path, headers, b"{}")
        assert status == 403, (path, text)
        assert "AccessKeyId" not in text


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Length": "-1"}, b"", 411),
        ({"Content-Length": "abc"}, b"", 411),
        ({"Content-Length": "٣"}, b"", 411),
        ({"Content-Length": "9" * 30}, b"", 411),
        ({"Content-Length": "99999999999"}, b"", 413),
        ({"Transfer-Encoding": "chunked"}, b"", 411),
        ({}, b"[" * 200_000, 400),
        ({}, b"[]", 400),
        ({}, b"\xff", 400),
        ({}, b'{"TrainingJobName": 5, "ResourceConfig": [], "HyperParameters": "x"}', 400),
        ({}, b'{"TrainingJobName": "../../etc", "RoleArn": "x"}', 400),
        ({"X-Amz-Target": "SageMaker.__class__"}, b"{}", 400),
        ({"X-Amz-Target": "SageMaker.DeleteEverything"}, b"{}", 400),
        ({"Authorization": ""}, b"{}", 403),
        ({"X-Long": "x" * 70_000}, b"{}", 431),
    ],
)
def test_a_malformed_request_is_refused_and_the_server_lives(
    headers: dict[str, str], body: bytes, status: int, ports: dict[str, int], cloud: LocalCloud
) -> None:
    usual = {"Authorization": "AWS4-HMAC-SHA256 x", "X-Amz-Target": "SageMaker.CreateTrainingJob"}
    coded = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    found, text, _ = asked(ports["sagemaker"], headers=usual | coded, body=body)
    assert found == status, text
    assert "Traceback" not in text
    assert cloud.client("sagemaker").list_training_jobs(MaxResults=1)["ResponseMetadata"]["HTTPStatusCode"] == 200


def test_the_servers_listen_on_this_machine_only(ports: dict[str, int]) -> None:
    listening = Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]
    local = {line.split()[1] for line in listening if line.split()[3] == "0A"}
    for port in ports.values():
        assert {each for each in local if each.endswith(f":{port:04X}")} == {f"0100007F:{port:04X}"}
