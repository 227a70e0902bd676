"""What the roles of a tenant may do: its training jobs, its people, and whoever makes its jobs.

Everything is named by the tenant: S3 prefix, job names, log streams, the leading keys of rows. With session tags the name
is `${aws:PrincipalTag/tenant}`, which IAM fills in when it decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infrastructure.grants import GRANTS, Grant, create_jobs, encrypt_volumes, pass_roles, use_keys
from infrastructure.names import (
    BUCKET_ARN,
    JOB_ROLE,
    KEY_ARN,
    LAUNCHER_ROLE,
    TAGGED_TENANT,
    TRAINING_LOGS_ARN,
    job_role,
    jobs_arn,
    log_streams_arn,
    objects_arn,
    role_arn,
    table_arn,
    tenant_key_arn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from microtuning_core.domain.tenants import StageTenants

_WRITE = ("s3:PutObject", "s3:AbortMultipartUpload")
_READ_ROWS = ("dynamodb:GetItem", "dynamodb:BatchGetItem", "dynamodb:Query")
# What fit() and the CLI put; what the stack writes (runs, receipts, versions of models) nobody else does.
_UPLOADS = ("specs/*", "commands/*", "datasets/*", "code/*", "models/base/*")


def keys_of(tenants: StageTenants, tenant: str) -> tuple[str, ...]:
    """The stage's key, by which the bucket encrypts, and the tenant's own."""
    return (KEY_ARN, tenant_key_arn(tenant)) if tenant in tenants.have_own_key else (KEY_ARN,)


def job_grants(tenant: str, keys: Sequence[str]) -> dict[str, Grant]:
    """What a training job of the tenant may do: read what is the tenant's, write what a run produces."""
    return {
        "list-objects": _list_objects(tenant),
        "read": Grant(("s3:GetObject",), objects_arn("*", tenant=tenant)),
        "write": Grant(_WRITE, objects_arn("runs/*/checkpoints/*", "runs/*/output/*", tenant=tenant)),
        "tidy-checkpoints": Grant(("s3:DeleteObject",), objects_arn("runs/*/checkpoints/*", tenant=tenant)),
        "use-key": Grant(("kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"), tuple(keys)),
        "encrypt-volumes": encrypt_volumes(*keys),
        "make-log-group": Grant(
            ("logs:CreateLogGroup", "logs:DescribeLogStreams"), (TRAINING_LOGS_ARN, f"{TRAINING_LOGS_ARN}:*")
        ),
        "write-logs": Grant(
            ("logs:CreateLogStream", "logs:PutLogEvents"), (log_streams_arn(tenant),), on_emulator=TRAINING_LOGS_ARN
        ),
        "write-metrics": Grant(  # has no resource to name
            ("cloudwatch:PutMetricData",),
            ("*",),
            {"StringEquals": {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}},
        ),
        "log-in-to-ecr": Grant(("ecr:GetAuthorizationToken",), ("*",)),  # has no resource to name
        "pull-images": Grant(  # any account's: TrainingImageUri may be one of AWS's own images
            ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"),
            ("arn:${AWS::Partition}:ecr:${AWS::Region}:*:repository/*",),
        ),
    }


def job_refusals(tenant: str) -> dict[str, Grant]:
    """`*` crosses `/` in an ARN: tenants/a/specs/runs/x/output/y would pass for output, and what lies in specs/ starts a
    run."""
    starting = objects_arn("specs/*", "commands/*", tenant=tenant)
    return {"never-start-anything": Grant(("s3:PutObject", "s3:DeleteObject"), starting)}


def others_refusals(declared: Sequence[str]) -> dict[str, Grant]:
    """The role that undeclared tenants share reaches nobody who is declared."""
    objects = tuple(arn for tenant in declared for arn in objects_arn("*", tenant=tenant))
    prefixes = [f"tenants/{tenant}/*" for tenant in declared]
    return {
        "never-touch-declared-tenants": Grant(("s3:GetObject", "s3:PutObject", "s3:DeleteObject"), objects),
        "never-list-declared-tenants": Grant(
            ("s3:ListBucket",), (BUCKET_ARN,), {"StringLike": {"s3:prefix": prefixes}}
        ),
        "never-write-declared-tenants-logs": Grant(
            ("logs:CreateLogStream", "logs:PutLogEvents"), tuple(map(log_streams_arn, declared))
        ),
    }


def user_grants(tenant: str, keys: Sequence[str]) -> dict[str, Grant]:
    """What the people of the tenant may do: put specs, commands, data and code; read what is theirs."""
    leading = [f"TENANT#{tenant}", f"TENANT#{tenant}#*"]
    tables = (table_arn("runs"), f"{table_arn('runs')}/index/*", table_arn("ledger"), table_arn("tenants"))
    return {
        "list-objects": _list_objects(tenant),
        "read": Grant(("s3:GetObject",), objects_arn("*", tenant=tenant)),
        "read-prices": Grant(("s3:GetObject",), (f"{BUCKET_ARN}/prices/${{AWS::Region}}.json",)),  # nobody's own
        "upload": Grant(_WRITE, objects_arn(*_UPLOADS, tenant=tenant)),
        # No Scan and no PartiQL: a request without keys would meet ForAllValues.
        "read-own-rows": Grant(_READ_ROWS, tables, {"ForAllValues:StringLike": {"dynamodb:LeadingKeys": leading}}),
        # The names of streams have no finer resource than their group.
        "list-log-streams": Grant(("logs:DescribeLogStreams",), (TRAINING_LOGS_ARN, f"{TRAINING_LOGS_ARN}:*")),
        "read-logs": Grant(("logs:GetLogEvents",), (log_streams_arn(tenant),), on_emulator=TRAINING_LOGS_ARN),
        "see-jobs": Grant(("sagemaker:DescribeTrainingJob", "sagemaker:ListTags"), (jobs_arn(tenant),)),
        "use-key": Grant(
            ("kms:Decrypt", "kms:GenerateDataKey"),
            tuple(keys),
            {"StringEquals": {"kms:ViaService": "s3.${AWS::Region}.${AWS::URLSuffix}"}},
        ),
    }


def _list_objects(tenant: str) -> Grant:
    return Grant(("s3:ListBucket",), (BUCKET_ARN,), {"StringLike": {"s3:prefix": f"tenants/{tenant}/*"}})


def all_grants(tenants: StageTenants) -> dict[str, Grant]:
    """GRANTS, and what depends on which tenants there are: keys to use, and how jobs are made."""
    own_keys = tuple(map(tenant_key_arn, tenants.have_own_key))
    making = _launcher_grants() if tenants.by_tags else {"pass-job-roles": pass_roles(*job_roles(tenants))}
    keys = {"use-key": use_keys(KEY_ARN, *own_keys), "encrypt-volumes": encrypt_volumes(KEY_ARN, *own_keys)}
    return GRANTS | keys | making


def job_roles(tenants: StageTenants) -> tuple[str, ...]:
    """The ARNs of all roles that a training job of the stage may run on."""
    own = () if tenants.by_tags else tuple(map(job_role, tenants.tenants))
    shared = (JOB_ROLE,) if tenants.by_tags or tenants.others is not None else ()
    return tuple(map(role_arn, (*own, *shared)))


def _launcher_grants() -> dict[str, Grant]:
    """With session tags launch_training makes no job itself: it becomes the launcher, tagged with the run's tenant."""
    launcher = (role_arn(LAUNCHER_ROLE),)
    only_tenant = {"ForAllValues:StringEquals": {"aws:TagKeys": ["tenant"]}}
    return {
        "create-jobs": Grant(("sts:AssumeRole",), launcher),
        "pass-job-roles": Grant(("sts:TagSession",), launcher, only_tenant),
    }


def launcher_grants(tenants: StageTenants) -> dict[str, Grant]:
    """What the launcher may do in a session that is tagged with a tenant: make jobs of that very tenant."""
    return {
        "create-jobs": create_jobs(jobs_arn(TAGGED_TENANT)),
        "pass-job-roles": pass_roles(*job_roles(tenants)),
        "encrypt-volumes": encrypt_volumes(KEY_ARN),
    }
