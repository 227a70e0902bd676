"""What an AWS account must have before a stage can work in it, as `microtuning doctor` asks: bootstrap, quotas, the image.

Each is asked with the caller's own rights; what those do not show is said, with the right that would, and is no fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from microtuning_core.domain.catalog import CATALOG
from microtuning_sdk.cli._findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from microtuning_sdk._connection import Stage

TOOLKIT = "CDKToolkit"
LEAST_BOOTSTRAP = 6  # the first whose buckets and roles CDK's present assets use
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError"})
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<repository>[a-z0-9._/-]+?)(?::(?P<tag>[\w.-]+)|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
# As Service Quotas names them, after the instance type.
_KINDS = {
    "training": "for training job usage",
    "spot": "for spot training job usage",
    "warm pools": "for training warm pool usage",
}


@dataclass(frozen=True)
class Quota:
    """How many instances of one type the account may use at once, and the code under which more is requested."""

    instance_type: str
    count: int
    code: str


def examine_account(stage: Stage) -> Iterator[Finding]:
    """The account and region of a stage on AWS."""
    names = stage.names
    yield Finding("account", f"{names.account} in {names.region}")
    yield _seen("bootstrap", "cloudformation:DescribeStacks", lambda: bootstrap(stage))
    yield _seen("image", "lambda:GetFunctionConfiguration and ecr:DescribeImages", lambda: image(stage))
    try:
        found = quotas(stage.session.client("service-quotas"))
    except ClientError as error:
        yield _not_shown("quotas", "servicequotas:ListServiceQuotas", error)
        return
    yield from (quota_finding(kind, found[kind]) for kind in _KINDS)


def _seen(what: str, right: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except ClientError as error:
        return _not_shown(what, right, error)


def _not_shown(what: str, right: str, error: ClientError) -> Finding:
    """A right that is lacking is no fault of the account; whatever else was answered is raised."""
    if error.response["Error"]["Code"] not in _DENIED:
        raise error
    return Finding(what, f"not shown to you; whoever may {right} can run this too")


# --- bootstrap and image ---------------------------------------------------------------------------------------------


def bootstrap(stage: Stage) -> Finding:
    where = f"aws://{stage.names.account}/{stage.names.region}"
    try:
        answer = stage.session.client("cloudformation").describe_stacks(StackName=TOOLKIT)
    except ClientError as error:
        if error.response["Error"]["Code"] != "ValidationError":  # so CloudFormation says that there is none
            raise
        return Finding(
            "bootstrap", f"there is no {TOOLKIT}", f"Run `cdk bootstrap {where}`, once an account and region."
        )
    outputs = {each["OutputKey"]: each["OutputValue"] for each in answer["Stacks"][0].get("Outputs", [])}
    version = int(outputs.get("BootstrapVersion", "0"))
    step = "" if version >= LEAST_BOOTSTRAP else f"Run `cdk bootstrap {where}` again: it is older than assets need."
    return Finding("bootstrap", f"{TOOLKIT} version {version}", step)


def image(stage: Stage) -> Finding:
    """The image that launch_training names, in the registry it names."""
    function = stage.names.function("launch_training")
    settings = stage.session.client("lambda").get_function_configuration(FunctionName=function)
    uri = settings["Environment"]["Variables"]["TRAINING_IMAGE_URI"]
    place = _ECR.fullmatch(uri)
    if place is None:
        return Finding(
            "image", f"{uri} is in no ECR", "SageMaker pulls from ECR only: deploy with -c image_uri=<ECR address>."
        )
    which = {"imageDigest": place["digest"]} if place["digest"] else {"imageTag": place["tag"] or "latest"}
    ecr = stage.session.client("ecr", region_name=place["region"])
    asked = {"registryId": place["account"], "repositoryName": place["repository"], "imageIds": [which]}
    try:
        (found,) = ecr.describe_images(**asked)["imageDetails"]
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("ImageNotFoundException", "RepositoryNotFoundException"):
            raise
        return Finding(
            "image", f"{uri} is not there", f"Push it, or deploy again: `cdk deploy -c stage={stage.names.stage}`."
        )
    return Finding("image", f"{uri}, {found['imageSizeInBytes'] / 1e9:.1f} GB")


# --- quotas ----------------------------------------------------------------------------------------------------------


def quotas(client: Any) -> dict[str, list[Quota]]:
    """Of each kind of use, the quota of every type of the catalog: the account's own, else AWS's default.

    ListServiceQuotas leaves out what was never applied to the account; the defaults tell of the rest.
    """
    applied = _listed(client, "list_service_quotas")
    missing = {name for kind in _KINDS for name in _names(kind)} - applied.keys()
    defaults = _listed(client, "list_aws_default_service_quotas") if missing else {}
    told = defaults | applied
    return {
        kind: [_quota(each, told[name]) for each, name in zip(CATALOG, _names(kind), strict=True) if name in told]
        for kind in _KINDS
    }


def _names(kind: str) -> list[str]:
    return [f"{each} {_KINDS[kind]}" for each in CATALOG]


def _listed(client: Any, operation: str) -> dict[str, Mapping[str, Any]]:
    pages = client.get_paginator(operation).paginate(ServiceCode="sagemaker")
    return {each["QuotaName"]: each for page in pages for each in page["Quotas"]}


def _quota(instance_type: str, row: Mapping[str, Any]) -> Quota:
    return Quota(instance_type, int(row["Value"]), row["QuotaCode"])


def quota_finding(kind: str, found: Iterable[Quota]) -> Finding:
    """What the account may use, and what to request. Without machines to train on there is nothing to be done; spot and
    warm pools only make runs cheaper or quicker to come back."""
    given = [each for each in found if each.count]
    none = [each for each in found if not each.count]
    told = ", ".join(f"{each.count} x {each.instance_type}" for each in given) or "none of any type"
    requests = (
        f"; none, to be requested by code: {', '.join(f'{e.instance_type} {e.code}' for e in none)}" if none else ""
    )
    step = _step(kind, given, none)
    return Finding(f"quota {kind}", told + requests, step)


def _step(kind: str, given: list[Quota], none: list[Quota]) -> str:
    if kind != "training":
        return ""
    if not given:
        return f"Request one of a type: {_command(none)}" if none else "Service Quotas told of no type of the catalog."
    has_gpu = any(CATALOG[each.instance_type].gpus for each in given)
    gpus = [each for each in none if CATALOG[each.instance_type].gpus]
    return "" if has_gpu or not gpus else f"No GPU type can be used. Request one: {_command(gpus)}"


def _command(wanted: list[Quota]) -> str:
    cheapest = min(wanted, key=lambda each: CATALOG[each.instance_type].price_usd_per_hour)
    return (
        "aws service-quotas request-service-quota-increase --service-code sagemaker "
        f"--quota-code {cheapest.code} --desired-value 1   # {cheapest.instance_type}"
    )
