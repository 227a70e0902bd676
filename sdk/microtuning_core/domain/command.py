"""What a user may ask of a run that exists; each arrives as an object under tenants/<t>/commands/<run_id>/."""

from __future__ import annotations

from typing import Literal

from microtuning_core.domain.record import Record, UtcTime


class Command(Record):
    """One verb for one run. `issued_at` is the client's clock and only shown, never decided on."""

    verb: Literal["cancel"]
    issued_at: UtcTime
    client_id: str = ""
