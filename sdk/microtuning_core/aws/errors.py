"""What botocore's errors mean here, asked in one place."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def message_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", ""))


def lost_condition(error: ClientError) -> bool:
    """A conditional write, alone or in a transaction, met another state than it expected."""
    if code_of(error) == "TransactionCanceledException":
        reasons: list[dict[str, Any]] = error.response.get("CancellationReasons", [])  # type: ignore[assignment]
        codes = {reason.get("Code") for reason in reasons} - {"None", None}
        return bool(codes) and codes <= {"ConditionalCheckFailed", "TransactionConflict"}
    return code_of(error) == "ConditionalCheckFailedException"


def is_missing(error: ClientError) -> bool:
    """Whether the service says that what was asked for does not exist (SageMaker says it as a ValidationException)."""
    codes = {"ResourceNotFound", "NoSuchKey", "404", "NotFound", "ExecutionDoesNotExist", "ResourceNotFoundException"}
    return code_of(error) in codes or (
        code_of(error) == "ValidationException" and "not found" in message_of(error).lower()
    )
