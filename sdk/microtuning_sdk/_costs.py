"""What runs have cost, from the ledger and the runs' own records: `Run.cost()` and `microtuning cost`."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from microtuning_core.aws.admissions import AdmissionStore
from microtuning_core.domain import reports
from microtuning_core.domain.cost import latest, total
from microtuning_core.domain.focus import BillingAccount, focus_csv
from microtuning_core.domain.prices import is_stale
from microtuning_sdk._views import cost_view, money

if TYPE_CHECKING:
    from collections.abc import Iterable

    from microtuning_core.domain.cost import LedgerEntry
    from microtuning_core.domain.run import Run
    from microtuning_sdk._connection import Stage


@dataclass(frozen=True)
class Statement:
    """Entries of the ledger, each once, with what can be said of them together."""

    stage: Stage
    entries: tuple[LedgerEntry, ...]

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Their runs, for what became of the work; a run that is forgotten has left its entries."""
        found = (self.stage.runs.find(run_id) for run_id in sorted({each.run_id for each in self.entries}))
        return {run.run_id: run for run in found if run}

    @property
    def total_usd(self) -> Decimal:
        return total(self.entries)

    def by(self, what: str) -> list[reports.Group]:
        return reports.report(self.entries, what, self.runs if what == "outcome" else {})

    def as_json(self, by: str | None = None) -> dict[str, Any]:
        """{"total_usd", "lines"}, or {"total_usd", "by", "groups"}; with what spot saved, tokens cost and machines did."""
        view = cost_view(self.entries)
        if by is not None:
            view = {"total_usd": view["total_usd"], "by": by, "groups": [group_view(each) for each in self.by(by)]}
        share = reports.utilisation_of(self.entries, self.runs)
        tokens = reports.usd_per_million_tokens(self.entries)
        return view | {
            "saved_usd": money(sum((each.saved_usd for each in self.entries), Decimal(0))),
            "usd_per_million_tokens": {kind: money(usd) for kind, usd in tokens.items()},
            "utilisation": None if share is None else round(float(share), 4),
            "stale_prices": sorted({each.instance_type for each in self.entries if _was_stale(each)}),
        }

    def as_focus(self) -> str:
        return focus_csv(self.entries, BillingAccount(self.stage.names.account, self.stage.names.stage))


def _was_stale(entry: LedgerEntry) -> bool:
    """Whether a machine's price was old already when it was paid."""
    return bool(entry.instance_type) and is_stale(entry.price_as_of, entry.day)


def group_view(group: reports.Group) -> dict[str, Any]:
    return {
        "key": group.key,
        "amount_usd": money(group.amount_usd),
        "machine_s": money(group.machine_s),
        "saved_usd": money(group.saved_usd),
        "state": "estimate" if "estimate" in group.states else "final",
    }


def statement(stage: Stage, entries: Iterable[LedgerEntry]) -> Statement:
    return Statement(stage, tuple(latest(entries)))


def month_statement(stage: Stage, month: str, tenants: Iterable[str]) -> Statement:
    """Everything that these tenants spent in one UTC month ("2026-11")."""
    return statement(stage, [entry for tenant in tenants for entry in stage.ledger.month(tenant, month)])


def every_tenant(stage: Stage) -> list[str]:
    """Tenants that have had a run. Only who may read the stage's own tables can ask."""
    return AdmissionStore(stage.dynamodb, stage.names.table("tenants")).tenants()
