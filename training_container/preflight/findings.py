"""What was found: the request, and one line a finding."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.record import Value
from microtuning_core.domain.spec import RunSpec

FINDINGS = "findings.jsonl"
REQUEST = "request.json"


@dataclass(frozen=True)
class Finding:
    """level: "ok", "note" (worth knowing), "warning" (would waste money) or "error" (would end the run)."""

    level: Literal["ok", "note", "warning", "error"]
    about: str
    found: str
    advice: str = ""


class Request(Value):
    """rows: file by field of the spec; totals: how many rows there are, of which the file may hold fewer.

    model: folder of the model, where it is on this machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    spec: RunSpec
    rows: dict[str, str]
    totals: dict[str, int]
    model: str | None = None


def read_request(folder: Path) -> Request:
    return Request.model_validate_json((folder / REQUEST).read_bytes())


def read_rows(folder: Path, request: Request, field: str) -> list[Row]:
    """The rows of a data set, as the SDK read and checked them."""
    name = request.rows.get(field)
    lines = (folder / name).read_text("utf-8").splitlines() if name else []
    return [Row(**json.loads(line)) for line in lines]


def write(folder: Path, finding: Finding) -> None:
    with (folder / FINDINGS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(finding), ensure_ascii=False) + "\n")
