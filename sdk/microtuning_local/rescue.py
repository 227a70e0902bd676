"""After a crash: the emulator comes back with its objects and without its tables and stack.

CloudFormation then refuses to create a bucket that is there already. So the objects move aside, the stack is created, and
they move back while its rules are off: an old spec that comes back must not start its run a second time.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from microtuning_local.clients import root_client
from microtuning_local.home import STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from microtuning_local.home import Endpoint


def stage_bucket(endpoint: Endpoint) -> str:
    return f"microtuning-{STAGE}-{endpoint.account}-{endpoint.region}"


@contextmanager
def objects_set_aside(endpoint: Endpoint) -> Iterator[None]:
    """Within it the stage's bucket does not exist; afterwards its objects are in the bucket that was created.

    An interruption in between leaves them in the bucket beside, and the next call begins with those.
    """
    s3 = root_client(endpoint, "s3")
    bucket, beside = stage_bucket(endpoint), f"{stage_bucket(endpoint)}-aside"
    if exists(s3, bucket):
        move(s3, bucket, beside)
    yield
    if exists(s3, beside):
        with rules_off(endpoint):
            move(s3, beside, bucket)


def exists(s3: Any, bucket: str) -> bool:
    try:
        s3.head_bucket(Bucket=bucket)
    except s3.exceptions.ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        return False
    return True


def move(s3: Any, source: str, target: str) -> None:
    """Move every object, newest version only, and delete the source."""
    if not exists(s3, target):
        s3.create_bucket(Bucket=target)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=source):
        for entry in page.get("Contents", []):
            s3.copy({"Bucket": source, "Key": entry["Key"]}, target, entry["Key"])
    empty(s3, source)
    s3.delete_bucket(Bucket=source)


def empty(s3: Any, bucket: str) -> None:
    versions = [
        {"Key": entry["Key"], "VersionId": entry["VersionId"]}
        for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket)
        for kind in ("Versions", "DeleteMarkers")
        for entry in page.get(kind, [])
    ]
    for start in range(0, len(versions), 1000):
        s3.delete_objects(Bucket=bucket, Delete={"Objects": versions[start : start + 1000], "Quiet": True})


@contextmanager
def rules_off(endpoint: Endpoint) -> Iterator[None]:
    """No rule of the stage fires within it. (A rule of another owner, a user's own, say, does.)"""
    events = root_client(endpoint, "events")
    names = [
        rule["Name"]
        for page in events.get_paginator("list_rules").paginate()
        for rule in page["Rules"]
        if rule["Name"].startswith(f"microtuning-{STAGE}") and rule["State"] == "ENABLED"
    ]
    for name in names:
        events.disable_rule(Name=name)
    yield
    for name in names:
        events.enable_rule(Name=name)
