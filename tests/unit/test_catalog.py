"""The catalog: every row can be launched, priced and traced to a source."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import botocore.loaders
import pytest

from microtuning_core.domain.catalog import CATALOG, find, instances_page
from microtuning_core.domain.errors import InvalidName

DOCS = Path(__file__).parents[2] / "docs"


def test_every_type_is_one_that_sagemaker_training_accepts():
    shapes = botocore.loaders.Loader().load_service_model("sagemaker", "service-2")["shapes"]
    assert set(CATALOG) <= set(shapes["TrainingInstanceType"]["enum"])


@pytest.mark.parametrize("row", CATALOG.values(), ids=lambda row: row.instance_type)
def test_every_type_has_a_price_a_source_and_a_date(row):
    assert Decimal("0.05") < row.price_usd_per_hour < 100
    assert row.price_region == "us-east-1"
    assert len(row.price_source) > 10
    assert date(2026, 1, 1) <= row.price_as_of <= date(2026, 12, 31)


@pytest.mark.parametrize("row", CATALOG.values(), ids=lambda row: row.instance_type)
def test_gpu_fields_agree_with_each_other(row):
    assert (row.gpus > 0) == (row.gpu_memory_gib > 0) == (row.gpu_family is not None)
    assert row.gpus or not row.bf16


def test_the_prices_of_the_june_2025_cut_are_the_new_ones():
    assert find("ml.p4d.24xlarge").price_usd_per_hour == Decimal("25.251286")  # was 37.688
    assert find("ml.p5.48xlarge").price_usd_per_hour == Decimal("63.296")  # was 113.068


def test_within_a_family_more_memory_costs_more():
    families: dict[str, list[tuple[int, Decimal]]] = {}
    for row in CATALOG.values():
        families.setdefault(row.instance_type.split(".")[1], []).append((row.memory_gib, row.price_usd_per_hour))
    for rows in families.values():
        assert sorted(rows) == sorted(rows, key=lambda pair: pair[1])


def test_m5_large_is_a_cpu_type_with_8_gib_on_an_ebs_volume():
    row = find("ml.m5.large")
    assert (row.vcpus, row.memory_gib, row.gpus, row.bf16, row.local_storage_gb) == (2, 8, 0, False, 0)
    assert row.price_usd_per_hour == Decimal("0.115")
    assert row.memory_for_training_gib == 8


def test_g5_xlarge_trains_in_the_24_gib_of_its_gpu_and_has_250_gb_of_nvme():
    row = find("ml.g5.xlarge")
    assert (row.gpus, row.memory_for_training_gib, row.bf16, row.local_storage_gb) == (1, 24, True, 250)


def test_a_t4_has_no_bf16():
    assert not find("ml.g4dn.xlarge").bf16


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("ml.g5.xlrge", "ml.g5.xlarge"), ("g6.2xlarge", "ml.g6.2xlarge"), ("ml.c5.large", "ml.c5.xlarge")],
)
def test_an_unknown_type_names_its_nearest_matches(wrong, near):
    with pytest.raises(InvalidName, match=near.replace(".", r"\.")):
        find(wrong)


def test_a_type_like_nothing_still_gets_an_example():
    with pytest.raises(InvalidName, match=r"ml\.m5\.large"):
        find("")


def test_the_page_about_instances_is_up_to_date():
    assert (DOCS / "instances.md").read_text() == instances_page()
