"""The instance types a run may use: what they hold, what an hour costs, and who says so.

One row:  ml.g5.xlarge: 4 vCPUs, 16 GiB, one A10G of 24 GiB with bf16, 250 GB of local NVMe, 1.408 USD an hour.

The planner reads it to find the cheapest type that fits, the ledger to price seconds, the launcher to know whether a
volume key may be sent (only where local_storage_gb is 0: NVMe types encrypt in hardware and refuse the field).

To add a type: it must be in SageMaker's TrainingInstanceType enum, and its hourly price must have a source and a date;
a type whose price nobody could confirm stays out (today: c6i, c7i, g6e, g7e, trn1, trn2, p5e, p6). Then write
docs/instances.md anew (its last lines say how).

Sizes are those of the EC2 pages of the same type without "ml."; GPU memory is the nominal one of each GPU, of which a
program sees a little less (planning keeps a reserve).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from difflib import get_close_matches

from microtuning_core.domain.errors import InvalidName


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One row. `price_usd_per_hour` is the on-demand list price of one instance; spot has no list price."""

    instance_type: str
    vcpus: int
    memory_gib: int
    gpus: int
    gpu_memory_gib: int  # of each GPU; 0 without one
    gpu_family: str | None
    bf16: bool  # computed in hardware; T4 and these CPUs would emulate it slowly
    local_storage_gb: int  # NVMe; 0 = EBS volume only
    price_usd_per_hour: Decimal
    price_region: str
    price_source: str
    price_as_of: date  # the day the source says its prices hold from, else the day it was read

    @property
    def memory_for_training_gib(self) -> int:
        """The memory a single worker trains in: one GPU's, or the host's when there is no GPU."""
        return self.gpu_memory_gib if self.gpus else self.memory_gib


@dataclass(frozen=True, slots=True)
class _Price:
    source: str
    as_of: date
    region: str = "us-east-1"


# us-east-1 and us-west-2 list the same prices for these types as far as both could be compared.
_PRICE_LIST = _Price("AWS Price List API, AmazonSageMaker, us-west-2 list", date(2026, 9, 1))
_EAST_TABLES = _Price(
    "two public us-east-1 tables; agrees with the rounded AWS price list of 2026-09-01", date(2026, 9, 1)
)
_TWO_TABLES = _Price("two public tables of the AWS pricing page; EC2 list price x 1.25 or 1.20", date(2026, 11, 30))
_LAUNCH_SCRIPT = _Price("a public us-east-1 launch script; EC2 list price x 1.15", date(2026, 11, 30))


def _cpu(name: str, vcpus: int, memory_gib: int, usd: str, price: _Price) -> InstanceType:
    return InstanceType(
        name, vcpus, memory_gib, 0, 0, None, False, 0, Decimal(usd), price.region, price.source, price.as_of
    )


def _gpu(
    name: str, vcpus: int, memory_gib: int, gpus: int, family: str, local_storage_gb: int, usd: str, price: _Price
) -> InstanceType:
    gpu_memory_gib, bf16 = _GPU_FAMILIES[family]
    return InstanceType(
        name,
        vcpus,
        memory_gib,
        gpus,
        gpu_memory_gib,
        family,
        bf16,
        local_storage_gb,
        Decimal(usd),
        price.region,
        price.source,
        price.as_of,
    )


# family: (GiB of one GPU, bf16 in hardware). bf16 begins with NVIDIA's Ampere generation; T4 is Turing.
_GPU_FAMILIES = {
    "T4": (16, False),
    "A10G": (24, True),
    "L4": (24, True),
    "A100-40GB": (40, True),
    "A100-80GB": (80, True),
    "H100": (80, True),
}

_ROWS = (
    _cpu("ml.m5.large", 2, 8, "0.115", _PRICE_LIST),
    _cpu("ml.m5.xlarge", 4, 16, "0.230", _PRICE_LIST),
    _cpu("ml.m5.2xlarge", 8, 32, "0.461", _TWO_TABLES),
    _cpu("ml.c5.xlarge", 4, 8, "0.204", _PRICE_LIST),
    _cpu("ml.c5.2xlarge", 8, 16, "0.408", _TWO_TABLES),
    _gpu("ml.g4dn.xlarge", 4, 16, 1, "T4", 125, "0.7364", _PRICE_LIST),
    _gpu("ml.g4dn.2xlarge", 8, 32, 1, "T4", 225, "0.94", _TWO_TABLES),
    _gpu("ml.g4dn.12xlarge", 48, 192, 4, "T4", 900, "4.89", _TWO_TABLES),
    _gpu("ml.g5.xlarge", 4, 16, 1, "A10G", 250, "1.408", _EAST_TABLES),
    _gpu("ml.g5.2xlarge", 8, 32, 1, "A10G", 450, "1.515", _EAST_TABLES),
    _gpu("ml.g5.12xlarge", 48, 192, 4, "A10G", 3800, "7.09", _PRICE_LIST),
    _gpu("ml.g5.48xlarge", 192, 768, 8, "A10G", 7600, "20.36", _PRICE_LIST),
    _gpu("ml.g6.xlarge", 4, 16, 1, "L4", 250, "1.127", _PRICE_LIST),
    _gpu("ml.g6.2xlarge", 8, 32, 1, "L4", 450, "1.222", _PRICE_LIST),
    _gpu("ml.g6.12xlarge", 48, 192, 4, "L4", 3760, "5.752", _PRICE_LIST),
    _gpu("ml.g6.48xlarge", 192, 768, 8, "L4", 7520, "16.688", _PRICE_LIST),
    _gpu("ml.p4d.24xlarge", 96, 1152, 8, "A100-40GB", 8000, "25.251286", _PRICE_LIST),
    _gpu("ml.p4de.24xlarge", 96, 1152, 8, "A100-80GB", 8000, "31.564", _LAUNCH_SCRIPT),
    _gpu("ml.p5.48xlarge", 192, 2048, 8, "H100", 30720, "63.296", _PRICE_LIST),
)

CATALOG: dict[str, InstanceType] = {row.instance_type: row for row in _ROWS}


def find(name: str) -> InstanceType:
    """The row of `name`.

    Raises:
        InvalidName: no such row; the message names the nearest ones.
    """
    row = CATALOG.get(name)
    if row is None:
        raise InvalidName("training instance type", name, f"a row of docs/instances.md, such as {_near(name)}")
    return row


def _near(name: str) -> str:
    wanted = name if name.startswith("ml.") else f"ml.{name}"
    close = get_close_matches(wanted, CATALOG, n=3, cutoff=0.6)
    return " or ".join(close or ["ml.m5.large", "ml.g5.xlarge"])


def instances_page() -> str:
    """docs/instances.md: the catalog as a table, cheapest first."""
    rows = "\n".join(_table_row(row) for row in sorted(_ROWS, key=lambda row: row.price_usd_per_hour))
    return f"{_PAGE_HEAD}{rows}\n{_PAGE_TAIL}"


def _table_row(row: InstanceType) -> str:
    gpus = f"{row.gpus} x {row.gpu_family}, {row.gpu_memory_gib} GiB" if row.gpus else "none"
    cells = (
        row.instance_type,
        row.vcpus,
        row.memory_gib,
        gpus,
        "yes" if row.bf16 else "no",
        row.local_storage_gb or "EBS only",
        row.price_usd_per_hour,
        row.price_source,
        row.price_as_of,
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


_PAGE_HEAD = """# Instance types

The types a run may use, cheapest first. Prices are on-demand list prices for training in us-east-1, in USD an hour for
one instance. Spot has no list price: what it saved is known when the job ends (`BillableTimeInSeconds`), and until then
the on-demand price is the upper bound. A type whose price has no confirmed source is not offered.

| type | vCPUs | memory GiB | GPUs | bf16 | local NVMe GB | USD an hour | source | as of |
|---|---|---|---|---|---|---|---|---|
"""

_PAGE_TAIL = """
Written by

    python -c "import microtuning_core.domain.catalog as c; print(c.instances_page(), end='')" > docs/instances.md
"""
