"""The gate before the emulator, and what no AST of the control plane may hold."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

from microtuning_local.gate import gated, is_local_program
from microtuning_local.sagemaker.rules import Refusal, check_create

ROOT = Path(__file__).parents[2]
HERE = (b"host", b"127.0.0.1:4566")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost", "LOCALHOST:80", "bucket.localhost:4566"])
def test_a_program_that_calls_this_machine_by_its_name_passes(host: str) -> None:
    assert is_local_program([(b"Host", host.encode()), (b"user-agent", b"Boto3")])


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:4566", "127.0.0.1:4566@evil",
     "evillocalhost", "127.0.0.2", "0.0.0.0", "[::1]:80", "127.0.0.1:80:80", "127.0.0.1:x", "ｌocalhost"],
)  # fmt: skip
def test_every_other_name_is_stopped(host: str) -> None:
    assert not is_local_program([(b"host", host.encode("utf-8"))])


@pytest.mark.parametrize(
    "headers",
    [[], [HERE, HERE], [HERE, (b"Origin", b"null")], [HERE, (b"origin", b"")], [HERE, (b"Sec-Fetch-Site", b"none")]],
)
def test_no_name_two_names_and_browsers_are_stopped(headers: list[tuple[bytes, bytes]]) -> None:
    assert not is_local_program(headers)


@pytest.mark.parametrize(
    ("kind", "sent"), [("http", ["http.response.start", "http.response.body"]), ("websocket", ["websocket.close"])]
)
def test_what_is_stopped_never_reaches_the_emulator(kind: str, sent: list[str]) -> None:
    reached: list[str] = []
    told: list[dict[str, Any]] = []

    async def emulator(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    async def call(scope: dict[str, Any]) -> None:
        scope = {"path": "/"} | scope
        await gated(emulator)(scope, None, send)

    asyncio.run(call({"type": kind, "headers": [HERE, (b"origin", b"http://evil.example")]}))
    assert (reached, [each["type"] for each in told]) == ([], sent)
    asyncio.run(call({"type": kind, "headers": [HERE]}))
    asyncio.run(call({"type": "lifespan"}))
    assert reached == [kind, "lifespan"]


@pytest.mark.parametrize(
    "value", [5, True, None, [], {}, "../../etc", "x" * 100, "аcme"], ids=lambda value: str(value)[:9]
)
def test_the_local_sagemaker_judges_any_json(value: Any) -> None:
    whole = {
        "TrainingJobName": "job", "RoleArn": "arn:aws:iam::000000000000:role/r",
        "AlgorithmSpecification": {"TrainingImage": "i", "TrainingInputMode": "File"},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/x"}, "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
    }  # fmt: skip
    check_create(whole)
    refusals = []
    for name in whole:
        try:
            check_create(whole | {name: value})
        except Refusal as refused:
            refusals.append(refused.status)
    assert refusals.count(400) == len(refusals) >= 5  # an empty StoppingCondition has its defaults


# --- what runs nobody's code ---------------------------------------------------------------------------------------------

# Where a user's own pickle is read back on the user's own machine, to see whether it travels.
_OWN_PICKLES = "sdk/microtuning_sdk/_pickles.py"
_RUN_CODE = {"eval", "exec", "compile", "__import__"}
_UNPICKLE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


@pytest.mark.parametrize(
    "package", ["sdk/microtuning_core", "sdk/microtuning_sdk", "sdk/microtuning_local", "functions"]
)
def test_the_control_plane_and_the_sdk_never_unpickle_nor_evaluate(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in _RUN_CODE, where
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = getattr(node.func.value, "id", "")
                assert not (owner == "yaml" and node.func.attr in ("load", "unsafe_load", "full_load")), where
                assert not (node.func.attr == "run" and any(k.arg == "shell" for k in node.keywords)), where
            if isinstance(node, ast.Import | ast.ImportFrom) and path != ROOT / _OWN_PICKLES:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                assert not _UNPICKLE & {name.partition(".")[0] for name in names}, where
