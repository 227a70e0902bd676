"""`microtuning doctor` on an AWS account: answers in the API's own shapes, and callers who may not ask."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.names import StackNames
from microtuning_sdk.cli._account import Quota, examine_account, quota_finding, quotas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from microtuning_sdk.cli._findings import Finding

NAMES = StackNames("dev", "111122223333", "us-east-1")
URI = "111122223333.dkr.ecr.us-east-1.amazonaws.com/cdk-assets:training"
KINDS = ("training job usage", "spot training job usage", "training warm pool usage")


class Account:
    """Clients that answer as they are told; what is not told is asked of nobody."""

    names, is_local = NAMES, False

    def __init__(self) -> None:
        options = {"region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "y"}
        services = ("cloudformation", "lambda", "ecr", "service-quotas")
        self.clients = {name: boto3.client(name, **options) for name in services}  # type: ignore[call-overload]
        self.stubs = {name: Stubber(client) for name, client in self.clients.items()}
        self.session = SimpleNamespace(client=lambda name, **_: self.clients[name])
        for stub in self.stubs.values():
            stub.activate()

    def is_bootstrapped(self, version: str | None = "27") -> None:
        stub = self.stubs["cloudformation"]
        if version is None:
            stub.add_client_error("describe_stacks", "ValidationError", "Stack with id CDKToolkit does not exist", 400)
            return
        outputs = [
            {"OutputKey": "BucketName", "OutputValue": "b"},
            {"OutputKey": "BootstrapVersion", "OutputValue": version},
        ]
        stack = {
            "StackName": "CDKToolkit",
            "CreationTime": "2026-01-02T03:04:05Z",
            "StackStatus": "UPDATE_COMPLETE",
            "Outputs": outputs,
        }
        stub.add_response("describe_stacks", {"Stacks": [stack]}, {"StackName": "CDKToolkit"})

    def has_image(self, uri: str = URI, *, size: int | None = 4_200_000_000) -> None:
        told = {"FunctionName": "f", "Environment": {"Variables": {"TRAINING_IMAGE_URI": uri}}}
        asked = {"FunctionName": "microtuning-dev-launch-training"}
        self.stubs["lambda"].add_response("get_function_configuration", told, asked)
        if ".ecr." not in uri:
            return
        if size is None:
            self.stubs["ecr"].add_client_error("describe_images", "ImageNotFoundException")
            return
        which = {"imageDigest": uri.partition("@")[2]} if "@" in uri else {"imageTag": "training"}
        details = {"imageDetails": [{"registryId": "111122223333", "imageSizeInBytes": size}]}
        wanted = {"registryId": "111122223333", "repositoryName": "cdk-assets", "imageIds": [which]}
        self.stubs["ecr"].add_response("describe_images", details, wanted)

    def has_quotas(self, applied: dict[str, int], defaults: dict[str, int] | None = None) -> None:
        stub, names = self.stubs["service-quotas"], list(applied.items())
        middle = len(names) // 2
        asked: dict[str, Any] = {"ServiceCode": "sagemaker"}
        first = {"Quotas": [a_quota(*each) for each in names[:middle]], "NextToken": "more"}
        stub.add_response("list_service_quotas", first, asked)
        second = {"Quotas": [a_quota(*each) for each in names[middle:]]}
        stub.add_response("list_service_quotas", second, asked | {"NextToken": "more"})
        if defaults is not None:
            rows = {"Quotas": [a_quota(*each) for each in defaults.items()]}
            stub.add_response("list_aws_default_service_quotas", rows, asked)

    def examined(self) -> dict[str, Finding]:
        return {each.what: each for each in examine_account(self)}  # type: ignore[arg-type]


def a_quota(name: str, value: int) -> dict[str, Any]:
    """As Service Quotas has them."""
    code = f"L-{zlib.crc32(name.encode()):08X}"
    return {
        "ServiceCode": "sagemaker", "ServiceName": "Amazon SageMaker", "QuotaCode": code, "QuotaName": name,
        "QuotaArn": f"arn:aws:servicequotas:us-east-1:111122223333:sagemaker/{code}",
        "Value": float(value), "Unit": "None", "Adjustable": True, "GlobalQuota": False,
    }  # fmt: skip


def everywhere(count: int) -> dict[str, int]:
    return {f"{each} for {kind}": count for each in CATALOG for kind in KINDS}


@pytest.fixture
def account() -> Iterator[Account]:
    made = Account()
    yield made
    for stub in made.stubs.values():
        stub.assert_no_pending_responses()


def test_an_account_that_has_everything_is_well(account: Account) -> None:
    account.is_bootstrapped()
    account.has_image()
    account.has_quotas(everywhere(2) | {"ml.t3.medium for notebook instance usage": 9})
    found = account.examined()
    assert [each for each in found.values() if not each.is_well] == []
    assert found["account"].found == "111122223333 in us-east-1"
    assert found["bootstrap"].found == "CDKToolkit version 27"
    assert found["image"].found == f"{URI}, 4.2 GB"
    assert found["quota training"].found.count("2 x ml.") == len(CATALOG)
    assert list(found) == ["account", "bootstrap", "image", "quota training", "quota spot", "quota warm pools"]


@pytest.mark.parametrize(("version", "words"), [(None, "there is no CDKToolkit"), ("4", "version 4")])
def test_a_missing_or_old_bootstrap_says_what_to_type(version: str | None, words: str, account: Account) -> None:
    account.is_bootstrapped(version)
    account.has_image()
    account.has_quotas(everywhere(1))
    found = account.examined()["bootstrap"]
    assert words in found.found
    assert "cdk bootstrap aws://111122223333/us-east-1" in found.next_step


@pytest.mark.parametrize(
    ("uri", "size", "words"),
    [(URI, None, "is not there"), ("local/microtuning:1", 1, "is in no ECR"),
     (f"111122223333.dkr.ecr.us-east-1.amazonaws.com/cdk-assets@sha256:{'a' * 64}", 1_000_000_000, "1.0 GB")],
)  # fmt: skip
def test_the_image_is_looked_for_where_the_launcher_names_it(
    uri: str, size: int | None, words: str, account: Account
) -> None:
    account.is_bootstrapped()
    account.has_image(uri, size=size)
    account.has_quotas(everywhere(1))
    found = account.examined()["image"]
    assert words in found.found
    assert found.is_well is words.endswith("GB")


def test_what_the_account_has_no_quota_of_its_own_for_has_the_default(account: Account) -> None:
    applied = {"ml.m5.large for training job usage": 7}
    account.has_quotas(applied, everywhere(0))
    found = {each.instance_type: each.count for each in quotas(account.clients["service-quotas"])["training"]}
    assert found == dict.fromkeys(CATALOG, 0) | {"ml.m5.large": 7}


def test_an_account_without_gpus_is_told_the_cheapest_to_request(account: Account) -> None:
    account.is_bootstrapped()
    account.has_image()
    account.has_quotas(everywhere(0) | {"ml.m5.large for training job usage": 1})
    found = account.examined()
    cheapest = min((each for each in CATALOG.values() if each.gpus), key=lambda each: each.price_usd_per_hour)
    step = found["quota training"].next_step
    assert "No GPU type" in step
    assert "aws service-quotas request-service-quota-increase --service-code sagemaker --quota-code L-" in step
    assert step.endswith(f"# {cheapest.instance_type}")
    assert found["quota spot"].is_well  # it is only cheaper with it


def test_an_account_without_any_machine_is_told_so() -> None:
    none = [Quota(each, 0, f"L-{number}") for number, each in enumerate(CATALOG)]
    finding = quota_finding("training", none)
    assert finding.found.startswith("none of any type")
    assert "Request one of a type" in finding.next_step
    assert "told of no type" in quota_finding("training", []).next_step


@pytest.mark.parametrize("code", ["AccessDenied", "AccessDeniedException"])
def test_what_the_caller_may_not_see_is_said_with_the_right_and_is_no_fault(code: str, account: Account) -> None:
    account.stubs["cloudformation"].add_client_error("describe_stacks", code, "not authorized", 403)
    account.stubs["lambda"].add_client_error("get_function_configuration", code, "not authorized", 403)
    account.stubs["service-quotas"].add_client_error("list_service_quotas", code, "not authorized", 403)
    found = account.examined()
    assert all(each.is_well for each in found.values())
    assert "servicequotas:ListServiceQuotas" in found["quotas"].found
    assert "cloudformation:DescribeStacks" in found["bootstrap"].found
    assert "ecr:DescribeImages" in found["image"].found


def test_another_error_is_not_taken_for_a_missing_right(account: Account) -> None:
    account.stubs["cloudformation"].add_client_error("describe_stacks", "InternalFailure", "no", 500)
    with pytest.raises(ClientError):
        account.examined()
