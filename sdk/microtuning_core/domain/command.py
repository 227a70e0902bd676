"""What a user may ask of a run that exists; each arrives as an object under tenants/<t>/commands/<run_id>/.

    {"verb": "cancel", "issued_at": "2026-01-02T03:04:05Z"}
    {"verb": "rollback", "step": 40, …}                      go on from there, as a new lineage
    {"verb": "fork", "step": 40, "changes": {"algorithm": {"learning_rate": 1e-5}}, …}    a new run from there
    {"verb": "pin", "step": 40, …}                           keep it, whatever is pruned
    {"verb": "budget", "usd": "5", …}                        another budget; what the old one stopped goes on

Without a step the newest checkpoint is meant; without a lineage the newest lineage that has the step.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from microtuning_core.domain.fields import Json
from microtuning_core.domain.record import Record, UsdAmount, UtcTime

MOST_USD = Decimal(1_000_000_000)
Verb = Literal["cancel", "rollback", "fork", "pin", "budget"]


class Command(Record):
    """One verb for one run. `issued_at` is the client's clock: it is shown, and part of a fork's name; never decided on."""

    verb: Verb
    issued_at: UtcTime
    client_id: str = ""
    step: NonNegativeInt | None = None
    lineage: PositiveInt | None = None
    usd: Annotated[UsdAmount, Field(gt=0, lt=MOST_USD)] | None = None
    name: str | None = None  # of the forked run
    changes: dict[str, Json] = {}  # of the forked run's spec
