"""AWS's price list: answers in the API's own shape, by pages, with rows that say too little or too much."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from hypothesis import given
from hypothesis import strategies as st

from microtuning_core.aws.price_list import PriceList
from microtuning_core.domain.catalog import CATALOG, find
from microtuning_core.domain.errors import MicrotuningError
from microtuning_core.domain.layout import prices_key
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.planning import ModelShape, PlanRequest, candidates
from microtuning_core.domain.prices import SOURCE, ListedPrice, PriceTable, is_stale, priced, read_products
from microtuning_core.usecases.plan import newest_prices
from microtuning_sdk import cli
from microtuning_sdk._prices import price_rows, refresh
from microtuning_sdk.cli import _prices
from tests.unit.test_usecase_races import Objects

EAST = "us-east-1"


def product(usage: str = "USE1-Train:ml.m5.large", usd: str = "0.1150000000", **changes: Any) -> dict[str, Any]:
    """One product as GetProducts answers it (FormatVersion aws_v1), with what nobody here asks for left in."""
    sku = "JMCWJEAPVJNFJ5P4"
    dimension = {
        "unit": changes.get("unit", "Hrs"), "endRange": "Inf", "beginRange": "0", "appliesTo": [],
        "description": f"${usd} for {usage} per hour", "rateCode": f"{sku}.JRTCKXETXF.6YS6EN2CT7",
        "pricePerUnit": changes.get("per_unit", {"USD": usd}),
    }  # fmt: skip
    dimensions = changes.get("dimensions", {f"{sku}.JRTCKXETXF.6YS6EN2CT7": dimension})
    term = {
        "priceDimensions": dimensions, "sku": sku, "effectiveDate": changes.get("since", "2026-11-01T00:00:00Z"),
        "offerTermCode": "JRTCKXETXF", "termAttributes": {},
    }  # fmt: skip
    attributes = {
        "regionCode": changes.get("region", EAST), "servicecode": "AmazonSageMaker", "component": "Training",
        "instanceName": "ml.m5.large", "instanceType": "ml.m5.large-Training", "locationType": "AWS Region",
        "location": "US East (N. Virginia)", "operation": "RunInstance", "usagetype": usage, "vCpu": "2",
        "platoinstancename": "M5", "platoinstancetype": "ml.m5.large", "servicename": "Amazon SageMaker",
    }  # fmt: skip
    terms = changes.get("terms", {"OnDemand": {f"{sku}.JRTCKXETXF": term}})
    inner = {"productFamily": "ML Instance", "attributes": attributes, "sku": sku}
    return {"product": inner, "serviceCode": "AmazonSageMaker", "terms": terms, "version": "20261101000000",
            "publicationDate": "2026-11-02T10:11:12Z"}  # fmt: skip


def texts(*products: dict[str, Any]) -> list[str]:
    return [json.dumps(each) for each in products]


# ------------------------------------------------------------------------------------------------------------ reading


def test_a_row_gives_the_price_its_region_its_source_and_the_day_it_holds_from():
    reading = read_products(texts(product()), EAST)
    (price,) = reading.prices
    assert (price.instance_type, price.usd_per_hour) == ("ml.m5.large", Decimal("0.115"))
    assert (price.region, price.source, price.as_of) == (EAST, SOURCE, date(2026, 11, 1))
    assert reading.refused == ()
    assert set(reading.missing) == CATALOG.keys() - {"ml.m5.large"}


@pytest.mark.parametrize("usage", ["Train:ml.m5.large", "EUC1-Train:ml.m5.large", "EU-Train:ml.m5.large"])
def test_usage_types_of_every_region_are_understood(usage):
    assert len(read_products(texts(product(usage)), EAST).prices) == 1


@pytest.mark.parametrize(
    "usage",
    [
        "USE1-Host:ml.m5.large",
        "USE1-TrainWarmPool:ml.m5.large",
        "USE1-Train:ml.c6i.xlarge",
        "USE1-Train:VolumeUsage.gp2",
    ],
)
def test_other_products_and_types_that_nobody_offers_are_passed_over(usage):
    reading = read_products(texts(product(usage)), EAST)
    assert (reading.prices, reading.refused) == ((), ())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"region": "eu-west-1"}, "is of region eu-west-1, not us-east-1"),
        ({"unit": "Quantity"}, "is priced by Quantity, not by the hour"),
        ({"per_unit": {"CNY": "0.80"}}, "has the price None in USD"),
        ({"usd": "0.0000000000"}, "has the price '0.0000000000' in USD"),
        ({"usd": "-0.1"}, "has the price '-0.1' in USD"),
        ({"usd": "NaN"}, "has the price 'NaN' in USD"),
        ({"usd": "free"}, "has the price 'free'"),
        ({"usd": "11.5"}, "look at it by hand"),
        ({"usd": "0.0001"}, "look at it by hand"),
        ({"terms": {}}, "has no terms.OnDemand"),
        ({"terms": {"Reserved": {}}}, "has no terms.OnDemand"),
        ({"terms": {"OnDemand": {}}}, "has 0 on-demand terms, not one"),
        ({"dimensions": {}}, "has 0 prices, not one"),
        ({"dimensions": {"a": {}, "b": {}}}, "has 2 prices, not one"),
        ({"dimensions": {"a": "0.115"}}, "has prices that are no object"),
        ({"since": "soon"}, "holds from 'soon' on, which is no day"),
    ],
)
def test_a_row_that_does_not_say_one_price_an_hour_is_refused_by_name(changes, why):
    usd = changes.pop("usd", "0.115")
    reading = read_products(texts(product(usd=usd, **changes), product("USE1-Train:ml.g5.xlarge", "1.408")), EAST)
    assert [(each.what, why in each.why) for each in reading.refused] == [("ml.m5.large", True)], reading.refused
    assert [each.instance_type for each in reading.prices] == ["ml.g5.xlarge"]
    assert "ml.m5.large" not in reading.missing


def test_a_type_with_two_prices_has_none_and_one_that_is_there_twice_has_its_own():
    two = read_products(texts(product(), product(usd="0.12")), EAST)
    assert [each.why for each in two.refused] == ["is there with several prices: 0.115, 0.12"]
    assert two.prices == ()
    assert len(read_products(texts(product(), product(usd="0.11500")), EAST).prices) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"ml.m5.large"', "{}", '{"product": []}'])
def test_what_is_no_product_is_refused_by_its_number(text):
    reading = read_products([*texts(product()), text], EAST)
    assert [each.what for each in reading.refused] == ["row 2"]
    assert len(reading.prices) == 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["product", "terms"]), ANYTHING)
def test_no_strange_row_crashes(field, value):
    reading = read_products([json.dumps(product() | {field: value})], EAST)
    assert len(reading.prices) == 0


# ------------------------------------------------------------------------------------------------------- the service


def listing(*pages: list[str]) -> PriceList:
    """The client of a price list that gives these pages; the calls must be the ones that AWS documents."""
    session = boto3.Session(aws_access_key_id="x", aws_secret_access_key="x")
    found = PriceList(session)
    stub = Stubber(found._pricing)
    asked: dict[str, Any] = {
        "ServiceCode": "AmazonSageMaker", "FormatVersion": "aws_v1",
        "Filters": [
            {"Type": "TERM_MATCH", "Field": "regionCode", "Value": EAST},
            {"Type": "TERM_MATCH", "Field": "component", "Value": "Training"},
        ],
    }  # fmt: skip
    for number, page in enumerate(pages):
        token = {"NextToken": f"page-{number}"} if number else {}
        more = {"NextToken": f"page-{number + 1}"} if number + 1 < len(pages) else {}
        stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": page, **more}, asked | token)
    stub.activate()
    return found


def stage() -> Any:
    return SimpleNamespace(names=StackNames("prod", "123456789012", EAST), objects=Objects())


def test_every_page_is_read_and_the_endpoint_is_one_that_exists():
    prices = listing(texts(product()), [], texts(product("USE1-Train:ml.g5.xlarge", "1.5")))
    assert len(prices.training_machines(EAST)) == 2
    assert prices._pricing.meta.region_name == "us-east-1"


def test_a_refreshed_price_is_stored_and_used_and_its_change_is_told():
    ours = stage()
    found = refresh(ours, None, listing(texts(product(usd="0.12"), product("USE1-Train:ml.g5.xlarge", "1.408"))))
    assert (found.changed, found.region) == (("ml.m5.large",), EAST)
    assert json.loads(ours.objects.bodies[prices_key(EAST)])["prices"][1]["usd_per_hour"] == "0.12"
    newest = newest_prices(ours.objects, EAST)
    request = PlanRequest(
        model=ModelShape(parameters=1000, layers=1, hidden_size=8, vocabulary=10, bytes_per_weight=4),
        instance="ml.m5.large", prices=newest,
    )  # fmt: skip
    plan = candidates(request)[0]
    assert (plan.price_usd_per_hour, plan.price_source, plan.price_as_of) == (
        Decimal("0.12"),
        SOURCE,
        date(2026, 11, 1),
    )


def test_what_a_later_list_refuses_or_lacks_keeps_the_price_it_had():
    ours = stage()
    refresh(ours, None, listing(texts(product(usd="0.12"))))
    found = refresh(ours, None, listing(texts(product(unit="Days"), product("USE1-Train:ml.g5.xlarge", "1.5"))))
    assert [each.what for each in found.reading.refused] == ["ml.m5.large"]
    assert newest_prices(ours.objects, EAST)["ml.m5.large"].usd_per_hour == Decimal("0.12")


def test_a_region_without_any_price_changes_nothing_and_is_an_error():
    ours = stage()
    with pytest.raises(MicrotuningError, match="has no price of a type in the catalog"):
        refresh(ours, EAST, listing([]))
    assert ours.objects.bodies == {}


# ------------------------------------------------------------------------------------------------------ age and order


def test_a_price_is_stale_half_a_year_on():
    day = date(2026, 9, 1)
    assert not is_stale(day, day + timedelta(days=180))
    assert is_stale(day, day + timedelta(days=181))


def test_a_dearer_machine_is_chosen_later_once_the_list_says_so():
    dear = ListedPrice(
        instance_type="ml.g6.xlarge", usd_per_hour=Decimal("9"), region=EAST, source="x", as_of=date(2026, 11, 1)
    )
    shape = ModelShape(parameters=10**9, layers=24, hidden_size=2048, vocabulary=32_000, bytes_per_weight=2)
    request = PlanRequest(model=shape, adapter="lora", dtype="bfloat16", spot=False)
    before = [plan.instance_type for plan in candidates(request)]
    after = [plan.instance_type for plan in candidates(request.model_copy(update={"prices": {"ml.g6.xlarge": dear}}))]
    assert before[0] == "ml.g6.xlarge"
    assert after[0] != "ml.g6.xlarge"


def test_a_table_keeps_its_prices_exactly():
    listed = ListedPrice(instance_type="ml.m5.large", usd_per_hour=Decimal("0.1150001"), region=EAST, source="x",
                         as_of=date(2026, 11, 1))  # fmt: skip
    table = PriceTable(region=EAST, refreshed_at=datetime(2026, 12, 1, tzinfo=UTC), prices=(listed,))
    again = PriceTable.model_validate_json(table.model_dump_json())
    assert again.row_of(find("ml.m5.large")).price_usd_per_hour == Decimal("0.1150001")
    assert priced(find("ml.g5.xlarge"), {}) == find("ml.g5.xlarge")


# ---------------------------------------------------------------------------------------------------------------- CLI


def test_prices_list_marks_the_old_ones(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ours = stage()
    refresh(ours, None, listing(texts(product(usd="0.12", since="2020-01-01T00:00:00Z"))))
    rows = {row["instance_type"]: row for row in price_rows(ours, date(2026, 12, 1))}
    assert (rows["ml.m5.large"]["stale"], rows["ml.g5.xlarge"]["stale"]) == (True, False)
    monkeypatch.setattr(_prices, "connect", lambda _: ours)
    assert cli.main(["prices", "list"]) == 0
    text = capsys.readouterr().out
    assert next(line for line in text.splitlines() if line.startswith("ml.m5.large ")).split()[4] == "stale"
    assert cli.main(["prices", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["prices"]) == len(CATALOG)


def test_prices_refresh_says_what_it_took_and_what_not(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ours = stage()
    prices = listing(texts(product(usd="0.12"), product("USE1-Train:ml.g5.xlarge", "1.408", unit="Days")))
    monkeypatch.setattr(_prices, "connect", lambda _: ours)
    monkeypatch.setattr(_prices, "refresh", lambda where, region: refresh(where, region, prices))
    assert cli.main(["prices", "refresh"]) == 0
    text = capsys.readouterr().out
    assert "1 prices of us-east-1; changed: ml.m5.large" in text
    assert "! ml.g5.xlarge is priced by Days, not by the hour" in text
    assert "! not in the list of us-east-1, and priced as before: ml.m5.xlarge" in text


def test_a_region_that_is_none_is_a_mistake_in_the_request(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["prices", "refresh", "--region", "Frankfurt"])
    assert ended.value.code == 2
