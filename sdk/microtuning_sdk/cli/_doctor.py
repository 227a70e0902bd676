"""`microtuning doctor`: what this machine and the stage need, each with its next step where something is missing."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from microtuning_core.domain.errors import MicrotuningError
from microtuning_core.usecases.rebuilding import rebuild
from microtuning_core.usecases.services import Services, StageSettings
from microtuning_sdk._connection import LOCAL, Stage, connect
from microtuning_sdk.cli._account import examine_account
from microtuning_sdk.cli._common import add_json, add_stage, add_verb, print_json
from microtuning_sdk.cli._findings import Finding

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

_ALWAYS = ("boto3", "cloudpickle", "pydantic", "PyYAML", "rich")
_LOCAL = ("ministack", "torch", "transformers", "aws-lambda-powertools")
_PINNED = {"ministack": "1.5.33"}
_FREE_GB = 2


def add_parsers(verbs: Any) -> None:
    parser = add_verb(
        verbs, "doctor", doctor, "Check this machine and the stage, and say what to do about each problem."
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="read the stage's tables back from its bucket, where they lack something"
    )
    add_json(parser)
    add_stage(parser)


def doctor(arguments: argparse.Namespace) -> int:
    if arguments.rebuild:
        return rebuild_tables(arguments)
    findings = []
    for finding in examine(arguments.stage):
        findings.append(finding)
        if not arguments.json:
            print(f"{'ok ' if finding.is_well else 'NO '} {finding.what}: {finding.found}", flush=True)
            if finding.next_step:
                print(f"    -> {finding.next_step}")
    if arguments.json:
        print_json({"findings": [vars(finding) for finding in findings]})
    return 0 if all(finding.is_well for finding in findings) else 1


def rebuild_tables(arguments: argparse.Namespace) -> int:
    stage = connect(arguments.stage)
    restored = rebuild(Services(stage.session, StageSettings(stage.names, "", 1)))
    if arguments.json:
        print_json({"restored": restored})
    else:
        print("\n".join(restored) or "nothing was missing: every run in the bucket is in the tables")
    return 0


def examine(stage_name: str | None) -> Iterator[Finding]:
    """This machine first; then the stage, as far as it can be reached."""
    yield _python()
    yield from (_package(name) for name in _ALWAYS)
    if stage_name in (None, LOCAL):
        yield from (_package(name, extra="local,train") for name in _LOCAL)
        yield _disk()
        yield _local_cloud()
    try:
        stage = connect(stage_name)
    except MicrotuningError as error:
        yield Finding("stage", error.message, error.next_step or "Try again.")
        return
    yield Finding("stage", repr(stage))
    for what, look in (("stack", _stack), ("bucket", _bucket), ("tables", _tables), ("functions", _functions)):
        yield _asked(stage, what, look)
    if not stage.is_local:
        yield from _account(stage)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", version, "" if sys.version_info >= (3, 11) else "Use Python 3.11 or newer.")


def _package(name: str, extra: str = "") -> Finding:
    install = f'pip install "microtuning[{extra}]"' if extra else "pip install microtuning"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "not installed", f"Install it: {install}.")
    wanted = _PINNED.get(name, version)
    return Finding(name, version, "" if version == wanted else f"Version {wanted} was tested: {install}.")


def _disk() -> Finding:
    from microtuning_local.home import local_home

    root = local_home().root
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    free_gb = shutil.disk_usage(existing).free / 1e9
    step = "" if free_gb >= _FREE_GB else f"Free some space ({_FREE_GB} GB), or set MICROTUNING_HOME to another disk."
    return Finding("disk", f"{free_gb:.1f} GB free at {existing}", step)


def _local_cloud() -> Finding:
    from microtuning_local import cloud

    found = cloud.status()
    if not found.running:
        return Finding("local cloud", "not running; it is started when it is needed")
    return Finding("local cloud", f"running at {found.endpoint.endpoint_url if found.endpoint else '?'}")


def _asked(stage: Stage, what: str, look: Callable[[Stage], Finding]) -> Finding:
    try:
        return look(stage)
    except (BotoCoreError, ClientError) as error:
        return Finding(what, f"cannot be seen: {error}", f"Check your rights, or {_deploy(stage)}")


def _account(stage: Stage) -> Iterator[Finding]:
    try:
        yield from examine_account(stage)
    except (BotoCoreError, ClientError) as error:
        yield Finding("account", f"cannot be seen: {error}", "Try again; or check region and credentials.")


def _deploy(stage: Stage) -> str:
    return "run `microtuning local up`." if stage.is_local else f"run `cdk deploy -c stage={stage.names.stage}`."


def _stack(stage: Stage) -> Finding:
    answer = stage.session.client("cloudformation").describe_stacks(StackName=stage.names.stack)
    status = answer["Stacks"][0]["StackStatus"]
    return Finding("stack", f"{stage.names.stack} is {status}", "" if status.endswith("_COMPLETE") else _deploy(stage))


def _bucket(stage: Stage) -> Finding:
    stage.s3.head_bucket(Bucket=stage.bucket)
    return Finding("bucket", stage.bucket)


def _tables(stage: Stage) -> Finding:
    names = [stage.names.table(name) for name in ("runs", "ledger", "tenants", "idempotency")]
    status = {name: stage.dynamodb.describe_table(TableName=name)["Table"].get("TableStatus", "?") for name in names}
    idle = [name for name, word in status.items() if word != "ACTIVE"]
    return Finding("tables", ", ".join(status), f"Wait for {', '.join(idle)}." if idle else "")


def _functions(stage: Stage) -> Finding:
    pages = stage.session.client("lambda").get_paginator("list_functions").paginate()
    ours = [f["FunctionName"] for page in pages for f in page["Functions"]]
    count = sum(name.startswith(f"{stage.names.stack}-") for name in ours)
    return Finding("functions", f"{count} deployed", "" if count else _deploy(stage))
