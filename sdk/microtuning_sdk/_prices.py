"""Prices of machines: what the catalog says, what AWS's price list says, and which of the two a stage uses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import boto3

from microtuning_core.aws.price_list import PriceList
from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.errors import MicrotuningError
from microtuning_core.domain.layout import prices_key
from microtuning_core.domain.prices import PriceTable, Reading, is_stale, priced, read_products
from microtuning_core.usecases.plan import newest_prices

if TYPE_CHECKING:
    from microtuning_sdk._connection import Stage


@dataclass(frozen=True)
class Refreshed:
    """A price list that was read and stored where the stage finds it."""

    region: str
    reading: Reading
    changed: tuple[str, ...]  # types whose price is not what it was


def price_rows(stage: Stage, today: date | None = None) -> list[dict[str, Any]]:
    """The price a new attempt of each type is planned with, cheapest first; `stale` when it should be looked up again."""
    newest = newest_prices(stage.objects, stage.names.region)
    rows = sorted((priced(row, newest) for row in CATALOG.values()), key=lambda row: row.price_usd_per_hour)
    return [
        {
            "instance_type": row.instance_type,
            "usd_per_hour": str(row.price_usd_per_hour),
            "region": row.price_region,
            "source": row.price_source,
            "as_of": row.price_as_of.isoformat(),
            "stale": is_stale(row.price_as_of, today or datetime.now(UTC).date()),
        }
        for row in rows
    ]


def refresh(stage: Stage, region: str | None = None, price_list: PriceList | None = None) -> Refreshed:
    """Reads the price list of a region (the stage's own by default) and stores it in the stage's bucket.

    What is refused, or not listed, keeps the price it had. Needs pricing:GetProducts, and write access to the bucket.
    """
    region = region or stage.names.region
    # The local cloud has no price list: it is AWS's own that is asked, whatever the stage.
    texts = (price_list or PriceList(boto3.Session())).training_machines(region)
    reading = read_products(texts, region)
    if not reading.prices:
        raise MicrotuningError(
            f"The price list of {region} has no price of a type in the catalog ({len(texts)} products).",
            next_step="Check the region's name; nothing was changed.",
        )
    before = newest_prices(stage.objects, region)
    kept = {name: each for name, each in before.items() if name not in {new.instance_type for new in reading.prices}}
    prices = (*kept.values(), *reading.prices)
    table = PriceTable(region=region, refreshed_at=datetime.now(UTC), prices=prices)
    stage.objects.put(prices_key(region), table.model_dump_json(indent=1).encode())
    changed = [each.instance_type for each in reading.prices if each.usd_per_hour != _was(each.instance_type, before)]
    return Refreshed(region, reading, tuple(changed))


def _was(name: str, before: dict[str, Any]) -> Any:
    return priced(CATALOG[name], before).price_usd_per_hour
