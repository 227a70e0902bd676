"""A price list that is newer than the catalog's: what `microtuning prices refresh` reads, and plans are priced with.

AWS's Price List API answers with one JSON text a product; of SageMaker's training machines one looks like this:

    {"product": {"sku": "JMCWJEAPVJNFJ5P4", "productFamily": "ML Instance", "attributes": {
        "usagetype": "USE1-Train:ml.m5.large", "regionCode": "us-east-1", "component": "Training", …}},
     "terms": {"OnDemand": {"<sku>.JRTCKXETXF": {"effectiveDate": "2026-09-01T00:00:00Z", "priceDimensions": {
        "<sku>.JRTCKXETXF.6YS6EN2CT7": {"unit": "Hrs", "pricePerUnit": {"USD": "0.1150000000"}, …}}}}},
     "publicationDate": "2026-10-01T12:00:00Z", …}

Types that the catalog does not have are passed over. Of the others, a row that does not say one price an hour is refused
and named, and the catalog's own price stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from microtuning_core.domain.catalog import CATALOG, InstanceType
from microtuning_core.domain.record import Record, UsdAmount, UtcTime, Value

SERVICE, COMPONENT = "AmazonSageMaker", "Training"
SOURCE = "AWS Price List API, AmazonSageMaker"
STALE_AFTER = timedelta(days=180)
# A list that says a tenth or ten times of what the catalog says is more likely misread than right.
_MOST_TIMES = 10
_USAGE = re.compile(r"(?:[A-Z]{2,4}\d*-)?Train:(ml\.[a-z0-9-]+\.[a-z0-9-]+)")


class ListedPrice(Value):
    """On-demand, of one machine and hour, as a price list has it from a day on."""

    instance_type: str
    usd_per_hour: UsdAmount
    region: str
    source: str
    as_of: date


class PriceTable(Record):
    """The prices of one region, in the stage's bucket (layout.prices_key)."""

    region: str
    refreshed_at: UtcTime
    prices: tuple[ListedPrice, ...]

    def row_of(self, row: InstanceType) -> InstanceType:
        """The catalog's row with this table's price, where it has one."""
        return priced(row, {each.instance_type: each for each in self.prices})


@dataclass(frozen=True)
class Refused:
    """A row of the list that was not taken, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Reading:
    """What a price list gave: prices, rows that were refused, and types that it does not have."""

    prices: tuple[ListedPrice, ...]
    refused: tuple[Refused, ...]
    missing: tuple[str, ...]


class _Strange(ValueError):
    """A row that does not say one price an hour."""


def priced(row: InstanceType, prices: Mapping[str, ListedPrice]) -> InstanceType:
    listed = prices.get(row.instance_type)
    if listed is None:
        return row
    return replace(
        row,
        price_usd_per_hour=listed.usd_per_hour,
        price_region=listed.region,
        price_source=listed.source,
        price_as_of=listed.as_of,
    )


def is_stale(as_of: date, today: date) -> bool:
    """Whether a price was true so long ago that it should be looked up again."""
    return today - as_of > STALE_AFTER


def read_products(texts: Iterable[str], region: str) -> Reading:
    """What the answers of GetProducts (FormatVersion aws_v1) say of the catalog's types in this region."""
    found: dict[str, set[ListedPrice]] = {}
    refused: list[Refused] = []
    for number, text in enumerate(texts, 1):
        name = f"row {number}"
        try:
            product = _parsed(text)
            name = _instance_type(product)
            if name in CATALOG:
                price = _listed(product, name, region)
                found.setdefault(name, set()).add(price)
        except _Strange as error:
            refused.append(Refused(name, str(error)))
    for name in [name for name, prices in found.items() if len(prices) > 1]:
        listed = ", ".join(sorted(str(each.usd_per_hour) for each in found.pop(name)))
        refused.append(Refused(name, f"is there with several prices: {listed}"))
    prices = tuple(next(iter(found[name])) for name in sorted(found))
    known = found.keys() | {each.what for each in refused}
    return Reading(prices, tuple(refused), tuple(name for name in CATALOG if name not in known))


def _parsed(text: str) -> dict[str, Any]:
    try:
        product = json.loads(text)
    except ValueError as error:
        raise _Strange("is no JSON") from error
    if not isinstance(product, dict):
        raise _Strange("is no JSON object")
    return product


def _instance_type(product: Mapping[str, Any]) -> str:
    """The type in a usage type such as USE1-Train:ml.m5.large; "" for a product of another kind."""
    usage = _inner(product, "product", "attributes").get("usagetype")
    match = _USAGE.fullmatch(usage) if isinstance(usage, str) else None
    return match[1] if match else ""


def _inner(document: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for name in path:
        inner = document.get(name)
        if not isinstance(inner, Mapping):
            raise _Strange(f"has no {'.'.join(path)}")
        document = inner
    return document


def _listed(product: Mapping[str, Any], name: str, region: str) -> ListedPrice:
    where = _inner(product, "product", "attributes").get("regionCode")
    if where != region:
        raise _Strange(f"is of region {where}, not {region}")
    term = _only(_inner(product, "terms", "OnDemand"), "on-demand terms")
    dimension = _only(_inner(term, "priceDimensions"), "prices")
    if dimension.get("unit") not in ("Hrs", "Hours"):
        raise _Strange(f"is priced by {dimension.get('unit')}, not by the hour")
    usd = _usd(_inner(dimension, "pricePerUnit").get("USD"))
    known = CATALOG[name].price_usd_per_hour
    if not known / _MOST_TIMES <= usd <= known * _MOST_TIMES:
        raise _Strange(f"costs {usd} USD an hour, where the catalog has {known}: look at it by hand")
    as_of = _day(term.get("effectiveDate"))
    return ListedPrice(instance_type=name, usd_per_hour=usd, region=region, source=SOURCE, as_of=as_of)


def _only(parts: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    if len(parts) != 1:
        raise _Strange(f"has {len(parts)} {what}, not one")
    only = next(iter(parts.values()))
    if not isinstance(only, Mapping):
        raise _Strange(f"has {what} that are no object")
    return only


def _usd(text: object) -> Decimal:
    try:
        usd = Decimal(text) if isinstance(text, str) else Decimal("NaN")
    except InvalidOperation as error:
        raise _Strange(f"has the price {text!r}") from error
    if not usd.is_finite() or usd <= 0:
        raise _Strange(f"has the price {text!r} in USD")
    return usd.normalize() + 0  # "1.4080000000" is 1.408


def _day(text: object) -> date:
    try:
        return datetime.fromisoformat(str(text)).date()
    except ValueError as error:
        raise _Strange(f"holds from {text!r} on, which is no day") from error
