"""Objects of the stage's bucket."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import is_missing

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Stored:
    """One object as a listing shows it."""

    key: str
    bytes: int


class ObjectStore:
    def __init__(self, s3: S3Client, bucket: str) -> None:
        self._s3 = s3
        self.bucket = bucket

    def read(self, key: str, *, at_most: int | None = None) -> bytes | None:
        """The object's bytes, or None when there is none. `at_most`: as of read_with_etag."""
        found = self.read_with_etag(key, at_most=at_most)
        return None if found is None else found[0]

    def read_with_etag(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str] | None:
        """The object's bytes and its etag, without quotes.

        at_most: one byte more than that is read of a longer one, and nobody's gigabytes into a function's memory: who
        reads what others wrote gives it, and refuses what has more.
        """
        try:
            answer = self._s3.get_object(Bucket=self.bucket, Key=key)
            body = answer["Body"].read(None if at_most is None else at_most + 1)
            return body, answer["ETag"].strip('"')
        except ClientError as error:
            if is_missing(error):
                return None
            raise

    def read_json(self, key: str) -> Any:
        body = self.read(key)
        return None if body is None else json.loads(body)

    def put(self, key: str, body: bytes, *, content_type: str = "application/json") -> str:
        """Writes the object; its etag, without quotes."""
        answer = self._s3.put_object(Bucket=self.bucket, Key=key, Body=body, ContentType=content_type)
        return answer["ETag"].strip('"')

    def put_json(self, key: str, document: Any) -> str:
        return self.put(key, json.dumps(document, ensure_ascii=False, indent=1).encode())

    def copy(self, source_key: str, key: str) -> None:
        """A copy inside the bucket, of up to 5 GB in one call, larger ones in parts."""
        self._s3.copy({"Bucket": self.bucket, "Key": source_key}, self.bucket, key)

    def bytes_of(self, key: str) -> int | None:
        """The object's size, or None when there is none."""
        try:
            return self._s3.head_object(Bucket=self.bucket, Key=key)["ContentLength"]
        except ClientError as error:
            if is_missing(error):
                return None
            raise

    def sha256_of(self, key: str) -> str | None:
        """The hash of what lies there now, in hexadecimal, read piece by piece; None when there is none."""
        try:
            body = self._s3.get_object(Bucket=self.bucket, Key=key)["Body"]
        except ClientError as error:
            if is_missing(error):
                return None
            raise
        digest = hashlib.sha256()
        for piece in body.iter_chunks(_PIECE_BYTES):
            digest.update(piece)
        return digest.hexdigest()

    def stored_sha256_of(self, key: str) -> str | None:
        """The hash that S3 keeps with the object; None where it was uploaded without one, or in parts."""
        answer = self._s3.head_object(Bucket=self.bucket, Key=key, ChecksumMode="ENABLED")
        known = answer.get("ChecksumSHA256")
        if known is None or answer.get("ChecksumType") == "COMPOSITE":
            return None
        return base64.b64decode(known).hex()

    def walk(self, prefix: str) -> Iterator[Stored]:
        """Everything under a prefix that ends in "/", so that run-1 is never also run-10."""
        if not prefix.endswith("/"):
            raise ValueError(f"the prefix {prefix!r} must end in '/'")
        for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for each in page.get("Contents", []):
                yield Stored(each["Key"], each["Size"])

    def folders(self, prefix: str) -> Iterator[str]:
        """The prefixes one level below a prefix, each ending in "/"."""
        if not prefix.endswith("/"):
            raise ValueError(f"the prefix {prefix!r} must end in '/'")
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix, Delimiter="/")
        for page in pages:
            for each in page.get("CommonPrefixes", []):
                yield each["Prefix"]

    def delete(self, keys: list[str]) -> None:
        for start in range(0, len(keys), 1000):  # the service's limit for one call
            chunk = keys[start : start + 1000]
            answer = self._s3.delete_objects(
                Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in chunk], "Quiet": True}
            )
            # The call itself succeeds even where every single deletion was refused.
            for refused in answer.get("Errors", [])[:1]:
                code, message = refused.get("Code", ""), refused.get("Message", "")
                raise ClientError({"Error": {"Code": code, "Message": message}}, "DeleteObjects")
