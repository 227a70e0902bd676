"""Who may use a stage, and how much of it: what infrastructure/stages/<stage>.yaml declares.

    max_running_runs: 20            of the stage
    isolation: roles                a role a tenant, or one role for all and session tags (`session-tags`)
    tenants:
      acme: {max_running_runs: 8, gpus: {A10G: 8}, max_waiting_runs: 50, weight: 2, budget_usd_per_day: 200, own_key: true}
    others: {max_running_runs: 1}   whoever is not declared; without it they are refused

A limit may be changed while the stage runs (`microtuning tenants limit`); the change lies in the tenants table and holds
until it is taken back. Roles and keys follow the declaration alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.errors import InvalidStage, Problem, UnknownTenant
from microtuning_core.domain.fields import as_value_error
from microtuning_core.domain.names import check_tenant, parse_run_id
from microtuning_core.domain.quota import Holding, Limits
from microtuning_core.domain.record import Record, UsdAmount, UtcTime, Value
from microtuning_core.domain.spec_checks import with_lines

GPU_FAMILIES = tuple(dict.fromkeys(row.gpu_family for row in CATALOG.values() if row.gpu_family))
MOST_RUNS = 1000
DEFAULT_TENANT = "default"
# Two roles take 11 kB of the template, which may have 1 MB with the 180 kB of all the rest (measured with 40 tenants).
MOST_ROLES = 60


def _known_family(family: str) -> str:
    if family not in GPU_FAMILIES:
        raise ValueError(f"is one of {', '.join(GPU_FAMILIES)}")
    return family


TenantName = Annotated[str, as_value_error(check_tenant)]
GpuFamily = Annotated[str, AfterValidator(_known_family)]
Runs = Annotated[int, Field(ge=0, le=MOST_RUNS)]
Usd = Annotated[UsdAmount, Field(ge=0, le=Decimal(10_000_000), decimal_places=4)]
Principal = Annotated[str, Field(pattern=r"^arn:aws[\w-]*:iam::\d{12}:(root|role/[\w+=,.@/-]+|user/[\w+=,.@/-]+)$")]


class TenantLimits(Value):
    """How much at a time; None = no limit of its own.

    gpus: GPUs by family (docs/instances.md); a family that is not named has no limit.
    max_waiting_runs: runs in the queue; a submit beyond it is refused.
    weight: its share of the slots where several want them, against the weights of the others.
    """

    max_running_runs: Runs | None = None
    gpus: dict[GpuFamily, Annotated[int, Field(ge=0, le=100_000)]] = Field(default_factory=dict)
    max_waiting_runs: Runs | None = None
    weight: int = Field(1, ge=1, le=1000)
    budget_usd_per_day: Usd | None = None
    budget_usd_per_month: Usd | None = None


class Tenant(TenantLimits):
    """A declared tenant.

    own_key: a KMS key for its models and the volumes of its machines.
    assumed_by: the principals that may take its user role; none = whom IAM of the account lets assume it.
    """

    own_key: bool = False
    assumed_by: tuple[Principal, ...] = ()


def _some_tenant(tenants: dict[str, Tenant]) -> dict[str, Tenant]:
    if not tenants:
        raise ValueError("declares one tenant at least")
    return tenants


class StageTenants(Value):
    """What a stage's configuration declares. Without one: a tenant `default`, and nobody else."""

    max_running_runs: int = Field(20, ge=1, le=MOST_RUNS)
    isolation: Literal["roles", "session-tags"] = "roles"
    tenants: Annotated[dict[TenantName, Tenant], AfterValidator(_some_tenant)] = Field(
        default_factory=lambda: {DEFAULT_TENANT: Tenant()}
    )
    others: TenantLimits | None = None

    @model_validator(mode="after")
    def _roles_have_room(self) -> Self:
        if not self.by_tags and len(self.tenants) > MOST_ROLES:
            raise ValueError(
                f"tenants has {len(self.tenants)} and a template takes {MOST_ROLES}: use isolation: session-tags"
            )
        return self

    @model_validator(mode="after")
    def _keys_need_roles(self) -> Self:
        if self.by_tags and self.have_own_key:
            raise ValueError(
                f"tenants.{self.have_own_key[0]}.own_key needs isolation: roles, one role may use all keys"
            )
        return self

    @property
    def by_tags(self) -> bool:
        return self.isolation == "session-tags"

    @property
    def have_own_key(self) -> tuple[str, ...]:
        return tuple(name for name, each in self.tenants.items() if each.own_key)

    def check(self, tenant: str) -> None:
        """UnknownTenant where the stage does not serve it."""
        if tenant not in self.tenants and self.others is None:
            raise UnknownTenant(tenant, tuple(self.tenants))

    def role_of(self, tenant: str) -> str | None:
        """Whose job role its jobs run on: its own, or None for the one that is shared."""
        self.check(tenant)
        return tenant if tenant in self.tenants and not self.by_tags else None

    def declared_limits(self, tenant: str) -> TenantLimits:
        """Of a tenant that is declared no more: nothing new starts, and what runs goes on to its end."""
        return self.tenants.get(tenant) or self.others or TenantLimits(max_running_runs=0, max_waiting_runs=0)

    def limits_of(self, tenant: str, changes: Mapping[str, TenantLimits]) -> TenantLimits:
        """What holds now: as declared, but for what was changed since."""
        declared = self.declared_limits(tenant)
        return with_change(declared, changes[tenant]) if tenant in changes else declared

    def quota(self, total: int, changes: Mapping[str, TenantLimits]) -> Limits:
        """The same as `grant` wants it, for every tenant that is declared or changed."""
        named = [name for name in {**self.tenants, **changes} if name in self.tenants or self.others is not None]
        limits = {name: self.limits_of(name, changes) for name in named}
        others = self.others or TenantLimits(max_running_runs=0)
        return Limits(
            total=total,
            per_tenant_default=others.max_running_runs,
            per_tenant={name: _or(each.max_running_runs, total) for name, each in limits.items()},
            weights={name: each.weight for name, each in limits.items()},
            weight_default=others.weight,
            gpus={name: each.gpus for name, each in limits.items()},
            gpus_default=others.gpus,
        )


class Standing(Record):
    """Where a tenant stood at a moment: what runs, what waits and in which place, and what it may have."""

    tenant: str
    at: UtcTime
    running: int
    places: dict[str, int]  # run_id -> place in the stage's queue, 1 is next
    limits: TenantLimits


def standing(
    tenant: str, at: datetime, limits: TenantLimits, held: Mapping[str, Holding], places: Mapping[str, int]
) -> Standing:
    running = sum(each.tenant == tenant for each in held.values())
    own = {run_id: place for run_id, place in places.items() if parse_run_id(run_id).tenant == tenant}
    return Standing(tenant=tenant, at=at, running=running, places=own, limits=limits)


def serving_anyone() -> StageTenants:
    """Any tenant, without limits of their own."""
    return StageTenants(others=TenantLimits())


def parse_stage(document: Any, lines: Mapping[str, int], file: str) -> StageTenants:
    """What a configuration file declares, or InvalidStage with every problem by field and line."""
    if not isinstance(document, Mapping):
        raise InvalidStage(file, [Problem("stage", "is a mapping of fields to values", lines.get(""))])
    try:
        return StageTenants.model_validate(document)
    except ValidationError as error:
        problems = [Problem(_path(each["loc"]), _words(each["type"], each["msg"])) for each in error.errors()]
    raise InvalidStage(file, with_lines(problems, lines))


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part != "[key]")


def _words(kind: str, message: str) -> str:
    return "is no field here" if kind == "extra_forbidden" else message.removeprefix("Value error, ").rstrip(".")


def _or(limit: int | None, otherwise: int) -> int:
    return otherwise if limit is None else limit


def with_change(limits: TenantLimits, change: TenantLimits) -> TenantLimits:
    """`limits`, but for the fields that `change` sets."""
    return limits.model_copy(update={name: getattr(change, name) for name in change.model_fields_set})


def merged(earlier: TenantLimits | None, change: TenantLimits) -> TenantLimits:
    """Both changes as one; where both set a field the later one counts."""
    fields: dict[str, Any] = earlier.model_dump(exclude_unset=True) if earlier else {}
    return TenantLimits(**(fields | change.model_dump(exclude_unset=True)))


def stage_module(tenants: StageTenants) -> str:
    """The text of functions/_stage.py as it is deployed: the code travels with its stage's tenants."""
    declared = tenants.model_dump_json(exclude_defaults=True)
    return f'"""The tenants of this stage, as they were deployed."""\n\nTENANTS = {declared!r}\n'
