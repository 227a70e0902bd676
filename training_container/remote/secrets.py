"""Keys by name: an environment variable, or else a secret of AWS Secrets Manager. Their values are never shown."""

from __future__ import annotations

import os

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from ..failures import UserFailure


def key_named(name: str) -> str:
    """The key that is kept under `name`.

    Raises:
        UserFailure: there is neither a variable nor a secret of that name, or the job may not read it.
    """
    if value := os.environ.get(name):
        return value
    try:
        found = boto3.client("secretsmanager").get_secret_value(SecretId=name)
    except (ClientError, BotoCoreError) as error:
        reason = error.response["Error"]["Code"] if isinstance(error, ClientError) else type(error).__name__
        raise UserFailure(
            f"The key {name!r} is neither an environment variable of the job nor a secret that its role may read "
            f"({reason}). Store it in Secrets Manager under that name and grant secretsmanager:GetSecretValue."
        ) from error
    text: str = found.get("SecretString", "").strip()
    if not text:
        raise UserFailure(f"The secret {name!r} holds no text.")
    return text
