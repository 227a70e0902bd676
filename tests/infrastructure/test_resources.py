"""What the stack is made of: names, joins between its parts, and what no emulator judges but IAM (test_permissions)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest

from infrastructure.alarms import ALARMS, SETTLING
from microtuning_core.domain.mirror import LATE_MIRRORS

if TYPE_CHECKING:
    from pathlib import Path

# What the emulator refuses, template and all, unless a condition takes it away (docs/local-cloud.md).
REFUSED_BY_THE_EMULATOR = (
    "AWS::SageMaker::", "AWS::Budgets::", "AWS::CloudTrail::", "AWS::CloudWatch::CompositeAlarm",
    "AWS::CloudWatch::AnomalyDetector", "AWS::Logs::QueryDefinition", "AWS::Events::Archive", "AWS::Events::Connection",
    "AWS::StepFunctions::Activity", "AWS::XRay::", "AWS::SSM::Document", "AWS::Synthetics::", "AWS::ResourceGroups::",
)  # fmt: skip


def test_the_kept_template_and_tenants_are_what_the_app_gives(raw: dict[str, Any]) -> None:
    from infrastructure.keep_template import KEPT, KEPT_TENANTS, as_text, kept_tenants, with_names_for_hashes

    kept = KEPT.read_text(encoding="utf-8")
    assert kept == as_text(with_names_for_hashes(raw)), f"{KEPT} is out of date. Run make template and commit it."
    assert KEPT_TENANTS.read_text(encoding="utf-8") == kept_tenants(), "Run make template and commit it."


def test_templates_of_two_stages_differ_by_parameters_defaults_and_tenants_alone(
    raw: dict[str, Any], raw_dev: dict[str, Any]
) -> None:
    from infrastructure.keep_template import with_names_for_hashes

    local, dev = (with_names_for_hashes(each)["Resources"] for each in (raw, raw_dev))
    # The roles of functions name the roles and keys of tenants.
    common = [
        {key: each for key, each in resources.items() if "Tenant" not in key and each["Type"] != "AWS::IAM::Role"}
        for resources in (local, dev)
    ]
    assert common[0] == common[1] and len(common[0]) > 50


def test_the_kept_template_names_thirteen_zips_by_function_and_holds_no_hash(root: Path) -> None:
    from infrastructure.functions import FUNCTIONS
    from infrastructure.keep_template import KEPT

    template = json.loads(KEPT.read_text(encoding="utf-8"))
    functions = [each for each in template["Resources"].values() if each["Type"] == "AWS::Lambda::Function"]
    keys = {each["Properties"]["Code"]["S3Key"] for each in functions}
    assert keys == {f"functions/{row.name}.zip" for row in FUNCTIONS}
    assert len(keys) == 13
    buckets = [each["Properties"]["Code"]["S3Bucket"] for each in functions]
    assert buckets == [{"Fn::Sub": "cdk-hnb659fds-assets-${AWS::AccountId}-${AWS::Region}"}] * 13
    image = functions[0]["Properties"]["Environment"]["Variables"]["TRAINING_IMAGE_URI"]["Fn::If"][2]["Fn::Sub"]
    assert image.endswith("cdk-hnb659fds-container-assets-${AWS::AccountId}-${AWS::Region}:training")


def test_every_name_is_the_one_the_sdk_computes(aws: Any) -> None:
    from microtuning_core.domain.names import StackNames

    names = StackNames("dev", "111122223333", "us-east-1")
    assert names.bucket in {each["BucketName"] for each in aws.of_type("AWS::S3::Bucket").values()}
    tables = {each["TableName"] for each in aws.of_type("AWS::DynamoDB::Table").values()}
    assert tables == {names.table(each) for each in ("runs", "ledger", "tenants", "idempotency")}
    assert aws.only("AWS::StepFunctions::StateMachine")["StateMachineName"] == names.stack
    roles = {each["RoleName"] for each in aws.of_type("AWS::IAM::Role").values() if "RoleName" in each}
    tenants = ("default", "research", "product")
    computed = [f(tenant) for f in (names.job_role_arn, names.user_role_arn) for tenant in tenants]
    assert roles == {arn.rsplit("/", 1)[1] for arn in computed}
    aliases = {each["AliasName"] for each in aws.of_type("AWS::KMS::Alias").values()}
    assert names.tenant_key_arn("research").rsplit(":", 1)[1] in aliases
    assert aws.function("on_command")["FunctionName"] == names.function("on_command")
    assert aws.function("on_command")["Environment"]["Variables"]["STATE_MACHINE_ARN"] == names.state_machine_arn


def test_functions_rows_files_and_placeholders_agree(root: Path, aws: Any) -> None:
    from infrastructure.bundles import handler_names
    from infrastructure.functions import FUNCTIONS

    rows = {row.name for row in FUNCTIONS}
    assert rows == set(handler_names(root)), "FUNCTIONS (infrastructure/functions.py) and functions/ differ"
    machine = aws.only("AWS::StepFunctions::StateMachine")
    placeholders = {name.removesuffix("_arn") for name in machine["DefinitionSubstitutions"] if name.endswith("_arn")}
    assert placeholders == {"plan_attempt", "register_model", "close_run"}
    assert placeholders <= rows
    woken = {row.name for row in FUNCTIONS if row.queues}
    assert woken | placeholders == rows, "a function that neither a queue nor the state machine wakes"


def test_every_grant_of_a_row_exists_and_every_grant_is_used() -> None:
    from infrastructure.functions import COMMON_GRANTS, FUNCTIONS
    from infrastructure.tenant_grants import all_grants
    from microtuning_core.domain.tenants import StageTenants

    used = {grant for row in FUNCTIONS for grant in row.grants} | set(COMMON_GRANTS)
    assert used == set(all_grants(StageTenants())) == set(all_grants(StageTenants(isolation="session-tags")))


def test_every_function_finds_in_its_environment_what_it_asks_for(aws: Any, emulated: Any) -> None:
    from functions._environment import Environment

    for stack, stage in ((aws, "dev"), (emulated, "local")):
        for function in stack.of_type("AWS::Lambda::Function").values():
            given = function["Environment"]["Variables"]
            assert Environment.model_validate(given | {"AWS_REGION": "us-east-1"}).stage == stage
            assert function["Handler"] == f"functions.{given['POWERTOOLS_SERVICE_NAME']}.handler"


def test_a_function_runs_on_arm_with_python_312_and_powertools_from_aws_layer_37(aws: Any) -> None:
    for function in aws.of_type("AWS::Lambda::Function").values():
        assert (function["Runtime"], function["Architectures"]) == ("python3.12", ["arm64"])
        layer = "arn:aws:lambda:us-east-1:017000801446:layer:AWSLambdaPowertoolsPythonV3-python312-arm64:37"
        assert function["Layers"] == [layer]
        assert function["TracingConfig"] == {"Mode": "Active"}


def test_every_queue_has_a_dead_letter_queue_that_gets_what_failed_four_times(aws: Any) -> None:
    queues = {each["QueueName"]: each for each in aws.of_type("AWS::SQS::Queue").values()}
    ids = {each["QueueName"]: key for key, each in aws.of_type("AWS::SQS::Queue").items()}
    working = {name for name in queues if not name.endswith("-dlq")}
    assert len(working) == 9
    for name in working:
        redrive = queues[name]["RedrivePolicy"]
        assert redrive == {"deadLetterTargetArn": f"{ids[f'{name}-dlq']}.Arn", "maxReceiveCount": 4}
    assert set(queues) == working | {f"{name}-dlq" for name in working}
    assert all(each["SqsManagedSseEnabled"] is True for each in queues.values())


def test_every_queue_is_read_two_at_a_time_and_only_what_failed_goes_back(aws: Any) -> None:
    ids = {f"{key}.Arn": each["QueueName"] for key, each in aws.of_type("AWS::SQS::Queue").items()}
    mappings = list(aws.of_type("AWS::Lambda::EventSourceMapping").values())
    assert sorted(ids[each["EventSourceArn"]] for each in mappings) == sorted(ids.values())
    for each in mappings:
        assert each["ScalingConfig"] == {"MaximumConcurrency": 2}
        assert each["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
        alone = ids[each["EventSourceArn"]] in ("microtuning-dev-admissions", "microtuning-dev-launches")
        assert each["BatchSize"] == (1 if alone else 10)
    readers = {ids[each["EventSourceArn"]]: aws.resources[each["FunctionName"]]["Properties"] for each in mappings}
    dead = [each["Handler"] for name, each in readers.items() if name.endswith("-dlq")]
    assert dead == ["functions.on_dead_letter.handler"] * 9


def test_no_message_shows_up_again_while_its_function_may_still_run(aws: Any) -> None:
    hidden_s = {int(each["VisibilityTimeout"]) for each in aws.of_type("AWS::SQS::Queue").values()}
    longest_s = max(each["Timeout"] for each in aws.of_type("AWS::Lambda::Function").values())
    assert hidden_s == {180}
    assert longest_s < 180


def test_queues_refuse_plain_http_and_take_events_of_our_rules_only(aws: Any) -> None:
    policies = list(aws.of_type("AWS::SQS::QueuePolicy").values())
    assert len(policies) == 18
    rules = {each["Name"] for each in aws.of_type("AWS::Events::Rule").values()}
    for policy in policies:
        statements = {each["Sid"]: each for each in policy["PolicyDocument"]["Statement"]}
        tls = statements.pop("TlsOnly")
        assert (tls["Effect"], tls["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
        for events in statements.values():
            assert events["Principal"] == {"Service": "events.amazonaws.com"}
            sources = events["Condition"]["ArnEquals"]["aws:SourceArn"]
            assert {each.rsplit("rule/", 1)[1] for each in sources} <= rules


def _bucket(stack: Any, ending: str) -> dict[str, Any]:
    (bucket,) = [each for each in stack.of_type("AWS::S3::Bucket").values() if each["BucketName"].endswith(ending)]
    return bucket


def test_the_bucket_is_versioned_private_encrypted_tls_only_and_tells_eventbridge(aws: Any) -> None:
    bucket = _bucket(aws, "us-east-1")
    assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert bucket["NotificationConfiguration"] == {"EventBridgeConfiguration": {"EventBridgeEnabled": True}}
    (encryption,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert encryption["BucketKeyEnabled"] is True
    by_default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "StageKey.Arn"}
    assert encryption["ServerSideEncryptionByDefault"] == by_default
    policies = aws.of_type("AWS::S3::BucketPolicy").values()
    assert len(policies) == len(aws.of_type("AWS::S3::Bucket")) == 2
    for policy in policies:
        tls = policy["PolicyDocument"]["Statement"][0]
        assert (tls["Effect"], tls["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
    lifecycle = {each["Id"]: each for each in bucket["LifecycleConfiguration"]["Rules"]}
    assert lifecycle["old-versions"]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 7}
    assert lifecycle["unfinished-uploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}


def test_who_reads_and_writes_the_bucket_is_logged_on_aws_where_only_s3_itself_writes(aws: Any, emulated: Any) -> None:
    logs, bucket = _bucket(aws, "-access"), _bucket(aws, "us-east-1")
    assert bucket["LoggingConfiguration"] == {"DestinationBucketName": logs["BucketName"]}
    assert set(logs["PublicAccessBlockConfiguration"].values()) == {True}
    (rule,) = logs["LifecycleConfiguration"]["Rules"]
    assert rule["ExpirationInDays"] == 90
    statements = [each for policy in aws.of_type("AWS::S3::BucketPolicy").values()
                  for each in policy["PolicyDocument"]["Statement"] if each["Effect"] == "Allow"]  # fmt: skip
    (delivery,) = statements
    assert delivery["Principal"] == {"Service": "logging.s3.amazonaws.com"}
    assert delivery["Condition"]["ArnLike"] == {"aws:SourceArn": f"arn:aws:s3:::{bucket['BucketName']}"}
    assert [each["BucketName"] for each in emulated.of_type("AWS::S3::Bucket").values()] == [
        "microtuning-local-111122223333-us-east-1"
    ]


def test_records_outlive_the_stack_and_nothing_else_does(aws: Any) -> None:
    kept = {key: each for key, each in aws.resources.items() if each.get("DeletionPolicy", "Delete") != "Delete"}
    assert {each["DeletionPolicy"] for each in kept.values()} == {"RetainExceptOnCreate"}
    names = sorted(each["Properties"].get("TableName", each["Type"]) for each in kept.values())
    tables = ["microtuning-dev-ledger", "microtuning-dev-runs", "microtuning-dev-tenants"]
    assert names == [
        "AWS::KMS::Key",
        "AWS::KMS::Key",
        "AWS::S3::Bucket",
        "AWS::S3::Bucket",
        *tables,
    ]  # the stage's key and research's own


def test_tables_have_the_keys_their_stores_use(aws: Any) -> None:
    tables = {each["TableName"].removeprefix("microtuning-dev-"): each for each in _tables(aws)}
    for name in ("runs", "ledger", "tenants"):
        assert [each["AttributeName"] for each in tables[name]["KeySchema"]] == ["pk", "sk"]
    (index,) = tables["runs"]["GlobalSecondaryIndexes"]
    assert index["IndexName"] == "by_created"
    assert [each["AttributeName"] for each in index["KeySchema"]] == ["gsi1pk", "gsi1sk"]
    assert [each["AttributeName"] for each in tables["idempotency"]["KeySchema"]] == ["id"]
    assert tables["idempotency"]["TimeToLiveSpecification"] == {"AttributeName": "expiration", "Enabled": True}
    for table in tables.values():
        assert table["BillingMode"] == "PAY_PER_REQUEST"
        assert table["PointInTimeRecoverySpecification"]["PointInTimeRecoveryEnabled"] is True


def _tables(stack: Any) -> list[dict[str, Any]]:
    return list(stack.of_type("AWS::DynamoDB::Table").values())


def test_every_log_group_is_emptied_after_thirty_days_and_every_function_writes_to_its_own(aws: Any) -> None:
    groups = aws.of_type("AWS::Logs::LogGroup")
    assert len(groups) == 14
    assert {each["RetentionInDays"] for each in groups.values()} == {30}
    assert {each["KmsKeyId"] for each in groups.values()} == {"StageKey.Arn"}
    for function in aws.of_type("AWS::Lambda::Function").values():
        name = function["Environment"]["Variables"]["POWERTOOLS_SERVICE_NAME"]
        assert groups[function["LoggingConfig"]["LogGroup"]]["LogGroupName"] == f"/microtuning/dev/{name}"


def test_no_custom_resource_no_metadata_and_no_rule_of_the_bootstrap_version(raw: dict[str, Any]) -> None:
    kinds = {each["Type"] for each in raw["Resources"].values()}
    custom = {kind for kind in kinds if kind.startswith(("Custom::", "AWS::CloudFormation::CustomResource"))}
    assert custom == set()
    assert "AWS::CDK::Metadata" not in kinds
    assert "Rules" not in raw
    assert "BootstrapVersion" not in raw["Parameters"]


def test_what_the_emulator_refuses_is_only_there_on_aws(raw: dict[str, Any]) -> None:
    for name, each in raw["Resources"].items():
        if each["Type"].startswith(REFUSED_BY_THE_EMULATOR):
            assert each.get("Condition") == "IsOnAws", f"{name} needs cfn_options.condition"


def test_off_aws_there_is_no_layer_no_tracing_and_no_refusal_of_plain_http(emulated: Any) -> None:
    for function in emulated.of_type("AWS::Lambda::Function").values():
        assert "Layers" not in function
        assert function["TracingConfig"] == {"Mode": "PassThrough"}
        assert function["Environment"]["Variables"]["TRAINING_IMAGE_URI"] == "local/microtuning-training:1"
    assert emulated.of_type("AWS::S3::BucketPolicy") == {}
    policies = emulated.of_type("AWS::SQS::QueuePolicy").values()
    effects = {each["Effect"] for policy in policies for each in policy["PolicyDocument"]["Statement"]}
    assert effects == {"Allow"}


def test_rules_and_their_queues(aws: Any) -> None:
    ids = {f"{key}.Arn": each["QueueName"] for key, each in aws.of_type("AWS::SQS::Queue").items()}
    rules = aws.of_type("AWS::Events::Rule").values()
    assert len(rules) == 7
    for rule in rules:
        (target,) = rule["Targets"]
        assert ids[target["Arn"]] == rule["Name"]
        assert ids[target["DeadLetterConfig"]["Arn"]] == f"{rule['Name']}-dlq"


@pytest.mark.parametrize("name", ["training-events", "cost-events"])
def test_both_job_rules_hear_of_this_stages_jobs_from_the_stages_source(name: str, aws: Any, emulated: Any) -> None:
    for stack, stage, source in ((aws, "dev", "aws.sagemaker"), (emulated, "local", "local.sagemaker")):
        rules = {each["Name"]: each for each in stack.of_type("AWS::Events::Rule").values()}
        pattern = rules[f"microtuning-{stage}-{name}"]["EventPattern"]
        assert pattern["source"] == [source]
        assert pattern["detail"] == {"TrainingJobName": [{"prefix": f"{stage}-"}]}


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("tenants/acme/specs/sort.yaml", "specs"),
        ("tenants/acme/commands/acme-sort-0a1b2c3d4e5f/1.json", "commands"),
        ("tenants/acme/runs/acme-sort-0a1b2c3d4e5f/checkpoints/l01/step-20/manifest.json", "checkpoints"),
        ("tenants/acme/runs/acme-sort-0a1b2c3d4e5f/checkpoints/l01/progress.json", "checkpoints"),
        ("tenants/acme/runs/acme-sort-0a1b2c3d4e5f/checkpoints/l01/step-20/model.safetensors", None),
        ("tenants/acme/receipts/sort.yaml.json", None),
        ("tenants/acme/runs/acme-sort-0a1b2c3d4e5f/run.json", None),
        ("tenants/acme/datasets/0f/train.jsonl", None),
    ],
)
def test_which_object_wakes_which_queue(key: str, rule: str | None, aws: Any) -> None:
    assert _rules_that_match(key, aws) == ([f"microtuning-dev-{rule}"] if rule else [])


def test_nothing_a_function_writes_starts_a_run_or_is_a_command(aws: Any) -> None:
    prefix = "arn:aws:s3:::microtuning-dev-111122223333-us-east-1/"
    written = {
        resource.removeprefix(prefix).replace("*", "x")
        for row in aws.of_type("AWS::Lambda::Function").values()
        for statement in aws.statements_of_role(row["Role"].removesuffix(".Arn"))
        if "s3:PutObject" in _as_list(statement["Action"])
        for resource in _as_list(statement["Resource"])
    }
    assert written == {
        "tenants/x/receipts/x", "tenants/x/runs/x/run.json", "tenants/x/runs/x/config/x", "tenants/x/models/x",
        "tenants/x/runs/x/kept/x",
    }  # fmt: skip
    assert [each for key in written for each in _rules_that_match(key, aws)] == []


def _rules_that_match(key: str, stack: Any) -> list[str]:
    """EventBridge's `*` stands for any text, slashes too, as in fnmatch."""
    matching = []
    for rule in stack.of_type("AWS::Events::Rule").values():
        patterns = rule.get("EventPattern", {}).get("detail", {}).get("object", {}).get("key", [])
        if any(fnmatchcase(key, each["wildcard"]) for each in patterns):
            matching.append(rule["Name"])
    return matching


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_the_state_machine_logs_failures_is_traced_and_has_all_its_placeholders(aws: Any) -> None:
    machine = aws.only("AWS::StepFunctions::StateMachine")
    assert machine["LoggingConfiguration"]["Level"] == "ERROR"
    assert machine["LoggingConfiguration"]["IncludeExecutionData"] is False
    assert machine["TracingConfiguration"] == {"Enabled": True}
    from infrastructure.workflow import DEFINITION

    text = DEFINITION.read_text(encoding="utf-8")
    for name in machine["DefinitionSubstitutions"]:
        text = text.replace(f"${{{name}}}", "")
    assert "${" not in text


def test_every_task_has_one_catch_for_everything_and_waits_have_thirty_days() -> None:
    from infrastructure.workflow import definition

    tasks = {name: each for name, each in definition()["States"].items() if each["Type"] == "Task"}
    nexts = {name: each["Catch"][0]["Next"] for name, each in tasks.items()}
    assert nexts == {
        "Admit run": "Close run",
        "Plan attempt": "Close run",
        "Train": "What happened?",
        "Register model": "Close run",
        "Close run": "Failed",
    }
    for task in tasks.values():
        assert [each["ErrorEquals"] for each in task["Catch"]] == [["States.ALL"]]
        if task["Resource"].endswith("sqs:sendMessage.waitForTaskToken"):
            assert task["TimeoutSeconds"] == 30 * 24 * 3600
        else:
            assert task["Resource"] == "arn:aws:states:::lambda:invoke"
            of_the_service, of_anything = task["Retry"]
            assert all(each.startswith("Lambda.") for each in of_the_service["ErrorEquals"])
            assert (of_anything["ErrorEquals"], of_anything["MaxAttempts"]) == (["States.ALL"], 4)


def test_an_alarm_watches_whether_checkpoints_reach_s3_by_the_metric_that_reconcile_writes(aws: Any) -> None:
    (alarm,) = [
        each for each in aws.of_type("AWS::CloudWatch::Alarm").values() if each.get("MetricName") == LATE_MIRRORS
    ]
    (reconcile,) = [each for each in aws.of_type("AWS::Lambda::Function").values() if "reconcile" in each["Handler"]]
    written = reconcile["Environment"]["Variables"]
    assert alarm["Namespace"] == written["POWERTOOLS_METRICS_NAMESPACE"]
    assert alarm["Dimensions"] == [{"Name": "service", "Value": written["POWERTOOLS_SERVICE_NAME"]}]


def test_every_alarm_watches_something_that_is_there_and_tells_the_one_topic(aws: Any) -> None:
    alarms = list(aws.of_type("AWS::CloudWatch::Alarm").values())
    assert sorted(each["AlarmName"] for each in alarms) == sorted(f"microtuning-dev-{row.name}" for row in ALARMS)
    (topic,) = aws.of_type("AWS::SNS::Topic")
    assert aws.only("AWS::SNS::Topic")["KmsMasterKeyId"] == "StageKey.Arn"
    functions = {each["FunctionName"] for each in aws.of_type("AWS::Lambda::Function").values()}
    services = {each["Environment"]["Variables"]["POWERTOOLS_SERVICE_NAME"]
                for each in aws.of_type("AWS::Lambda::Function").values()}  # fmt: skip
    machine = "arn:aws:states:us-east-1:111122223333:stateMachine:microtuning-dev"
    there = {"FunctionName": functions, "service": services, "StateMachineArn": {machine}}
    for alarm in alarms:
        assert alarm["AlarmActions"] == [topic]
        assert alarm["TreatMissingData"] == "notBreaching"
        metrics = [each["MetricStat"]["Metric"] for each in alarm.get("Metrics", []) if "MetricStat" in each]
        dimensions = [each for metric in metrics or [alarm] for each in metric["Dimensions"]]
        assert dimensions and all(each["Value"] in there[each["Name"]] for each in dimensions)


def test_whoever_may_stop_a_run_for_its_budget_is_heard_by_the_alarm(aws: Any) -> None:
    """Those that settle runs: they may ask SageMaker to stop a job."""
    settles = {
        function["Environment"]["Variables"]["POWERTOOLS_SERVICE_NAME"]
        for function in aws.of_type("AWS::Lambda::Function").values()
        for statement in aws.statements_of_role(function["Role"].removesuffix(".Arn"))
        if "sagemaker:StopTrainingJob" in statement["Action"]
    }
    assert settles <= set(SETTLING)
    assert len(SETTLING) <= 10


def test_cloudwatch_may_speak_through_the_key_to_the_topic_and_logs_may_use_it(aws: Any) -> None:
    (key,) = [each for name, each in aws.of_type("AWS::KMS::Key").items() if name == "StageKey"]
    statements = {each.get("Sid"): each for each in key["KeyPolicy"]["Statement"]}
    assert statements["AlarmsOfThisAccount"]["Principal"] == {"Service": "cloudwatch.amazonaws.com"}
    logs = statements["LogsOfThisAccount"]
    assert logs["Principal"] == {"Service": "logs.us-east-1.amazonaws.com"}
    assert logs["Condition"]["ArnLike"] == {
        "kms:EncryptionContext:aws:logs:arn": "arn:aws:logs:us-east-1:111122223333:log-group:*"
    }
    (publish,) = [each for each in aws.only("AWS::SNS::TopicPolicy")["PolicyDocument"]["Statement"]
                  if each["Effect"] == "Allow"]  # fmt: skip
    assert publish["Condition"] == {"StringEquals": {"aws:SourceAccount": "111122223333"}}


def test_every_alarm_has_a_runbook_and_every_runbook_an_alarm(root: Path) -> None:
    page = (root / "docs" / "operations.md").read_text("utf-8")
    assert set(re.findall(r"^### ([\w-]+)$", page, re.MULTILINE)) == {row.name for row in ALARMS}


def test_cfn_lint_finds_nothing() -> None:
    """W3005 is ignored: CDK lets a function depend on its role although it names it; that is redundant, not wrong."""
    from infrastructure.keep_template import KEPT

    lint = [sys.executable, "-c", "import sys; from cfnlint.runner import main; sys.exit(main())"]
    done = subprocess.run(
        [*lint, "--ignore-checks", "W3005", "--", str(KEPT)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
