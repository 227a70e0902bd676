"""Tenants are kept apart: every ordered pair of them, every action, by the policies of the synthesized template.

What the emulator can judge is also tried by real calls (tests/integration/test_tenants.py).
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from tests.infrastructure.conftest import deployed
from tests.infrastructure.policies import Request, is_allowed

if TYPE_CHECKING:
    from pathlib import Path

ACCOUNT, REGION = "111122223333", "us-east-1"
TENANTS = ("default", "research", "product")  # infrastructure/stages/dev.yaml; research has a key of its own
BUCKET = f"arn:aws:s3:::microtuning-dev-{ACCOUNT}-{REGION}"
TABLES = f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/microtuning-dev"
LOGS = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
JOBS = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job"
BY_S3 = {"kms:ViaService": f"s3.{REGION}.amazonaws.com"}


def objects_of(tenant: str) -> str:
    return f"{BUCKET}/tenants/{tenant}"


def what_a_user_does(tenant: str) -> list[Request]:
    """Everything that the SDK and the CLI ask AWS for, on what belongs to `tenant`."""
    own, job = objects_of(tenant), f"dev-{tenant}-sort-0a1b2c3d4e5f-a001"
    run = f"TENANT#{tenant}#RUN#{tenant}-sort-0a1b2c3d4e5f"
    reads = [f"{own}/{key}" for key in ("runs/r/run.json", "receipts/s.yaml.json", "models/g/v0001.json", "datasets/d")]
    puts = [f"{own}/{key}" for key in ("specs/s.yaml", "commands/r/c.json", "datasets/d/x", "code/c/code.zip",
                                      "models/base/b/config.json")]  # fmt: skip
    rows = [("runs", run), ("runs/index/by_created", f"TENANT#{tenant}"), ("runs", f"TENANT#{tenant}#MODEL#g"),
            ("ledger", f"TENANT#{tenant}#2026-12"), ("tenants", f"TENANT#{tenant}")]  # fmt: skip
    return [
        *(Request("s3:GetObject", key) for key in reads),
        *(Request("s3:PutObject", key) for key in puts),
        Request("s3:ListBucket", BUCKET, {"s3:prefix": f"tenants/{tenant}/runs/"}),
        *(Request("dynamodb:Query", f"{TABLES}-{table}", {"dynamodb:LeadingKeys": [key]}) for table, key in rows),
        Request("dynamodb:GetItem", f"{TABLES}-runs", {"dynamodb:LeadingKeys": [run]}),
        Request("logs:GetLogEvents", f"{LOGS}:log-stream:{job}/algo-1-1767"),
        Request("sagemaker:DescribeTrainingJob", f"{JOBS}/{job}"),
    ]


def what_a_job_does(tenant: str) -> list[Request]:
    own, job = objects_of(tenant), f"dev-{tenant}-sort-0a1b2c3d4e5f-a001"
    return [
        Request("s3:GetObject", f"{own}/datasets/d/rows.jsonl"),
        Request("s3:GetObject", f"{own}/runs/r/config/a001/plan.json"),
        Request("s3:PutObject", f"{own}/runs/r/checkpoints/l01/step-1/manifest.json"),
        Request("s3:PutObject", f"{own}/runs/r/output/{job}/output/model.tar.gz"),
        Request("s3:DeleteObject", f"{own}/runs/r/checkpoints/l01/step-1/x"),
        Request("s3:ListBucket", BUCKET, {"s3:prefix": f"tenants/{tenant}/runs/r/checkpoints/"}),
        Request("logs:CreateLogStream", f"{LOGS}:log-stream:{job}/algo-1-1767"),
        Request("logs:PutLogEvents", f"{LOGS}:log-stream:{job}/algo-1-1767"),
    ]


PLAYS = {"user": what_a_user_does, "job": what_a_job_does}


@pytest.mark.parametrize(("actor", "owner"), list(product(TENANTS, TENANTS)))
@pytest.mark.parametrize("part", PLAYS)
def test_what_is_ones_own_is_allowed_and_what_is_anothers_is_not(part: str, actor: str, owner: str, aws: Any) -> None:
    statements = aws.statements_of_role(aws.role(f"microtuning-dev-{part}-{actor}"))
    judged = {(each.action, each.resource): is_allowed(statements, each) for each in PLAYS[part](owner)}
    assert set(judged.values()) == {actor == owner}, judged


@pytest.mark.parametrize("actor", TENANTS)
def test_a_tenants_own_key_is_for_nobody_else(actor: str, aws: Any) -> None:
    for part, context in (("user", BY_S3), ("job", {"kms:GrantIsForAWSResource": "true"})):
        statements = aws.statements_of_role(aws.role(f"microtuning-dev-{part}-{actor}"))
        for action in ("kms:Decrypt", "kms:GenerateDataKey"):
            assert is_allowed(statements, Request(action, "StageKey.Arn", context))
            assert is_allowed(statements, Request(action, "TenantKeyResearch.Arn", context)) is (actor == "research")
    grants = Request("kms:CreateGrant", "TenantKeyResearch.Arn", {"kms:GrantIsForAWSResource": "true"})
    assert is_allowed(aws.statements_of_role(aws.role(f"microtuning-dev-job-{actor}")), grants) is (actor == "research")


@pytest.mark.parametrize("actor", TENANTS)
def test_what_no_user_may(actor: str, aws: Any) -> None:
    """Not even on what is theirs: what the stack writes, what has no leading key, and whatever makes or ends things."""
    statements, own = aws.statements_of_role(aws.role(f"microtuning-dev-user-{actor}")), objects_of(actor)
    job = f"{JOBS}/dev-{actor}-sort-0a1b2c3d4e5f-a001"
    leading = {"dynamodb:LeadingKeys": [f"TENANT#{actor}", "STAGE"]}
    forbidden = [
        *(Request("s3:PutObject", f"{own}/{key}") for key in ("runs/r/run.json", "receipts/x", "models/g/v0001.json")),
        *(Request("s3:DeleteObject", f"{own}/{key}") for key in ("specs/s.yaml", "runs/r/run.json")),
        Request("s3:ListBucket", BUCKET, {"s3:prefix": "tenants/"}),
        Request("s3:ListBucket", BUCKET),
        *(Request(f"dynamodb:{verb}", f"{TABLES}-runs") for verb in ("Scan", "PartiQLSelect", "PutItem", "UpdateItem")),
        Request("dynamodb:BatchGetItem", f"{TABLES}-tenants", leading),
        Request("dynamodb:GetItem", f"{TABLES}-tenants", {"dynamodb:LeadingKeys": ["LIMITS"]}),
        Request("dynamodb:GetItem", f"{TABLES}-idempotency", {"dynamodb:LeadingKeys": [f"TENANT#{actor}"]}),
        *(Request(f"sagemaker:{verb}TrainingJob", job) for verb in ("Create", "Stop", "Update")),
        Request("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/microtuning-dev-job-{actor}"),
        Request("states:StartExecution", f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:microtuning-dev"),
        Request("states:SendTaskSuccess", f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:microtuning-dev"),
        Request("kms:Decrypt", "StageKey.Arn"),  # through S3 alone
        Request("logs:FilterLogEvents", LOGS),
    ]
    assert [each for each in forbidden if is_allowed(statements, each)] == []


def test_launch_training_makes_jobs_of_the_stage_on_tenants_roles_and_no_others(aws: Any) -> None:
    statements = aws.statements_of("launch_training")
    for tenant in TENANTS:
        assert is_allowed(
            statements, Request("sagemaker:CreateTrainingJob", f"{JOBS}/dev-{tenant}-x-0a1b2c3d4e5f-a001")
        )
        assert is_allowed(statements, Request("sagemaker:AddTags", f"{JOBS}/dev-{tenant}-x-0a1b2c3d4e5f-a001"))
        role = f"arn:aws:iam::{ACCOUNT}:role/microtuning-dev-job-{tenant}"
        assert is_allowed(statements, Request("iam:PassRole", role, {"iam:PassedToService": "sagemaker.amazonaws.com"}))
        assert not is_allowed(statements, Request("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"}))
        assert not is_allowed(statements, Request("iam:PassRole", role))
    for key in ("StageKey.Arn", "TenantKeyResearch.Arn"):
        assert is_allowed(statements, Request("kms:CreateGrant", key, {"kms:GrantIsForAWSResource": "true"}))
        assert not is_allowed(statements, Request("kms:CreateGrant", key, {"kms:GrantIsForAWSResource": "false"}))
    assert not is_allowed(
        statements, Request("sagemaker:CreateTrainingJob", f"{JOBS}/prod-default-x-0a1b2c3d4e5f-a001")
    )
    to_sagemaker = {"iam:PassedToService": "sagemaker.amazonaws.com"}
    for other in ("microtuning-dev-user-default", "microtuning-dev-job", "microtuning-prod-job-default", "admin"):
        assert not is_allowed(statements, Request("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/{other}", to_sagemaker))


def test_who_may_take_a_user_role_is_iams_to_say_or_the_configurations(aws: Any) -> None:
    role = aws.role("microtuning-dev-user-research")
    (trust,) = aws.resources[role]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert (trust["Action"], trust["Principal"]) == ("sts:AssumeRole", {"AWS": f"arn:aws:iam::{ACCOUNT}:root"})


# -- whoever is not declared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["default", "acme", "beta", "undeclared"])
def test_the_shared_role_of_undeclared_tenants_reaches_nobody_who_is_declared(
    owner: str, emulated: Any, raw: dict[str, Any]
) -> None:
    shared = deployed(raw)
    statements = emulated.statements_of_role(emulated.role("microtuning-local-job"))
    bucket = f"arn:aws:s3:::microtuning-local-{ACCOUNT}-{REGION}"
    own = f"{bucket}/tenants/{owner}"
    requests = [
        Request("s3:GetObject", f"{own}/datasets/d"),
        Request("s3:PutObject", f"{own}/runs/r/checkpoints/l01/x"),
        Request("s3:DeleteObject", f"{own}/runs/r/checkpoints/l01/x"),
        Request("s3:ListBucket", bucket, {"s3:prefix": f"tenants/{owner}/runs/"}),
    ]
    assert {is_allowed(statements, each) for each in requests} == {owner == "undeclared"}
    lines = Request("logs:PutLogEvents", f"{LOGS}:log-stream:local-{owner}-x-0a1b2c3d4e5f-a001/algo-1")
    on_aws = shared.statements_of_role(shared.role("microtuning-local-job"))  # the emulator knows no streams
    assert is_allowed(on_aws, lines) is (owner == "undeclared")


def test_a_stage_without_others_has_no_shared_role(aws: Any) -> None:
    names = {each.get("RoleName") for each in aws.of_type("AWS::IAM::Role").values()}
    assert "microtuning-dev-job" not in names


# -- session tags ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Any:
    """A stage whose tenants are told apart by their sessions' tags."""
    from infrastructure.app import build_app

    sources = tmp_path_factory.mktemp("tagged")
    for name in ("functions", "sdk"):
        (sources / name).symlink_to(root / name)
    stages = sources / "infrastructure" / "stages"
    stages.mkdir(parents=True)
    (stages / "many.yaml").write_text("isolation: session-tags\nothers: {max_running_runs: 2}\n")
    out = tmp_path_factory.mktemp("many")
    context = {"stage": "many", "image_uri": "own:1"}
    build_app(root=sources, build=out / "lambda", outdir=out / "cdk.out", context=context).synth()
    return deployed(json.loads((out / "cdk.out" / "Microtuning.template.json").read_text()))


def for_stage_many(requests: list[Request], tag: str) -> list[Request]:
    def renamed(text: str) -> str:
        return text.replace("microtuning-dev", "microtuning-many").replace("training-job/dev-", "training-job/many-")

    return [
        Request(each.action, renamed(each.resource).replace("log-stream:dev-", "log-stream:many-"),
                {**each.context, "aws:PrincipalTag/tenant": tag})
        for each in requests
    ]  # fmt: skip


@pytest.mark.parametrize(("actor", "owner"), list(product(("t1", "t2", "t22"), repeat=2)))
@pytest.mark.parametrize("part", PLAYS)
def test_with_session_tags_one_role_is_of_the_tenant_it_is_tagged_with(
    part: str, actor: str, owner: str, tagged: Any
) -> None:
    statements = tagged.statements_of_role(tagged.role(f"microtuning-many-{part}"))
    requests = for_stage_many(PLAYS[part](owner), actor)
    judged = {(each.action, each.resource): is_allowed(statements, each) for each in requests}
    assert set(judged.values()) == {actor == owner}, judged
    untagged = [Request(each.action, each.resource, {}) for each in requests if not each.action.startswith("dynamodb")]
    assert not any(is_allowed(statements, each) for each in untagged)


def test_with_session_tags_launch_training_only_becomes_the_launcher_and_that_makes_jobs_of_its_tag(
    tagged: Any,
) -> None:
    function = tagged.statements_of("launch_training")
    job = f"{JOBS}/many-t1-x-0a1b2c3d4e5f-a001"
    launcher = f"arn:aws:iam::{ACCOUNT}:role/microtuning-many-launcher"
    assert not is_allowed(function, Request("sagemaker:CreateTrainingJob", job))
    assert is_allowed(function, Request("sts:AssumeRole", launcher))
    assert is_allowed(function, Request("sts:TagSession", launcher, {"aws:TagKeys": ["tenant"]}))
    assert not is_allowed(function, Request("sts:TagSession", launcher, {"aws:TagKeys": ["tenant", "admin"]}))
    makes = tagged.statements_of_role(tagged.role("microtuning-many-launcher"))
    for tag, may in (("t1", True), ("t2", False), ("t", False)):
        for action in ("sagemaker:CreateTrainingJob", "sagemaker:AddTags"):
            assert is_allowed(makes, Request(action, job, {"aws:PrincipalTag/tenant": tag})) is may
    role = f"arn:aws:iam::{ACCOUNT}:role/microtuning-many-job"
    assert is_allowed(makes, Request("iam:PassRole", role, {"iam:PassedToService": "sagemaker.amazonaws.com"}))


def test_with_session_tags_both_trust_policies_take_tags(tagged: Any) -> None:
    def trust(name: str) -> list[dict[str, Any]]:
        statements: list[dict[str, Any]] = tagged.resources[tagged.role(name)]["Properties"][
            "AssumeRolePolicyDocument"
        ]["Statement"]
        return statements

    for name in ("microtuning-many-job", "microtuning-many-launcher", "microtuning-many-user"):
        actions = [each["Action"] for each in trust(name)]
        assert sorted(str(action) for each in actions for action in (each if isinstance(each, list) else [each])) == [
            "sts:AssumeRole", "sts:TagSession",
        ]  # fmt: skip
    assert all(each["Condition"]["StringLike"] == {"aws:RequestTag/tenant": "?*"}
               for each in trust("microtuning-many-launcher"))  # fmt: skip
    launcher = trust("microtuning-many-launcher")[0]["Principal"]["AWS"]
    assert launcher == tagged.function("launch_training")["Role"]
