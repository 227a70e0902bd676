"""What roles may do where no emulator judges it: KMS, SageMaker, PassRole, wildcards, the training job's reach."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

BUCKET = "arn:aws:s3:::microtuning-dev-111122223333-us-east-1"
JOBS = "arn:aws:sagemaker:us-east-1:111122223333:training-job/dev-*"
MACHINE = "arn:aws:states:us-east-1:111122223333:stateMachine:microtuning-dev"
TENANTS = ("default", "research", "product")  # infrastructure/stages/dev.yaml
JOB_ROLES = [f"arn:aws:iam::111122223333:role/microtuning-dev-job-{tenant}" for tenant in TENANTS]

# Actions that IAM cannot tie to a resource.
WITHOUT_RESOURCE = {"sagemaker:ListTrainingJobs",
    "xray:PutTraceSegments", "xray:PutTelemetryRecords",
    "cloudwatch:PutMetricData", "ecr:GetAuthorizationToken",
    "logs:CreateLogDelivery", "logs:GetLogDelivery", "logs:UpdateLogDelivery", "logs:DeleteLogDelivery",
    "logs:ListLogDeliveries", "logs:PutResourcePolicy", "logs:DescribeResourcePolicies", "logs:DescribeLogGroups",
}  # fmt: skip


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _all_statements(stack: Any) -> list[dict[str, Any]]:
    return [each for role in stack.of_type("AWS::IAM::Role") for each in stack.statements_of_role(role)]


def _functions(stack: Any) -> list[str]:
    return [each["Handler"].split(".")[1] for each in stack.of_type("AWS::Lambda::Function").values()]


def _who_may(action: str, stack: Any) -> set[str]:
    return {
        name
        for name in _functions(stack)
        if any(action in _as_list(each["Action"]) for each in stack.statements_of(name))
    }


def _resources(action: str, stack: Any) -> set[str]:
    found = [each["Resource"] for each in _all_statements(stack) if action in _as_list(each["Action"])]
    return {resource for each in found for resource in _as_list(each)}


def test_the_only_rights_on_everything_are_those_that_have_no_resource(aws: Any) -> None:
    everywhere = [each for each in _all_statements(aws) if "*" in _as_list(each["Resource"])]
    assert {action for each in everywhere for action in _as_list(each["Action"])} == WITHOUT_RESOURCE


def test_no_right_is_a_pattern_of_actions_and_no_managed_policy_adds_any(aws: Any) -> None:
    actions = {action for each in _all_statements(aws) for action in _as_list(each["Action"])}
    assert [action for action in actions if "*" in action] == []
    assert all("ManagedPolicyArns" not in each for each in aws.of_type("AWS::IAM::Role").values())
    assert aws.of_type("AWS::IAM::Policy") == {}


def test_only_launch_training_passes_roles_and_only_those_of_tenants_jobs_to_sagemaker(aws: Any) -> None:
    assert _who_may("iam:PassRole", aws) == {"launch_training"}
    (grant,) = [each for each in _all_statements(aws) if "iam:PassRole" in _as_list(each["Action"])]
    assert grant["Resource"] == JOB_ROLES
    assert grant["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}


def test_training_jobs_are_reached_by_the_stages_prefix_only(aws: Any) -> None:
    own = {JOBS.replace("dev-", f"dev-{tenant}-") for tenant in TENANTS}  # what the people of a tenant may look at
    for action in ("CreateTrainingJob", "AddTags", "StopTrainingJob", "UpdateTrainingJob"):
        assert _resources(f"sagemaker:{action}", aws) == {JOBS}
    for action in ("DescribeTrainingJob", "ListTags"):
        assert _resources(f"sagemaker:{action}", aws) == {JOBS} | own
    assert _who_may("sagemaker:CreateTrainingJob", aws) == {"launch_training"}
    assert _resources("sagemaker:ListTrainingJobs", aws) == {"*"}  # names are all that it tells
    assert _who_may("sagemaker:ListTrainingJobs", aws) == {"reconcile"}
    used = {action for each in _all_statements(aws) for action in _as_list(each["Action"]) if "sagemaker" in action}
    assert len(used) == 7


def test_whoever_reads_or_writes_objects_may_use_the_stages_key(aws: Any) -> None:
    for name in _functions(aws):
        keys = [each for each in aws.statements_of(name) if "kms:Decrypt" in _as_list(each["Action"])]
        assert [(each["Action"], each["Resource"]) for each in keys] == [
            (["kms:Decrypt", "kms:GenerateDataKey"], ["StageKey.Arn", "TenantKeyResearch.Arn"])
        ]
    assert all(each["EnableKeyRotation"] is True for each in aws.of_type("AWS::KMS::Key").values())
    aliases = sorted(each["AliasName"] for each in aws.of_type("AWS::KMS::Alias").values())
    assert aliases == ["alias/microtuning-dev", "alias/microtuning-dev-research"]


def test_grants_on_the_key_are_made_for_aws_resources_only(aws: Any) -> None:
    grants = [each for each in _all_statements(aws) if "kms:CreateGrant" in _as_list(each["Action"])]
    assert len(grants) == 1 + len(TENANTS)  # of launch_training and of the roles of jobs
    assert all(each["Condition"] == {"Bool": {"kms:GrantIsForAWSResource": "true"}} for each in grants)


def test_tokens_are_answered_at_our_machine_on_aws_and_anywhere_on_the_emulator(aws: Any, emulated: Any) -> None:
    assert _resources("states:SendTaskSuccess", aws) == {MACHINE}
    assert _resources("states:SendTaskSuccess", emulated) == {"*"}
    assert _resources("states:StartExecution", aws) == {MACHINE}


def test_who_starts_executions_and_that_nobody_stops_one(aws: Any) -> None:
    starters = {"on_spec_uploaded", "on_command", "close_run", "on_execution_ended", "reconcile"}
    assert _who_may("states:StartExecution", aws) == starters
    assert _who_may("states:StopExecution", aws) == set()


@pytest.mark.parametrize(
    ("table", "who"),
    [
        ("ledger", {"on_cost_event", "on_execution_ended", "reconcile"}),
        ("idempotency", {"on_spec_uploaded"}),
        (
            "tenants",
            {
                "on_spec_uploaded", "on_command", "on_training_event", "on_execution_ended", "admit_run",
                "launch_training", "close_run", "reconcile",
            },
        ),
    ],
)  # fmt: skip
def test_who_writes_which_table(table: str, who: set[str], aws: Any) -> None:
    arn = f"arn:aws:dynamodb:us-east-1:111122223333:table/microtuning-dev-{table}"
    writers = {
        name
        for name in _functions(aws)
        for each in aws.statements_of(name)
        if arn in _as_list(each["Resource"]) and "dynamodb:PutItem" in _as_list(each["Action"])
    }
    assert writers == who


def test_every_function_may_tell_a_missing_object_from_a_forbidden_one(aws: Any) -> None:
    for name in _functions(aws):
        (listing,) = [each for each in aws.statements_of(name) if each["Action"] == "s3:ListBucket"]
        assert listing["Resource"] == BUCKET
        assert listing["Condition"] == {"StringLikeIfExists": {"s3:prefix": "tenants/*"}}


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("tenants/research/runs/r/checkpoints/l01/step-1/manifest.json", True),
        ("tenants/research/runs/r/output/dev-r-a001/output/model.tar.gz", True),
        ("tenants/research/runs/r/run.json", False),
        ("tenants/research/runs/r/config/a001/plan.json", False),
        ("tenants/research/datasets/d", False),
        ("tenants/research/models/m/v0001.json", False),
        ("tenants/research/receipts/r.json", False),
        ("tenants/research/specs/s.yaml", False),
        ("tenants/research/commands/r/c.json", False),
        ("tenants/research/specs/runs/x/output/y.yaml", False),  # `*` crosses `/`: only the refusal stops this one
        ("tenants/research/commands/runs/x/checkpoints/y.json", False),
    ],
)
def test_what_a_training_job_may_write(key: str, may: bool, aws: Any) -> None:
    role = aws.role("microtuning-dev-job-research")
    statements = [each for each in aws.statements_of_role(role) if "s3:PutObject" in _as_list(each["Action"])]
    matching = {
        each["Effect"]
        for each in statements
        if any(fnmatchcase(f"{BUCKET}/{key}", resource) for resource in _as_list(each["Resource"]))
    }
    assert (matching == {"Allow"}) is may


def test_a_training_job_lists_and_reads_only_what_is_its_tenants(aws: Any) -> None:
    statements = {each["Sid"]: each for each in aws.statements_of_role(aws.role("microtuning-dev-job-research"))}
    assert statements["ListObjects"]["Condition"] == {"StringLike": {"s3:prefix": "tenants/research/*"}}
    assert statements["Read"]["Resource"] == f"{BUCKET}/tenants/research/*"
    services = {action.split(":")[0] for each in statements.values() for action in _as_list(each["Action"])}
    assert services == {"s3", "kms", "logs", "cloudwatch", "ecr"}


@pytest.mark.parametrize("tenant", TENANTS)
def test_only_sagemaker_of_this_account_takes_a_job_role(tenant: str, aws: Any) -> None:
    role = aws.role(f"microtuning-dev-job-{tenant}")
    (trust,) = aws.resources[role]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert trust["Condition"] == {"StringEqualsIfExists": {"aws:SourceAccount": "111122223333"}}


def test_the_state_machine_puts_into_two_queues_and_asks_three_functions(aws: Any) -> None:
    role = aws.only("AWS::StepFunctions::StateMachine")["RoleArn"].removesuffix(".Arn")
    statements = {each["Sid"]: each for each in aws.statements_of_role(role)}
    queues = [each.rsplit(":", 1)[1] for each in statements["PutIntoQueues"]["Resource"]]
    assert queues == ["microtuning-dev-admissions", "microtuning-dev-launches"]
    functions = [each.rsplit(":", 1)[1] for each in statements["AskFunctions"]["Resource"]]
    assert functions == ["microtuning-dev-plan-attempt", "microtuning-dev-register-model", "microtuning-dev-close-run"]


def test_who_may_do_what_is_what_was_read_and_kept(aws: Any) -> None:
    from tests.infrastructure.iam_snapshot import KEPT, snapshot

    assert KEPT.read_text(encoding="utf-8") == snapshot(aws), "Run make iam, read the diff of iam.txt, and commit it."
