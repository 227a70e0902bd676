"""`microtuning cost`: the same ledger as a table, JSON, CSV and FOCUS, whole and by group."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from microtuning_core.domain.cost import CostRef, UnitPrice
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.lines import Measured, attempt_entries
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.reports import GROUPS
from microtuning_core.domain.run import Attempt, Metered, Run, new_run
from microtuning_sdk import cli
from microtuning_sdk._costs import Statement, month_statement, statement
from microtuning_sdk.cli import _cost
from tests.unit.records import RUN_ID, a_cpu_plan, a_spec

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
NAMES = StackNames("prod", "123456789012", "us-east-1")


def a_run() -> Run:
    attempt = Attempt(
        attempt=1, job_name=f"prod-{RUN_ID}-a001", lineage=1, plan=a_cpu_plan(), created_at=NOON, outcome="completed",
        metered=Metered(step=10, steps_done=10),
    )  # fmt: skip
    return new_run(RUN_ID, a_spec(), NOON).with_(attempts=(attempt,))


def entries(tenant: str = "acme") -> list[Any]:
    facts = JobFacts(
        f"prod-{RUN_ID}-a001", "Completed", "Completed", NOON, started_at=NOON, ended_at=NOON + timedelta(seconds=90),
        billed_s=30, training_s=90, instance_type="ml.m5.large", spot=True,
    )  # fmt: skip
    measured = Measured({"update": 60_000, "load": 30_000}, {"trained": 1000}, "Transformer")
    price = UnitPrice(Decimal("0.115"), "a list", date(2026, 1, 1))
    return attempt_entries(CostRef(tenant, RUN_ID, 1), facts, price, NOON, measured)


def stage(**months: list[Any]) -> Any:
    ledger = SimpleNamespace(month=lambda tenant, month: months.get(tenant, []) if month == "2026-01" else [])
    return SimpleNamespace(names=NAMES, ledger=ledger, runs=SimpleNamespace(find={RUN_ID: a_run()}.get))


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> Statement:
    found = statement(stage(), [*entries(), *entries()])
    monkeypatch.setattr(_cost, "statement_of", lambda _: found)
    return found


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["cost", *arguments]) == 0
    return capsys.readouterr().out


def test_a_table_shows_four_decimals_and_says_what_spot_saved(spent: Statement, capsys: Any) -> None:
    text = shown(capsys)
    assert "total: 0.0010 USD" in text
    assert "saved by spot: 0.0019 USD" in text
    assert "utilisation: 66.7 %" in text
    assert "0.00095" not in text


def test_a_spot_attempt_whose_bill_is_not_known_shows_what_it_costs_at_most(monkeypatch: Any, capsys: Any) -> None:
    ended = JobFacts(
        f"prod-{RUN_ID}-a001", "Completed", "Completed", NOON, started_at=NOON, ended_at=NOON + timedelta(seconds=90),
        instance_type="ml.m5.large", spot=True,
    )  # fmt: skip
    price = UnitPrice(Decimal("0.115"), "a list", date(2026, 1, 1))
    found = statement(stage(), attempt_entries(CostRef("acme", RUN_ID, 1), ended, price, NOON))
    monkeypatch.setattr(_cost, "statement_of", lambda _: found)
    (line,) = [line for line in shown(capsys).splitlines() if "compute" in line]
    assert line.split()[-5:] == ["0.0029", "at", "most,", "until", "billed"]


def test_json_keeps_every_decimal_and_its_old_keys(spent: Statement, capsys: Any) -> None:
    document = json.loads(shown(capsys, "--json"))
    assert document == json.loads(shown(capsys, "--format", "json"))
    assert document["total_usd"] == "0.0009583333"
    assert [line["id"] for line in document["lines"]] == [each.id for each in spent.entries]
    assert (document["saved_usd"], document["utilisation"]) == ("0.0019166667", 0.6667)
    assert document["usd_per_million_tokens"] == {"trained": "0.6388888"}


@pytest.mark.parametrize("by", GROUPS)
def test_groups_come_as_a_table_as_json_and_as_csv_alike(spent: Statement, capsys: Any, by: str) -> None:
    groups = json.loads(shown(capsys, "--by", by, "--json"))["groups"]
    rows = list(csv.DictReader(io.StringIO(shown(capsys, "--by", by, "--format", "csv"))))
    assert [{key: str(value) for key, value in each.items()} for each in groups] == rows
    assert sum(Decimal(each["amount_usd"]) for each in groups) == spent.total_usd
    assert shown(capsys, "--by", by).splitlines()[0].split()[0] == by


def test_csv_has_a_row_an_entry(spent: Statement, capsys: Any) -> None:
    (row,) = csv.DictReader(io.StringIO(shown(capsys, "--format", "csv")))
    assert (row["run_id"], row["billed_s"], row["amount_usd"]) == (RUN_ID, "30", "0.0009583333")


def test_focus_names_the_account_and_adds_up(spent: Statement, capsys: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(shown(capsys, "--format", "focus"))))
    assert {row["BillingAccountId"] for row in rows} == {"123456789012"}
    assert sum(Decimal(row["BilledCost"]) for row in rows) == spent.total_usd


def test_a_month_of_several_tenants_is_one_statement() -> None:
    found = month_statement(stage(acme=entries(), umbra=[]), "2026-01", ["acme", "umbra", "nobody"])
    assert [group.key for group in found.by("tenant")] == ["acme"]
    assert month_statement(stage(acme=entries()), "2026-02", ["acme"]).total_usd == 0


@pytest.mark.parametrize("arguments", [["--by", "colour"], ["--format", "xml"]])
def test_what_cannot_be_asked_is_a_mistake_in_the_request(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["cost", *arguments])
    assert ended.value.code == 2
