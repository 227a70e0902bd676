"""The ledger as FOCUS 1.2 (FinOps Open Cost and Usage Specification): a row for each thing that was priced, as CSV.

FOCUS wants quantity x unit price to be the cost exactly, and an hour's 3600th part has no end as a decimal. So a row costs
its rounded quantity times its price, and what that is off by (under a millionth of a cent a row) stands in one row of the
category "Adjustment" for each tenant and month: the rows of a tenant and month add up to its ledger to the last decimal.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

from microtuning_core.domain.cost import Charge, LedgerEntry

COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart",
    "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName",
    "ListCost", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName",
    "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "SkuId",
    "SkuMeter", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags", "x_RunId", "x_Attempt", "x_Line", "x_Model",
    "x_InstanceType", "x_State", "x_PriceSource", "x_PriceAsOf",
)  # fmt: skip
_AWS = "AWS"
_SAGEMAKER = ("AI and Machine Learning", "Amazon SageMaker")
# (ServiceCategory, ServiceName) by the first word of a charge's name.
_SERVICES = {
    "transitions": ("Integration", "AWS Step Functions"),
    "function": ("Compute", "AWS Lambda"),
    "queue": ("Integration", "Amazon Simple Queue Service"),
    "object": ("Storage", "Amazon Simple Storage Service"),
    "checkpoint": ("Storage", "Amazon Simple Storage Service"),
    "table": ("Databases", "Amazon DynamoDB"),
    "logs": ("Management and Governance", "Amazon CloudWatch"),
}
_EVENTS = ("Integration", "Amazon EventBridge")
_UNITS = {"instance-hour": "Hours", "GB-month": "GB-Months", "GB-second": "GB-Seconds", "GB": "GB"}

Row = dict[str, str]


@dataclass(frozen=True)
class BillingAccount:
    """The AWS account that the stage is deployed to."""

    account_id: str
    stage: str


def focus_csv(entries: Iterable[LedgerEntry], account: BillingAccount) -> str:
    """The entries (each id once, see cost.latest) as one CSV document with a header; null is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(focus_rows(entries, account))
    return text.getvalue()


def focus_rows(entries: Iterable[LedgerEntry], account: BillingAccount) -> Iterator[Row]:
    off: dict[tuple[str, date], Decimal] = {}
    for entry in entries:
        month = entry.day.replace(day=1)
        for priced in entry.charges or (_whole(entry),):
            cost = priced.quantity * priced.unit_price_usd
            off[entry.tenant, month] = off.get((entry.tenant, month), Decimal(0)) + priced.amount_usd - cost
            yield _usage_row(entry, priced, cost, account)
    for (tenant, month), usd in sorted(off.items()):
        if usd:
            yield _rounding_row(tenant, month, usd, account)


def _whole(entry: LedgerEntry) -> Charge:
    return Charge(
        name=entry.line,
        quantity=entry.quantity,
        unit=entry.unit,
        unit_price_usd=entry.unit_price_usd,
        amount_usd=entry.amount_usd,
    )


def _usage_row(entry: LedgerEntry, priced: Charge, cost: Decimal, account: BillingAccount) -> Row:
    category, service = _service_of(priced.name)
    unit = _UNITS.get(priced.unit, priced.unit.capitalize() + "s")
    sku = f"{priced.name}:{entry.instance_type}" if entry.instance_type else priced.name
    part = f"a{entry.attempt:03d}" if entry.attempt else f"e{entry.execution:02d}"
    return {
        **_common(entry.tenant, entry.day, entry.day + timedelta(days=1), account),
        **_costs(cost),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{priced.name} of {entry.run_id} {part}",
        "ChargeFrequency": "Usage-Based",
        "ConsumedQuantity": _decimal(priced.quantity),
        "ConsumedUnit": unit,
        "ContractedUnitPrice": _decimal(priced.unit_price_usd),
        "ListUnitPrice": _decimal(priced.unit_price_usd),
        "PricingCategory": "Dynamic" if entry.spot and entry.line == "compute" else "Standard",
        "PricingQuantity": _decimal(priced.quantity),
        "PricingUnit": unit,
        "RegionId": entry.price_region,
        "RegionName": entry.price_region,
        "ResourceId": f"{account.stage}-{entry.run_id}-{part}",
        "ResourceName": f"{entry.run_id}-{part}",
        "ResourceType": "Training Job" if entry.attempt else "State Machine Execution",
        "ServiceCategory": category,
        "ServiceName": service,
        "SkuId": sku,
        "SkuMeter": priced.name,
        "SkuPriceId": f"{sku}:{entry.price_region}:{entry.price_as_of.isoformat()}",
        "Tags": json.dumps(_tags(entry, account), sort_keys=True),
        "x_RunId": entry.run_id,
        "x_Attempt": str(entry.attempt or ""),
        "x_Line": entry.line,
        "x_Model": entry.model,
        "x_InstanceType": entry.instance_type,
        "x_State": entry.state,
        "x_PriceSource": entry.price_source,
        "x_PriceAsOf": entry.price_as_of.isoformat(),
    }


def _rounding_row(tenant: str, month: date, usd: Decimal, account: BillingAccount) -> Row:
    category, service = _SAGEMAKER
    return {
        **_common(tenant, month, _next_month(month), account),
        **_costs(usd),
        "ChargeCategory": "Adjustment",
        "ChargeDescription": f"rounding of the quantities of {month:%Y-%m}",
        "ChargeFrequency": "One-Time",
        "ServiceCategory": category,
        "ServiceName": service,
        "Tags": json.dumps({"microtuning:stage": account.stage, "microtuning:tenant": tenant}, sort_keys=True),
        "x_Line": "rounding",
    }


def _common(tenant: str, first: date, end: date, account: BillingAccount) -> Row:
    month = first.replace(day=1)
    return {
        "BillingAccountId": account.account_id,
        "BillingAccountName": f"microtuning {account.stage}",
        "BillingCurrency": "USD",
        "BillingPeriodStart": _moment(month),
        "BillingPeriodEnd": _moment(_next_month(month)),
        "ChargePeriodStart": _moment(first),
        "ChargePeriodEnd": _moment(end),
        "InvoiceIssuerName": _AWS,
        "ProviderName": _AWS,
        "PublisherName": _AWS,
        "SubAccountId": tenant,
        "SubAccountName": tenant,
    }


def _costs(usd: Decimal) -> Row:
    """No discount is known of: spot's lies in its billed seconds."""
    return dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), _decimal(usd))


def _tags(entry: LedgerEntry, account: BillingAccount) -> dict[str, str]:
    return {
        "microtuning:stage": account.stage,
        "microtuning:tenant": entry.tenant,
        "microtuning:run": entry.run_id,
    }


def _service_of(name: str) -> tuple[str, str]:
    if name.endswith("events"):
        return _EVENTS
    return _SERVICES.get(name.split()[0], _SAGEMAKER)


def _next_month(month: date) -> date:
    return (month + timedelta(days=31)).replace(day=1)


def _moment(day: date) -> str:
    return datetime.combine(day, time(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _decimal(value: Decimal) -> str:
    """Plain digits, never an exponent."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
