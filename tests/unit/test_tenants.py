"""What a stage's configuration may say of its tenants, and what follows from it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from infrastructure.stages import stage_tenants
from microtuning_core.domain.errors import InvalidStage, UnknownTenant
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.quota import Holding
from microtuning_core.domain.tenants import (
    MOST_ROLES,
    StageTenants,
    Tenant,
    TenantLimits,
    merged,
    parse_stage,
    serving_anyone,
    stage_module,
    standing,
    with_change,
)
from microtuning_core.spec_files import read_spec_text
from microtuning_core.usecases.services import StageSettings

ROOT = Path(__file__).parents[2]
NAMES = StackNames("dev", "123456789012", "us-east-1")
TWO = StageTenants(
    tenants={"acme": Tenant(own_key=True, gpus={"A10G": 4}, weight=3), "beta": Tenant(max_running_runs=2)}
)


def problems_of(text: str) -> list[tuple[str, int | None]]:
    with pytest.raises(InvalidStage) as refused:
        parse_stage(*read_spec_text(text), "infrastructure/stages/dev.yaml")
    assert "infrastructure/stages/dev.yaml is not valid" in str(refused.value)
    return [(each.field, each.line) for each in refused.value.problems]


@pytest.mark.parametrize("stage", ["local", "dev", "prod"])
def test_every_configuration_that_is_here_can_be_deployed(stage: str):
    declared = stage_tenants(stage, ROOT)
    assert "default" in declared.tenants  # what fit() uses where nobody names a tenant
    assert (declared.others is not None) == (stage == "local")


def test_a_stage_without_a_configuration_has_the_default_tenant_and_nobody_else():
    declared = stage_tenants("qa", ROOT)
    declared.check("default")
    with pytest.raises(UnknownTenant, match=r"This stage has no tenant .acme., it has default"):
        declared.check("acme")


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("max_runing_runs: 3", [("max_runing_runs", 1)]),
        ("tenants:\n  acme:\n    wieght: 2", [("tenants.acme.wieght", 3)]),
        ("tenants:\n  Acme: {}", [("tenants.Acme", 2)]),
        ("tenants:\n  acme-2: {}", [("tenants.acme-2", 2)]),
        ("tenants: {}", [("tenants", 1)]),
        ("tenants:\n  acme:\n    gpus: {A10: 1}", [("tenants.acme.gpus.A10", 3)]),
        ("tenants:\n  acme:\n    gpus: {A10G: -1}", [("tenants.acme.gpus.A10G", 3)]),
        ("max_running_runs: 0", [("max_running_runs", 1)]),
        ("tenants:\n  acme: {budget_usd_per_day: -1}", [("tenants.acme.budget_usd_per_day", 2)]),
        ("tenants:\n  acme: {budget_usd_per_month: 1.00001}", [("tenants.acme.budget_usd_per_month", 2)]),
        ("tenants:\n  acme: {assumed_by: ['*']}", [("tenants.acme.assumed_by.0", 2)]),
        ("isolation: none", [("isolation", 1)]),
        ("[1]", [("stage", 1)]),
    ],
)
def test_what_cannot_be_is_refused_by_field_and_line(text: str, problems: list[tuple[str, int]]):
    assert problems_of(text) == problems


def test_a_file_that_is_no_yaml_is_refused_with_its_name_and_line(tmp_path: Path):
    (tmp_path / "infrastructure/stages").mkdir(parents=True)
    (tmp_path / "infrastructure/stages/dev.yaml").write_text("tenants:\n\t- a\n")
    with pytest.raises(InvalidStage, match=r"infrastructure/stages/dev\.yaml is not valid: .*line 2"):
        stage_tenants("dev", tmp_path)


def test_keys_of_tenants_need_roles_of_tenants():
    with pytest.raises(InvalidStage, match="own_key needs isolation: roles"):
        parse_stage({"isolation": "session-tags", "tenants": {"acme": {"own_key": True}}}, {}, "f")


def test_more_tenants_than_a_template_takes_need_session_tags():
    many = {"tenants": {f"team{number}": {} for number in range(MOST_ROLES + 1)}}
    with pytest.raises(InvalidStage, match=r"tenants has 61 and a template takes 60: use isolation: session-tags"):
        parse_stage(many, {}, "f")
    assert len(parse_stage(many | {"isolation": "session-tags"}, {}, "f").tenants) == 61


def test_whose_role_and_key_a_job_uses():
    settings = StageSettings(NAMES, "image:1", 20, "stage-key", TWO)
    assert settings.job_role_arn("acme") == "arn:aws:iam::123456789012:role/microtuning-dev-job-acme"
    assert settings.key_arn("acme") == "arn:aws:kms:us-east-1:123456789012:alias/microtuning-dev-acme"
    assert settings.key_arn("beta") == "stage-key"
    with pytest.raises(UnknownTenant):
        settings.job_role_arn("coda")
    anyone = StageSettings(NAMES, "image:1", 20, tenants=serving_anyone())
    assert anyone.job_role_arn("coda") == "arn:aws:iam::123456789012:role/microtuning-dev-job"
    tagged = StageSettings(NAMES, "image:1", 20, tenants=StageTenants(isolation="session-tags"))
    assert tagged.job_role_arn("default") == "arn:aws:iam::123456789012:role/microtuning-dev-job"


def test_the_code_that_is_deployed_carries_the_tenants():
    found: dict[str, str] = {}
    exec(stage_module(TWO), found)
    assert StageTenants.model_validate_json(found["TENANTS"]) == TWO


def test_a_change_counts_over_what_is_declared_and_the_later_over_the_earlier():
    changes = {"acme": merged(TenantLimits(weight=5, max_running_runs=1), TenantLimits(max_running_runs=None))}
    limits = TWO.limits_of("acme", changes)
    assert (limits.weight, limits.max_running_runs, limits.gpus) == (5, None, {"A10G": 4})
    assert with_change(Tenant(weight=7), TenantLimits()).weight == 7
    assert TWO.limits_of("beta", changes).max_running_runs == 2


def test_what_grant_is_told():
    limits = TWO.quota(10, {"beta": TenantLimits(gpus={"H100": 8})})
    assert [limits.of(tenant) for tenant in ("acme", "beta", "gone")] == [10, 2, 0]
    assert [limits.weight(tenant) for tenant in ("acme", "beta")] == [3, 1]
    assert [limits.gpus_of(tenant) for tenant in ("acme", "beta", "gone")] == [{"A10G": 4}, {"H100": 8}, {}]
    others = StageTenants(others=TenantLimits(max_running_runs=1, weight=2, gpus={"T4": 1})).quota(10, {})
    assert (others.of("default"), others.of("coda"), others.weight("coda"), others.gpus_of("coda")) == (
        10,
        1,
        2,
        {"T4": 1},
    )


def test_a_change_of_a_tenant_that_is_declared_no_more_lets_nothing_new_start():
    limits = TWO.quota(10, {"gone": TenantLimits(max_running_runs=5)})
    assert limits.of("gone") == 0
    assert TWO.limits_of("gone", {}).max_running_runs == 0


def test_where_a_tenant_stands_names_none_of_anothers_runs():
    held = {"acme-a-0a1b2c3d4e01": Holding("acme"), "beta-b-0a1b2c3d4e02": Holding("beta")}
    places = {"beta-b-0a1b2c3d4e03": 1, "acme-a-0a1b2c3d4e04": 2}
    now = datetime(2026, 1, 2, tzinfo=UTC)
    own = standing("acme", now, TenantLimits(), held, places)
    assert (own.running, own.places) == (1, {"acme-a-0a1b2c3d4e04": 2})
