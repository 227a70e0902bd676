"""The one way in: upload, put the spec as a user's own upload would, and read the receipt.

tenants/<t>/specs/sort-digits-1f0c….yaml   ->   tenants/<t>/receipts/sort-digits-1f0c….yaml.json
    {"etag": …, "run_id": …}  or  {"etag": …, "errors": [{"field": …, "line": …, "message": …}]}
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import ClientError

from microtuning_core.domain.errors import Problem, StageUnreachable, SubmitRefused
from microtuning_core.domain.layout import receipt_key, spec_key
from microtuning_core.domain.names import slug
from microtuning_sdk._uploads import put_missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from microtuning_sdk._connection import Stage
    from microtuning_sdk._draft import Draft

RECEIPT_TIMEOUT_S = 180.0
AFTER_INTERRUPT_S = 20.0
_POLLS_S = (0.05, 0.1, 0.2, 0.4, 0.8)


class Submitted(NamedTuple):
    """`interrupted`: Ctrl-C came after the spec was put; the run goes on, and its user wants the prompt back."""

    run_id: str
    interrupted: bool


def submit(stage: Stage, draft: Draft, say: Callable[[str], None]) -> Submitted:
    """Starts the run.

    Raises:
        SubmitRefused: the stage found errors; nothing was started.
        StageUnreachable: no such bucket, no right to write to it, or no receipt in time.
        KeyboardInterrupt: before the spec was put; nothing was started and nothing that was uploaded counts.
    """
    tenant = draft.spec.tenant
    try:
        put_missing(stage, draft.parcels, say)
        file = f"{slug(draft.spec.name)}-{uuid.uuid4().hex[:12]}.yaml"
        etag = _put_spec(stage, spec_key(tenant, file), draft.text.encode())
    except (ClientError, S3UploadFailedError) as error:
        raise _cannot_upload(stage, error) from error
    except KeyboardInterrupt:
        say("interrupted before the spec was put: nothing was started")
        raise
    return _submitted(stage, tenant, file, etag, say)


def _put_spec(stage: Stage, key: str, body: bytes) -> str:
    """Once this call has begun, only the bucket knows whether a run will start; so after Ctrl-C it is asked."""
    try:
        return stage.objects.put(key, body, content_type="application/yaml")
    except KeyboardInterrupt:
        if stage.objects.bytes_of(key) is None:
            raise
        return stage.s3.head_object(Bucket=stage.bucket, Key=key)["ETag"].strip('"')


def _submitted(stage: Stage, tenant: str, file: str, etag: str, say: Callable[[str], None]) -> Submitted:
    try:
        return Submitted(await_receipt(stage, tenant, file, etag, RECEIPT_TIMEOUT_S), interrupted=False)
    except KeyboardInterrupt:
        say("the spec is already uploaded; a moment more for the id of its run")
        return Submitted(await_receipt(stage, tenant, file, etag, AFTER_INTERRUPT_S), interrupted=True)


def await_receipt(stage: Stage, tenant: str, file: str, etag: str, timeout_s: float) -> str:
    """The run_id in the receipt of this very upload."""
    key = receipt_key(tenant, file)
    deadline, tries = time.monotonic() + timeout_s, 0
    while time.monotonic() < deadline:
        if run_id := run_id_in(stage.objects.read_json(key), etag):
            return run_id
        time.sleep(_POLLS_S[min(tries, len(_POLLS_S) - 1)])
        tries += 1
    raise StageUnreachable(
        stage.names.stage,
        f"gave no receipt in {timeout_s:.0f} s",
        next_step=f"The spec is uploaded and may still start a run: look for s3://{stage.bucket}/{key}, then at "
        f"`microtuning doctor`.",
    )


def run_id_in(receipt: Any, etag: str) -> str | None:
    """The run that a receipt names; None while there is none for this upload (one of an earlier upload has its etag).

    Raises:
        SubmitRefused: it holds errors.
    """
    if not isinstance(receipt, dict) or str(receipt.get("etag", "")).strip('"') != etag.strip('"'):
        return None
    if errors := receipt.get("errors"):
        raise SubmitRefused([Problem(each["field"], each["message"], each.get("line")) for each in errors])
    return str(receipt["run_id"])


def _cannot_upload(stage: Stage, error: Exception) -> StageUnreachable:
    if "NoSuchBucket" in str(error):
        local = (
            "Run `microtuning local up`." if stage.is_local else f"Deploy it: cdk deploy -c stage={stage.names.stage}."
        )
        return StageUnreachable(stage.names.stage, f"has no bucket {stage.bucket}", next_step=local)
    return StageUnreachable(stage.names.stage, f"did not take the upload: {error}")
