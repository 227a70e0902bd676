"""The rows that an uploaded spec names, judged by the same rules as fit() and the container use."""

from __future__ import annotations

from microtuning_core.domain.datasets import Row, check_rows, is_data_file, read_rows
from microtuning_core.domain.errors import InvalidData, Problem
from microtuning_core.domain.spec import RunSpec
from microtuning_core.usecases.services import Services

# What a function reads of one data set; of a larger one only the sizes are looked at here, and the container judges it.
CHECKED_BYTES = 32 * 2**20


def data_problems(services: Services, spec: RunSpec) -> list[Problem]:
    """Each data set's first fault, naming file and line. The rows of a script are its own business."""
    named = {"data.train": spec.data.train, "data.eval": spec.data.eval}
    if spec.algorithm.type == "grpo" and spec.algorithm.warm_start:
        named["algorithm.warm_start.data"] = spec.algorithm.warm_start.data
    found = [_problem(services, spec, field, uri) for field, uri in named.items() if uri]
    return [problem for problem in found if problem]


def _problem(services: Services, spec: RunSpec, field: str, uri: str) -> Problem | None:
    supervised = field == "algorithm.warm_start.data"
    try:
        rows = _rows(services, uri)
        if rows is not None:
            algorithm_type = "sft" if supervised else spec.algorithm.type
            check_rows(rows, algorithm_type, uri, has_chat_template=spec.model.arch is None)
    except InvalidData as error:
        return Problem(field, f"{error.message} {error.next_step}")
    return None


def _rows(services: Services, uri: str) -> list[Row] | None:
    """All rows of the file or folder; None when it is too large to be read here."""
    key = uri.removeprefix(f"s3://{services.names.bucket}/")
    if key.endswith("/"):
        stored = [each for each in services.objects.walk(key) if is_data_file(each.key)]
    else:
        stored_bytes = services.objects.bytes_of(key)
        return None if stored_bytes is None or stored_bytes > CHECKED_BYTES else _read(services, key)
    if sum(each.bytes for each in stored) > CHECKED_BYTES:
        return None
    return [row for each in stored for row in _read(services, each.key)]


def _read(services: Services, key: str) -> list[Row]:
    body = services.objects.read(key)
    return read_rows(key.rsplit("/", 1)[-1], body or b"")
