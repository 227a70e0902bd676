"""Data sets and base models as a user names them, and the S3 addresses that the job will read them from.

    [{"prompt": …}, …]               rows         -> tenants/<t>/datasets/<sha256>/rows.jsonl
    "train.jsonl", "data/"           local        -> tenants/<t>/datasets/<sha256>/…
    "s3://<stage's bucket>/tenants/<t>/…"  own    -> as it is
    "s3://elsewhere/…"               foreign      -> tenants/<t>/datasets/<sha256>/…, copied with the caller's rights

A base model goes the same way, to tenants/<t>/models/base/<sha256>/; the id of a hub stays what it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import code_of
from microtuning_core.aws.objects import ObjectStore
from microtuning_core.domain.datasets import DATA_SUFFIXES, Row, check_rows, is_data_file, read_rows
from microtuning_core.domain.errors import InvalidData, InvalidSpec, Problem, a
from microtuning_core.domain.layout import (
    S3Uri,
    belongs_to,
    dataset_prefix,
    file_key,
    model_prefix,
    parse_s3_uri,
)
from microtuning_core.domain.shapes import shape_from_config, shape_from_name
from microtuning_sdk._uploads import Parcel, local_path, parcel, sha256_of_file, sha256_of_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from microtuning_core.domain.planning import ModelShape
    from microtuning_sdk._connection import Stage

Data = str | Path | Iterable[Mapping[str, Any]]
ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True)
class Dataset:
    """A data set: where the job finds it, its files as (name, bytes) for checking, and what to upload first."""

    name: str
    uri: str
    files: tuple[tuple[str, bytes], ...] = field(repr=False)
    parcels: tuple[Parcel, ...] = ()

    def rows(self) -> list[Row]:
        return [row for name, data in self.files for row in read_rows(name, data)]


@dataclass(frozen=True)
class BaseModel:
    """Where the job finds it, its shape where that can be told, what to upload first, and its folder if it has one here."""

    uri: str
    shape: ModelShape | None
    parcels: tuple[Parcel, ...] = ()
    folder: Path | None = None


def check_dataset(dataset: Dataset, algorithm: str, *, has_chat_template: bool) -> list[Row]:
    """The rows, each by the rules that the container uses; a script knows its own files, they only must not be empty.

    Raises:
        InvalidData: naming file and line.
    """
    if algorithm == "script":
        if not any(data for _, data in dataset.files):
            raise InvalidData(dataset.name, "holds nothing", next_step="Add data and submit again.")
        return []
    rows = dataset.rows()
    check_rows(rows, algorithm, dataset.name, has_chat_template=has_chat_template)
    return rows


# --- data sets -------------------------------------------------------------------------------------------------------


def dataset(stage: Stage, tenant: str, data: Data, *, folder: Path, any_file: bool = False) -> Dataset:
    """The data set that `data` names.

    Args:
        data: rows, a local path (relative to `folder`), or an S3 URI; a folder in S3 ends in "/".
        any_file: True for scripts, which may read more than .jsonl and .jsonl.gz.

    Raises:
        InvalidData: nothing there, or nothing that is a data file.
    """
    if isinstance(data, str) and data.startswith("s3://"):
        return _s3_dataset(stage, tenant, parse_s3_uri(data), any_file)
    if isinstance(data, str | Path):
        return _local_dataset(stage, tenant, local_path(folder, data), str(data), any_file)
    content = _rows_as_bytes(data)
    prefix = dataset_prefix(tenant, hashlib.sha256(content).hexdigest())
    key = file_key(prefix, ROWS_FILE)
    return Dataset("the rows given", _uri(stage, key), (("the rows given", content),), (parcel(key, content),))


def _rows_as_bytes(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(_row_as_line(number, row) for number, row in enumerate(rows, start=1))


def _row_as_line(number: int, row: Mapping[str, Any]) -> bytes:
    if not isinstance(row, Mapping):
        raise InvalidData("the rows given", f"is {a(type(row).__name__)}, and a row is a dict", line=number)
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidData("the rows given", f"cannot be written as JSON ({error})", line=number) from error


def _local_dataset(stage: Stage, tenant: str, path: Path, name: str, any_file: bool) -> Dataset:
    if path.is_dir():
        return _stored(stage, tenant, name, list(_folder_files(path, name, any_file)))
    if not path.is_file():
        raise InvalidData(name, "there is no such file or folder", next_step="Correct the path.")
    _check_file_name(path.name, name, any_file)
    content = path.read_bytes()
    key = file_key(dataset_prefix(tenant, hashlib.sha256(content).hexdigest()), path.name)
    return Dataset(name, _uri(stage, key), ((name, content),), (parcel(key, content),))


def _folder_files(folder: Path, name: str, any_file: bool) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and _is_wanted(relative, any_file):
            _check_characters(relative, f"{name}/{relative}")
            yield relative, path.read_bytes()


def _is_wanted(path: str, any_file: bool) -> bool:
    hidden = any(part.startswith(".") for part in path.split("/"))
    return not hidden if any_file else is_data_file(path)


def _check_file_name(file: str, name: str, any_file: bool) -> None:
    _check_characters(file, name)
    if not any_file and not is_data_file(file):
        raise InvalidData(name, f"is not a {' or '.join(DATA_SUFFIXES)} file", next_step="Save it as JSON Lines.")


def _check_characters(file: str, name: str) -> None:
    if any(character in "#?" or character < " " for character in file):
        raise InvalidData(name, "has a '#', a '?' or a control character in its name", next_step="Rename it.")


def _stored(stage: Stage, tenant: str, name: str, files: list[tuple[str, bytes]]) -> Dataset:
    """Several files, which become a folder in the bucket."""
    if not files:
        raise InvalidData(name, f"holds no {' or '.join(DATA_SUFFIXES)} file", next_step="Add one and submit again.")
    marks = [(path, hashlib.sha256(content).hexdigest()) for path, content in files]
    prefix = dataset_prefix(tenant, sha256_of_tree(marks))
    parcels = tuple(parcel(file_key(prefix, path), content) for path, content in files)
    shown = tuple((f"{name.rstrip('/')}/{path}", content) for path, content in files)
    return Dataset(name, _uri(stage, prefix), shown, parcels)


def _s3_dataset(stage: Stage, tenant: str, uri: S3Uri, any_file: bool) -> Dataset:
    is_own = belongs_to(uri, stage.bucket, tenant)
    files = [(path, _read(stage, uri.bucket, key)) for path, key in _objects_at(stage, uri, any_file)]
    if not files:
        raise InvalidData(
            str(uri), f"holds no {' or '.join(DATA_SUFFIXES)} file", next_step="Add one and submit again."
        )
    if not uri.is_folder:
        ((file, content),) = files
        key = file_key(dataset_prefix(tenant, hashlib.sha256(content).hexdigest()), file)
        shown = ((str(uri), content),)
        return (
            Dataset(str(uri), str(uri), shown)
            if is_own
            else Dataset(str(uri), _uri(stage, key), shown, (parcel(key, content),))
        )
    stored = _stored(stage, tenant, str(uri), files)
    return Dataset(str(uri), str(uri), stored.files) if is_own else stored


def _objects_at(stage: Stage, uri: S3Uri, any_file: bool) -> list[tuple[str, str]]:
    """`(path below the folder, key)` of what the job will read."""
    if not uri.is_folder:
        _check_file_name(uri.file, str(uri), any_file)
        return [(uri.file, uri.key)]
    return [(path, key) for path, key, _ in _listed(stage, uri) if _is_wanted(path, any_file)]


def _listed(stage: Stage, folder: S3Uri) -> list[tuple[str, str, int]]:
    """`(path below the folder, key, bytes)` of every object in a folder, without folder markers."""
    try:
        stored = list(ObjectStore(stage.s3, folder.bucket).walk(folder.key))
    except ClientError as error:
        raise _cannot_read(folder, error) from error
    return [(each.key.removeprefix(folder.key), each.key, each.bytes) for each in stored if not each.key.endswith("/")]


def _read(stage: Stage, bucket: str, key: str) -> bytes:
    uri = S3Uri(bucket, key)
    try:
        content = ObjectStore(stage.s3, bucket).read(key)
    except ClientError as error:
        raise _cannot_read(uri, error) from error
    if content is None:
        raise InvalidData(
            str(uri), "is not there", next_step="Upload it first, or correct the address; that of a folder ends in '/'."
        )
    return content


def _cannot_read(uri: S3Uri, error: ClientError) -> InvalidData:
    return InvalidData(str(uri), f"cannot be read ({code_of(error)})", next_step="Check its address and your rights.")


def _uri(stage: Stage, key: str) -> str:
    return str(S3Uri(stage.bucket, key))


# --- base models -----------------------------------------------------------------------------------------------------


def is_local_model(value: object) -> bool:
    """Whether it names a directory of this machine, and neither a hub id nor an S3 folder."""
    return isinstance(value, Path) or (
        isinstance(value, str) and not value.startswith("s3://") and (value[:1] in tuple("./~") or Path(value).is_dir())
    )


def base_model(stage: Stage, tenant: str, model: str | Path, *, folder: Path) -> BaseModel:
    """The base model that `model` names: a hub id, a local directory, or an S3 folder.

    Raises:
        InvalidSpec: a directory that is not there, or without a config.json that can be read.
        InvalidData: an S3 folder that cannot be read.
    """
    if isinstance(model, str) and model.startswith("s3://"):
        return _s3_model(stage, tenant, parse_s3_uri(model))
    path = local_path(folder, model)
    if isinstance(model, Path) or path.is_dir() or model.startswith((".", "/", "~")):
        return _local_model(stage, tenant, path)
    return BaseModel(model, shape_from_name(model))


def _local_model(stage: Stage, tenant: str, path: Path) -> BaseModel:
    if not (path / "config.json").is_file():
        raise _no_model(str(path), "it has no config.json")
    shape = shape_from_config(_config(str(path), (path / "config.json").read_bytes()))
    files = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
    files = {name: file for name, file in files.items() if not any(part.startswith(".") for part in name.split("/"))}
    prefix = model_prefix(tenant, sha256_of_tree([(name, sha256_of_file(file)) for name, file in files.items()]))
    parcels = tuple(parcel(file_key(prefix, name), file) for name, file in files.items())
    return BaseModel(_uri(stage, prefix), shape, parcels, path)


def _s3_model(stage: Stage, tenant: str, uri: S3Uri) -> BaseModel:
    folder = uri if uri.is_folder else S3Uri(uri.bucket, f"{uri.key}/")
    try:
        config = ObjectStore(stage.s3, folder.bucket).read(f"{folder.key}config.json")
        if config is None:
            raise _no_model(str(folder), "it has no config.json")
        shape = shape_from_config(_config(str(folder), config))
        if belongs_to(folder, stage.bucket, tenant):
            return BaseModel(str(folder), shape)
        listed = _listed(stage, folder)
        etags = {path: stage.s3.head_object(Bucket=folder.bucket, Key=key)["ETag"] for path, key, _ in listed}
    except ClientError as error:
        raise _cannot_read(folder, error) from error
    prefix = model_prefix(tenant, sha256_of_tree(list(etags.items())))
    parcels = tuple(Parcel(file_key(prefix, path), S3Uri(folder.bucket, key), size) for path, key, size in listed)
    return BaseModel(_uri(stage, prefix), shape, parcels)


def _config(place: str, text: bytes) -> dict[str, Any]:
    """What config.json holds. A broken one is found here, before the upload, and not by the job."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_model(place, f"its config.json is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise _no_model(place, "its config.json is not a JSON object")
    return config


def _no_model(place: str, why: str) -> InvalidSpec:
    return InvalidSpec([Problem("model.base", f"{place} is no folder of a model: {why}")])
