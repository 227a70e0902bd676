"""A run and its parts, as the tests of pure rules begin with: each test changes what it is about."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from microtuning_core.domain.run import AttemptPlan
from microtuning_core.domain.spec import RunSpec
from microtuning_core.domain.spec_checks import parse_spec

RUN_ID = "acme-sort-0a1b2c3d4e5f"


def a_spec(**changes: Any) -> RunSpec:
    """A supervised run of the preset."""
    described = {
        "name": "sort",
        "tenant": "acme",
        "model": {"arch": "Transformer"},
        "algorithm": {"type": "sft"},
        "data": {"train": "s3://bucket/tenants/acme/datasets/x.jsonl"},
    }
    return parse_spec(described | changes)


def a_plan(**changes: Any) -> AttemptPlan:
    """One GPU machine, on demand."""
    facts = {
        "instance_type": "ml.g5.xlarge",
        "count": 1,
        "spot": False,
        "micro_batch_size": 8,
        "max_runtime_s": 3600,
        "price_usd_per_hour": Decimal("1.408"),
    }
    return AttemptPlan(**(facts | changes))


def a_cpu_plan(**changes: Any) -> AttemptPlan:
    """The cheapest machine, on demand."""
    facts = {"instance_type": "ml.m5.large", "micro_batch_size": None, "price_usd_per_hour": Decimal("0.115")}
    return a_plan(**(facts | changes))
