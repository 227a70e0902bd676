"""AWS's Price List API: what SageMaker's training machines cost. It has endpoints in few regions and prices of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from microtuning_core.domain.prices import COMPONENT, SERVICE

if TYPE_CHECKING:
    import boto3

_ENDPOINT_REGION = "us-east-1"


class PriceList:
    def __init__(self, session: boto3.Session) -> None:
        self._pricing: Any = session.client("pricing", region_name=_ENDPOINT_REGION)

    def training_machines(self, region: str) -> list[str]:
        """Every product of the region, each as the JSON text the service gives."""
        matches = {"regionCode": region, "component": COMPONENT}
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in matches.items()]
        pages = self._pricing.get_paginator("get_products").paginate(
            ServiceCode=SERVICE, Filters=filters, FormatVersion="aws_v1"
        )
        return [text for page in pages for text in page["PriceList"]]
