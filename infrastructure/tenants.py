"""The roles and keys of the tenants that the stage's configuration declares, under literal names.

    microtuning-<stage>-job-<tenant>    what SageMaker assumes for its training jobs
    microtuning-<stage>-user-<tenant>   what its people, or their CI, assume
    alias/microtuning-<stage>-<tenant>  its own key, where it has asked for one

With `isolation: session-tags` there is one job role, one user role and one launcher, and a session's tag says whose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from infrastructure.grants import policy
from infrastructure.names import (
    JOB_ROLE,
    KEY_ARN,
    LAUNCHER_ROLE,
    TAGGED_TENANT,
    USER_ROLE,
    construct_id,
    job_role,
    sub,
    tenant_key_alias,
    tenant_key_id,
    user_role,
)
from infrastructure.tenant_grants import (
    job_grants,
    job_refusals,
    keys_of,
    launcher_grants,
    others_refusals,
    user_grants,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aws_cdk import aws_lambda as lambda_

    from microtuning_core.domain.tenants import StageTenants, Tenant


class Tenants(Construct):
    """A construct a tenant, or the three roles that serve all of them by their session's tag."""

    def __init__(self, scope: Construct, tenants: StageTenants, *, launch_training: lambda_.IFunction) -> None:
        super().__init__(scope, "Tenants")
        if tenants.by_tags:
            _TaggedRoles(self, tenants, launch_training=launch_training)
            return
        for name, tenant in tenants.tenants.items():
            _OneTenant(self, name, tenant, keys_of(tenants, name))
        if tenants.others is not None:
            self._shared_role(tuple(tenants.tenants))

    def _shared_role(self, declared: Sequence[str]) -> None:
        """For whoever is not declared. They are not kept apart from each other, only from those who are declared."""
        iam.Role(
            self,
            "SharedJobRole",
            role_name=sub(JOB_ROLE),
            assumed_by=_sagemaker(),
            description="What a training job of a tenant that is not declared may do",
            inline_policies={
                "grants": policy(job_grants("*", (KEY_ARN,)), job_refusals("*") | others_refusals(declared))
            },
        )


class _OneTenant(Construct):
    def __init__(self, scope: Construct, name: str, tenant: Tenant, keys: Sequence[str]) -> None:
        super().__init__(scope, construct_id(name))
        if tenant.own_key:
            self._key(name)
        iam.Role(
            self,
            "JobRole",
            role_name=sub(job_role(name)),
            assumed_by=_sagemaker(),
            description=f"What a training job of {name} may do",
            inline_policies={"grants": policy(job_grants(name, keys), job_refusals(name))},
        )
        iam.Role(
            self,
            "UserRole",
            role_name=sub(user_role(name)),
            assumed_by=_people(tenant.assumed_by),
            description=f"What the people of {name} may do",
            max_session_duration=cdk.Duration.hours(12),
            inline_policies={"grants": policy(user_grants(name, keys))},
        )

    def _key(self, name: str) -> None:
        """Kept when the tenant goes: what it encrypted may be kept too."""
        key = kms.Key(
            self,
            "Key",
            description=f"Models and training volumes of {name}",
            enable_key_rotation=True,
            removal_policy=cdk.RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
        )
        cast("kms.CfnKey", key.node.default_child).override_logical_id(tenant_key_id(name))
        kms.CfnAlias(self, "Alias", alias_name=sub(tenant_key_alias(name)), target_key_id=key.key_arn)


class _TaggedRoles(Construct):
    """launch_training takes the launcher's role in a session tagged with the run's tenant; SageMaker hands the tag on to
    the session of the job (SessionChainingConfig)."""

    def __init__(self, scope: Construct, tenants: StageTenants, *, launch_training: lambda_.IFunction) -> None:
        super().__init__(scope, "Tagged")
        iam.Role(
            self,
            "JobRole",
            role_name=sub(JOB_ROLE),
            assumed_by=iam.SessionTagsPrincipal(_sagemaker()),
            description="What a training job may do for the tenant that its session is tagged with",
            inline_policies={"grants": policy(job_grants(TAGGED_TENANT, (KEY_ARN,)), job_refusals(TAGGED_TENANT))},
        )
        launcher = cast("iam.IRole", launch_training.role)
        iam.Role(
            self,
            "Launcher",
            role_name=sub(LAUNCHER_ROLE),
            assumed_by=_tagged(iam.ArnPrincipal(launcher.role_arn)),
            description="Makes training jobs of the tenant that its session is tagged with",
            inline_policies={"grants": policy(launcher_grants(tenants))},
        )
        iam.Role(
            self,
            "UserRole",
            role_name=sub(USER_ROLE),
            assumed_by=_tagged(iam.AccountRootPrincipal()),
            description="What the people of the tenant may do that their session is tagged with",
            inline_policies={"grants": policy(user_grants(TAGGED_TENANT, (KEY_ARN,)))},
        )


def _sagemaker() -> iam.PrincipalBase:
    # IfExists: an emulator's SageMaker assumes the role without saying for which account.
    for_us = {"StringEqualsIfExists": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID}}
    return iam.ServicePrincipal("sagemaker.amazonaws.com", conditions=for_us)


def _people(principals: Sequence[str]) -> iam.IPrincipal:
    """Whoever is named, else whom IAM of this account lets assume the role."""
    if not principals:
        return iam.AccountRootPrincipal()
    return iam.CompositePrincipal(*(iam.ArnPrincipal(arn) for arn in principals))


def _tagged(principal: iam.PrincipalBase) -> iam.IPrincipal:
    """A session without a tenant would have no rights at all; it is refused where it begins."""
    return iam.SessionTagsPrincipal(principal.with_conditions({"StringLike": {"aws:RequestTag/tenant": "?*"}}))
