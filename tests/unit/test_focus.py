"""The FOCUS export against the specification's own rules, written down here anew: they share nothing with the writer.

From FOCUS 1.2 (FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec, specification/columns and attributes, read on 2026-12-03).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.domain.cost import Charge, CostRef, LedgerEntry, UnitPrice, latest, total
from microtuning_core.domain.focus import BillingAccount, focus_csv
from microtuning_core.domain.job import JobFacts
from microtuning_core.domain.lines import attempt_entries

# Column: whether it may be null. These 21 have the feature level "Mandatory".
MANDATORY = {
    "BilledCost": False, "BillingAccountId": False, "BillingAccountName": True, "BillingCurrency": False,
    "BillingPeriodEnd": False, "BillingPeriodStart": False, "ChargeCategory": False, "ChargeClass": True,
    "ChargeDescription": True, "ChargePeriodEnd": False, "ChargePeriodStart": False, "ContractedCost": False,
    "EffectiveCost": False, "InvoiceIssuerName": False, "ListCost": False, "PricingQuantity": True,
    "PricingUnit": True, "ProviderName": False, "PublisherName": False, "ServiceCategory": False, "ServiceName": False,
}  # fmt: skip
OTHERS = {
    "AvailabilityZone", "BillingAccountType", "CapacityReservationId", "CapacityReservationStatus", "ChargeFrequency",
    "CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName", "CommitmentDiscountQuantity",
    "CommitmentDiscountStatus", "CommitmentDiscountType", "CommitmentDiscountUnit", "ConsumedQuantity", "ConsumedUnit",
    "ContractedUnitPrice", "InvoiceId", "ListUnitPrice", "PricingCategory", "PricingCurrency",
    "PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost", "PricingCurrencyListUnitPrice", "RegionId",
    "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceSubcategory", "SkuId", "SkuMeter",
    "SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags",
}  # fmt: skip
ALLOWED = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {"", "Correction"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {"", "Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {
        "AI and Machine Learning", "Analytics", "Business Applications", "Compute", "Databases", "Developer Tools",
        "Multicloud", "Identity", "Integration", "Internet of Things", "Management and Governance", "Media", "Migration",
        "Mobile", "Networking", "Security", "Storage", "Web", "Other",
    },
}  # fmt: skip
DECIMALS = {
    "BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "PricingQuantity", "ConsumedQuantity", "ListUnitPrice",
    "ContractedUnitPrice",
}  # fmt: skip
TIMES = {"BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd"}
UTC_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
NUMERIC = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")


def broken_rules(text: str) -> list[str]:
    """Every rule of the specification that the document breaks, with the row it is broken in."""
    reader = csv.DictReader(io.StringIO(text))
    columns = list(reader.fieldnames or ())
    found = [f"column {name} is missing" for name in MANDATORY if name not in columns]
    if found:
        return found
    known = MANDATORY.keys() | OTHERS
    found += [f"column {each} is neither FOCUS nor x_" for each in columns if each not in known and each[:2] != "x_"]
    found += [f"column {each} comes twice" for each in set(columns) if columns.count(each) > 1]
    for number, row in enumerate(reader, 1):
        found += [f"row {number}: {broken}" for broken in broken_in(row)]
    return found


def broken_in(row: dict[str, str]) -> list[str]:
    found = [f"{name} is null" for name, may_be_null in MANDATORY.items() if not may_be_null and not row[name]]
    found += [f"{name} is {row[name]!r}" for name, values in ALLOWED.items() if row[name] not in values]
    found += [
        f"{name} is no number: {row[name]!r}" for name in DECIMALS if row[name] and not NUMERIC.fullmatch(row[name])
    ]
    if strange := [f"{name} is no UTC time: {row[name]!r}" for name in TIMES if not UTC_TIME.fullmatch(row[name])]:
        return [*found, *strange]
    if not re.fullmatch(r"[A-Z]{3}", row["BillingCurrency"]):
        found.append("BillingCurrency is no ISO 4217 code")
    return found + broken_periods(row) + broken_prices(row) + broken_tags(row["Tags"])


def broken_periods(row: dict[str, str]) -> list[str]:
    month_from, month_to, begins, ends = (
        datetime.fromisoformat(row[name])
        for name in ("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd")
    )
    if not (month_from <= begins < ends <= month_to):
        return [f"the charge period {begins}..{ends} is not within {month_from}..{month_to}"]
    return [] if (month_from.day, month_to.day) == (1, 1) else ["the billing period is no month"]


def broken_prices(row: dict[str, str]) -> list[str]:
    usage = row["ChargeCategory"] in ("Usage", "Purchase") and row["ChargeClass"] != "Correction"
    priced = ("PricingQuantity", "PricingUnit", "ListUnitPrice", "ContractedUnitPrice", "PricingCategory", "SkuId")
    found = [
        f"{name} is null for usage" for name in (*priced, "SkuPriceId", "ConsumedQuantity") if usage and not row[name]
    ]
    found += ["ConsumedQuantity on what is no usage"] if row["ConsumedQuantity"] and not usage else []
    found += ["a quantity without a unit"] if bool(row["PricingQuantity"]) != bool(row["PricingUnit"]) else []
    if row["PricingQuantity"]:
        quantity = Decimal(row["PricingQuantity"])
        for price, cost in (("ListUnitPrice", "ListCost"), ("ContractedUnitPrice", "ContractedCost")):
            if quantity * Decimal(row[price]) != Decimal(row[cost]):
                found.append(f"PricingQuantity x {price} is not {cost}")
            if Decimal(row[price]) < 0:
                found.append(f"{price} is negative")
    return found


def broken_tags(text: str) -> list[str]:
    tags = json.loads(text) if text else {}
    flat = isinstance(tags, dict) and all(isinstance(value, str) for value in tags.values())
    return [] if flat else ["Tags is no flat object"]


# ---------------------------------------------------------------------------------------------------------- documents

ACCOUNT = BillingAccount("123456789012", "prod")
NOON = datetime(2026, 1, 30, 12, tzinfo=UTC)
STEERED = (
    ("transitions", "transition", "0.000025"), ("function requests", "request", "0.0000002"),
    ("function time", "GB-second", "0.0000133334"), ("queue requests", "request", "0.0000004"),
    ("object events", "event", "0.000001"), ("object writes", "write", "0.000005"),
    ("table writes", "write unit", "0.000000625"), ("logs", "GB", "0.5"), ("checkpoint storage", "GB-month", "0.023"),
)  # fmt: skip


def machines(tenant: str = "acme", after_s: int = 0, wall_s: int = 1000, usd: str = "1.408", *, spot: bool = False):
    start = NOON + timedelta(seconds=after_s)
    facts = JobFacts(
        "prod-acme-sort-0a1b2c3d4e5f-a001", "Completed", "Completed", start, started_at=start,
        ended_at=start + timedelta(seconds=wall_s), billed_s=wall_s // 3 if spot else wall_s, training_s=wall_s,
        instance_type="ml.m5.large", instance_count=2, volume_gb=50, spot=spot,
        warm_pool_status=None if spot else "Terminated", warm_pool_s=0 if spot else 100,
    )  # fmt: skip
    price = UnitPrice(Decimal(usd), 'a "list", of prices', date(2026, 1, 1))
    return attempt_entries(CostRef(tenant, f"{tenant}-sort-0a1b2c3d4e5f", 1), facts, price, start)


def steering(quantity: str = "13.5", tenant: str = "acme") -> LedgerEntry:
    amounts = [(name, unit, Decimal(usd), Decimal(quantity)) for name, unit, usd in STEERED]
    charges = tuple(
        Charge(name=n, unit=u, unit_price_usd=usd, quantity=q, amount_usd=(usd * q).quantize(Decimal("1e-10")))
        for n, u, usd, q in amounts
    )
    whole = sum((each.amount_usd for each in charges), Decimal(0))
    return LedgerEntry(
        id=f"{tenant}-sort-0a1b2c3d4e5f#e01#orchestration#2026-01-30", tenant=tenant, run_id=f"{tenant}-sort-0a1b2c3d4e5f",
        attempt=0, execution=1, line="orchestration", day=NOON.date(), phase_ms={}, metered_ms=0, billed_s=0,
        instance_type="", instance_count=0, quantity=Decimal(1), unit="execution", unit_price_usd=whole,
        price_source="a test", price_as_of=date(2026, 1, 1), amount_usd=whole, state="final", charges=charges,
    )  # fmt: skip


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_export_keeps_every_rule():
    text = focus_csv([*machines(), *machines("umbra", spot=True), steering()], ACCOUNT)
    assert broken_rules(text) == []
    assert {row["PricingCategory"] for row in rows_of(text) if row["x_Line"] == "compute"} == {"Standard", "Dynamic"}
    assert {row["ServiceName"] for row in rows_of(text)} >= {"Amazon SageMaker", "AWS Lambda", "Amazon DynamoDB"}


def test_nothing_at_all_is_a_document_with_its_header():
    assert (broken_rules(focus_csv([], ACCOUNT)), rows_of(focus_csv([], ACCOUNT))) == ([], [])


def test_a_price_list_with_quotes_and_commas_stays_one_field():
    assert rows_of(focus_csv(machines(), ACCOUNT))[0]["x_PriceSource"] == 'a "list", of prices'


@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ("Usage,,", "Used,,", "ChargeCategory is 'Used'"),
        (",USD,", ",Dollar,", "BillingCurrency is no ISO 4217 code"),
        ("ListCost,", "ListedCost,", "column ListCost is missing"),
        ("2026-01-30T00:00:00Z", "2026-02-30", "no UTC time"),
        (",1.408,", ",1.409,", "is not ListCost"),
    ],
)
def test_the_rules_are_told_from_their_breach(old, new, broken):
    text = focus_csv(machines(), ACCOUNT)
    assert old in text
    assert any(broken in each for each in broken_rules(text.replace(old, new)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acme", "umbra"]),
            st.integers(0, 5 * 86_400),
            st.integers(1, 3 * 86_400),
            st.decimals("0.01", "100", places=6).map(str),
            st.booleans(),
        ),
        max_size=3,
    ),
    st.none() | st.decimals("0.0001", "1000000", places=4).map(str),
)
def test_rows_of_a_tenant_and_month_add_up_to_its_ledger_to_the_last_decimal(jobs, steered):
    entries = [
        entry.model_copy(update={"id": f"{number}{entry.id}", "run_id": f"{entry.run_id}{number}"})
        for number, (tenant, after_s, wall_s, usd, spot) in enumerate(jobs)
        for entry in machines(tenant, after_s, wall_s, usd, spot=spot)
    ] + ([steering(steered)] if steered else [])
    text = focus_csv(latest(entries), ACCOUNT)
    assert broken_rules(text) == []
    ledger: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    exported: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    for entry in entries:
        ledger[entry.tenant, f"{entry.day:%Y-%m}"] += entry.amount_usd
    for row in rows_of(text):
        exported[row["SubAccountId"], row["BillingPeriodStart"][:7]] += Decimal(row["BilledCost"])
    assert exported == ledger
    assert sum(exported.values(), Decimal(0)) == total(entries)
