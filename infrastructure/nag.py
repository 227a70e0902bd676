"""EXCUSES: what AWS's rule packs say of the stack and we keep, each with a reason that a security reviewer can judge.

    make nag        cdk synth with AwsSolutions, Serverless and NIST 800-53 R5 over it; a finding without a row fails

Wildcards in IAM resources have a table of their own: a resource that matches no row of WILDCARDS is a finding. Where a row
says `test`, the packs cannot see what holds (a condition, a policy of its own), and that test shows it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aws_cdk as cdk
import cdk_nag
from aws_cdk import aws_iam as iam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from constructs import IConstruct

PACKS: dict[str, Callable[[cdk.App], Any]] = {
    "AwsSolutions": cdk_nag.AwsSolutionsChecks,
    "Serverless": cdk_nag.ServerlessChecks,
    "NIST.800.53.R5": cdk_nag.NIST80053R5Checks,
}


@dataclass(frozen=True)
class Excuse:
    """One row: the rule, where it is excused (a pattern of construct paths below the stack), and why."""

    rule: str
    where: str
    why: str


_FUNCTIONS = r"Functions/\w+/Function"
_QUEUES = r"Queues/\w+"

EXCUSES = (
    # Held, where the packs cannot see it.
    Excuse(
        "AwsSolutions-SQS4",
        _QUEUES,
        "Each queue refuses plain HTTP on AWS, by a policy written as CfnQueuePolicy under the condition IsOnAws "
        "(test_resources.py: queues are TLS only).",
    ),
    Excuse(
        "AwsSolutions-SF2",
        r"Workflow/StateMachine",
        "Traced on AWS: TracingConfiguration.Enabled is Fn::If IsOnAws (test_resources.py).",
    ),
    Excuse(
        "AwsSolutions-S1",
        r"Storage/Bucket",
        "Logged on AWS: LoggingConfiguration is Fn::If IsOnAws (test_resources.py).",
    ),
    Excuse("NIST.800.53.R5-S3BucketLoggingEnabled", r"Storage/Bucket", "As AwsSolutions-S1."),
    Excuse("Serverless-StepFunctionStateMachineXray", r"Workflow/StateMachine", "As AwsSolutions-SF2."),
    Excuse(
        "Serverless-LambdaTracing", _FUNCTIONS, "Traced on AWS: TracingConfig is Fn::If IsOnAws (test_resources.py)."
    ),
    Excuse(
        "Serverless-LambdaEventSourceMappingDestination",
        rf"{_FUNCTIONS}/\w+",
        "Lambda offers no on-failure destination for SQS sources: what fails four times goes to the queue's own "
        "dead-letter queue, which on_dead_letter reads.",
    ),
    Excuse(
        "Serverless-SQSRedrivePolicy", r"Queues/\w+Dlq", "It is a dead-letter queue itself; on_dead_letter reads it."
    ),
    Excuse(
        "Serverless-LambdaDLQ",
        _FUNCTIONS,
        "No function is invoked asynchronously: each reads from an SQS queue with a dead-letter queue, or answers a state "
        "of the machine, which catches every error.",
    ),
    Excuse("NIST.800.53.R5-LambdaDLQ", _FUNCTIONS, "As Serverless-LambdaDLQ."),
    Excuse(
        "Serverless-LambdaStarPermissions",
        r"Functions/\w+/Role",
        "The only actions on `*` have no resource that IAM could name; test_permissions.py lists them all.",
    ),
    # Decided otherwise.
    Excuse(
        "AwsSolutions-SF1",
        r"Workflow/StateMachine",
        "Errors are logged. Every change of a run is kept as a row of its events and in run.json, and Step Functions keeps "
        "each execution's history for 90 days; execution data is not logged, because specs stand in it.",
    ),
    Excuse(
        "AwsSolutions-L1",
        _FUNCTIONS,
        "Python 3.12, the newest that AWS's public Powertools layer in use is built for; supported by AWS until 2028.",
    ),
    Excuse("Serverless-LambdaLatestVersion", _FUNCTIONS, "As AwsSolutions-L1."),
    Excuse(
        "NIST.800.53.R5-LambdaConcurrency",
        _FUNCTIONS,
        "Concurrency is limited where messages come in (MaximumConcurrency 2 a queue); reserved concurrency would take "
        "from the account's other functions, and lose what is throttled between Step Functions and a function.",
    ),
    Excuse(
        "NIST.800.53.R5-LambdaInsideVPC",
        _FUNCTIONS,
        "The functions call AWS APIs over TLS and nothing else, and run no code of users. What runs users' code, the "
        "training job, goes into a VPC without internet by the stage's `vpc` (docs/security.md, with its cost).",
    ),
    Excuse(
        "NIST.800.53.R5-IAMNoInlinePolicy",
        r"(Functions/\w+/|Workflow/|Training/|Tenants/.*|Network/.*)\w*Role\w*(/DefaultPolicy)?",
        "One role a function, whose one policy is used nowhere else and goes with it: a managed policy could be attached "
        "to somebody else. No user or group has a policy here.",
    ),
    Excuse(
        "NIST.800.53.R5-VPCDefaultSecurityGroupClosed",
        r"Network/Vpc",
        "Nothing is in the default group: jobs and endpoints have groups of their own. Emptying it takes a custom resource "
        "with a function that may change any security group.",
    ),
    Excuse(
        "NIST.800.53.R5-DynamoDBInBackupPlan",
        r"Tables/\w+",
        "Point-in-time recovery to any second of 35 days, tables kept when the stack goes, and every run's record in the "
        "versioned bucket as well, from which `microtuning doctor --rebuild` makes the rows again.",
    ),
    Excuse(
        "NIST.800.53.R5-S3BucketReplicationEnabled",
        r"Storage/\w+",
        "Checkpoints are intermediate results that a run makes again; replicating each would double storage and writes. "
        "Whoever needs a second region adds a replication rule to the bucket.",
    ),
    Excuse("AwsSolutions-S1", r"Storage/AccessLogs", "The bucket of the access logs does not log itself."),
    Excuse("NIST.800.53.R5-S3BucketLoggingEnabled", r"Storage/AccessLogs", "As AwsSolutions-S1."),
    Excuse(
        "NIST.800.53.R5-S3DefaultEncryptionKMS",
        r"Storage/AccessLogs",
        "S3's log delivery writes to buckets under S3's own key only.",
    ),
    Excuse(
        "NIST.800.53.R5-S3BucketVersioningEnabled",
        r"Storage/AccessLogs",
        "Written once by S3 alone under names of their own, and expired after 90 days.",
    ),
)

# Resources with `*` in them, as texts of names.py.
_BUCKET = re.escape("arn:<AWS::Partition>:s3:::microtuning-<Stage>-<AWS::AccountId>-<AWS::Region>/tenants/")
_OF = r"arn:<AWS::Partition>:{0}:<AWS::Region>:<AWS::AccountId>:"
WILDCARDS = {
    r"\*": "Actions that have no resource to name; test_permissions.py lists them all.",
    _BUCKET
    + r"(\*|[a-z][a-z0-9]+|\$?<aws:PrincipalTag/tenant>)/.*": "Objects of a tenant below one folder: names of runs "
    "and files are not known beforehand. Another tenant's are out of reach: the tenants' matrix of the tests.",
    _OF.format("dynamodb") + r"table/microtuning-<Stage>-runs/index/\*": "The indexes of the stage's own table.",
    _OF.format("logs") + r"log-group:/microtuning/<Stage>/\w+:\*": "The log streams of the function's own group.",
    _OF.format("logs")
    + r"log-group:/aws/sagemaker/TrainingJobs:.*": "Log streams of training jobs: SageMaker names them.",
    _OF.format("sagemaker")
    + r"training-job/<Stage>-.*\*": "Jobs by the stage's, and the tenant's, prefix of their names.",
    _OF.format("states") + r"execution:microtuning-<Stage>:\*": "Executions of the stage's own state machine.",
    re.escape(
        "arn:<AWS::Partition>:ecr:<AWS::Region>:*:repository/*"
    ): "TrainingImageUri may be one of AWS's own images, from AWS's account; pulling is read-only.",
    r'\{"Fn::If":\["IsOnAws",\{"Fn::Sub":"[^"]*/aws/sagemaker/TrainingJobs:log-stream:\$\{Stage\}-[^"]*-\*"\},.*': (
        "Log streams of the tenant's own jobs, by the prefix of their names."
    ),
    r'\{"Fn::If":\["IsOnAws",.*stateMachine:microtuning-<?\$?\{?Stage.*,"\*"\]\}': "On AWS the stage's own state machine; "
    "the emulator compares task tokens with `*` only.",
}


def check(app: cdk.App) -> None:
    """Have the packs look at the app when it is synthesized; a finding that no row excuses fails the synthesis."""
    for stack in app.node.children:
        if isinstance(stack, cdk.Stack):
            acknowledge(stack)
    cdk.Validations.of(app).add_plugins(*(pack(app) for pack in PACKS.values()))


def acknowledge(stack: cdk.Stack) -> None:
    """Give each construct the excuses that its path has."""
    for construct in stack.node.find_all():
        path = construct.node.path.removeprefix(f"{stack.node.path}/")
        for excuse in EXCUSES:
            if re.fullmatch(rf"{excuse.where}(/Resource)?", path):
                _say(construct, excuse.rule, excuse.why)
        for finding, why in excused_wildcards(stack.resolve(_policies_of(construct))):
            _say(construct, f"AwsSolutions-IAM5[Resource::{finding}]", why)


def _policies_of(construct: IConstruct) -> Any:
    if isinstance(construct, iam.CfnRole):
        return construct.policies or []
    return [{"policyDocument": construct.policy_document}] if isinstance(construct, iam.CfnPolicy) else []


def _say(construct: IConstruct, rule: str, why: str) -> None:
    pack = next(name for name in PACKS if rule.startswith(name))
    cdk.Validations.of(construct).acknowledge(cdk.Acknowledgment(id=f"{pack}::{rule}", reason=why))


def excused_wildcards(policies: Any) -> Iterator[tuple[str, str]]:
    """`(resource as cdk-nag writes it, why)` of every wildcard that a row knows."""
    for policy in policies:
        for statement in policy["policyDocument"]["Statement"]:
            resources = statement["Resource"]
            for resource in resources if isinstance(resources, list) else [resources]:
                text = _as_finding(resource)
                why = next((why for pattern, why in WILDCARDS.items() if re.fullmatch(pattern, text)), None)
                if "*" in text and why:
                    yield text, why


def _as_finding(resource: Any) -> str:
    if isinstance(resource, dict) and "Fn::Sub" in resource:
        resource = resource["Fn::Sub"]
    if not isinstance(resource, str):
        return json.dumps(resource, separators=(",", ":"))
    return re.sub(r"\$\{([^!}][^}]*)\}", r"<\1>", resource)
