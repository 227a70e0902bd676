"""The rows that an uploaded spec names, judged by the same rules as fit() and the container use."""

from __future__ import annotations

from collections.abc import Set
from itertools import islice

from microtuning_core.aws.objects import Stored
from microtuning_core.domain.datasets import Row, check_rows, is_data_file, read_rows, unpacked_bytes
from microtuning_core.domain.errors import InvalidData, Problem
from microtuning_core.domain.spec import RunSpec, warm_data
from microtuning_core.usecases.services import Services

# What a function reads of one data set; of a larger one only the sizes are looked at here, and the container judges it.
CHECKED_BYTES = 32 * 2**20
CHECKED_FILES = 200


def data_problems(services: Services, spec: RunSpec, absent: Set[str]) -> list[Problem]:
    """Each data set's first fault, naming file and line, but of those that are `absent`. A script knows its own files."""
    if spec.algorithm.type == "script":
        return []
    named = {"data.train": spec.data.train, "data.eval": spec.data.eval}
    named["algorithm.warm_start.data"] = warm_data(spec)
    found = [_problem(services, spec, field, uri) for field, uri in named.items() if uri and field not in absent]
    return [problem for problem in found if problem]


def _problem(services: Services, spec: RunSpec, field: str, uri: str) -> Problem | None:
    supervised = field == "algorithm.warm_start.data"
    try:
        rows = _rows(services, uri)
        if rows is not None:
            algorithm_type = "sft" if supervised else spec.algorithm.type
            check_rows(rows, algorithm_type, uri, has_chat_template=spec.model.arch is None)
    except InvalidData as error:
        return Problem(field, f"{error.message} {error.next_step}".rstrip("."))
    return None


def _rows(services: Services, uri: str) -> list[Row] | None:
    """All rows of the file or folder; None when it is too large to be read here, packed or unpacked."""
    key = uri.removeprefix(f"s3://{services.names.bucket}/")
    folder = key if key.endswith("/") else key.rpartition("/")[0] + "/"
    if key == folder:
        walked = (each for each in services.objects.walk(key) if is_data_file(each.key))
        stored = list(islice(walked, CHECKED_FILES + 1))
    elif is_data_file(key):
        stored = [Stored(key, services.objects.bytes_of(key) or 0)]
    else:
        raise InvalidData(
            key.removeprefix(folder), "is not a .jsonl or .jsonl.gz file", next_step="Name one, or a folder."
        )
    if len(stored) > CHECKED_FILES or sum(each.bytes for each in stored) > CHECKED_BYTES:
        return None
    rows: list[Row] = []
    left_bytes = CHECKED_BYTES
    for each in stored:
        name, body = each.key.removeprefix(folder), services.objects.read(each.key, at_most=CHECKED_BYTES) or b""
        left_bytes -= unpacked_bytes(name, body, left_bytes)
        if left_bytes < 0:
            return None
        rows += read_rows(name, body)
    return rows
