"""S3 addresses, and where an object lands in a folder. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple


class Location(NamedTuple):
    """A bucket and a key, or the start of one."""

    bucket: str
    key: str

    def under(self, *parts: str) -> Location:
        """A key below this one, with exactly one `/` between."""
        return Location(self.bucket, "/".join([self.key.rstrip("/"), *parts]).lstrip("/"))

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def parse_location(uri: str) -> Location:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return Location(bucket, key)


def path_of_key(prefix: str, key: str) -> str | None:
    """Where the object `key` of a channel or checkpoint `prefix` lands, relative to the folder; None for a marker.

    The object itself keeps its name, what lies below a folder keeps its path, and `data/part` also takes
    `data/part-1.jsonl`: S3 prefixes are beginnings of names.

    >>> path_of_key("data/train.jsonl", "data/train.jsonl"), path_of_key("data", "data/a/b.jsonl")
    ('train.jsonl', 'a/b.jsonl')
    """
    if key.endswith("/"):
        return None
    if prefix and not prefix.endswith("/"):
        below = key.removeprefix(prefix)
        prefix = f"{prefix}/" if below.startswith("/") else prefix[: prefix.rfind("/") + 1]
    relative = key.removeprefix(prefix)
    return relative if is_inside(relative) else None


def is_inside(relative: str) -> bool:
    """Whether a path stays in its folder; a key like `../../x` is a legal object name and no legal path."""
    path = PurePosixPath(relative)
    return not path.is_absolute() and ".." not in path.parts and relative != ""
