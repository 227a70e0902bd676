"""The base of every stored record: frozen, strict about unknown fields, and carrying the version of its schema."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, PlainSerializer


def _to_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


# Aware, and always UTC once parsed; written as 2026-01-02T03:04:05.678900Z.
UtcTime = Annotated[AwareDatetime, AfterValidator(_to_utc)]

# Exact in memory, a string in JSON: a float would lose the cent.
UsdAmount = Annotated[Decimal, PlainSerializer(str, return_type=str, when_used="json")]


class Value(BaseModel):
    """A part of a record: frozen, unknown fields are refused, and so are numbers that JSON does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Record(Value):
    """A stored record. `schema_version` grows when a field changes meaning; old versions are migrated on reading."""

    schema_version: int = 1
