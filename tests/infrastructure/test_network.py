"""A stage with a network of its own: no way out of it, and jobs that stand in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infrastructure.network import ENDPOINTS, ZONES


@pytest.fixture(scope="module")
def template(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from infrastructure.app import build_app

    work = tmp_path_factory.mktemp("network")
    context = {"stage": "dev", "image_uri": "image:1", "vpc": "true"}
    assembly = build_app(root=root, build=work / "lambda", outdir=work / "out", context=context).synth()
    made: dict[str, Any] = json.loads(Path(assembly.stacks[0].template_full_path).read_text("utf-8"))
    return made


def of_type(template: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [each["Properties"] for each in template["Resources"].values() if each["Type"] == kind]


def test_nothing_leads_to_the_internet(template: dict[str, Any]) -> None:
    kinds = {each["Type"] for each in template["Resources"].values()}
    assert not kinds & {
        "AWS::EC2::InternetGateway",
        "AWS::EC2::NatGateway",
        "AWS::EC2::VPCGatewayAttachment",
        "AWS::EC2::Route",
    }
    assert not [kind for kind in kinds if kind.startswith("Custom::")]
    subnets = of_type(template, "AWS::EC2::Subnet")
    assert len(subnets) == ZONES
    assert {each["MapPublicIpOnLaunch"] for each in subnets} == {False}


def test_s3_is_reached_for_nothing_and_the_rest_through_endpoints_that_only_jobs_may_call(
    template: dict[str, Any],
) -> None:
    endpoints = of_type(template, "AWS::EC2::VPCEndpoint")
    gateways = [each for each in endpoints if each["VpcEndpointType"] == "Gateway"]
    assert len(gateways) == 2
    named = [json.dumps(each["ServiceName"]) for each in endpoints if each["VpcEndpointType"] == "Interface"]
    assert [any(name in text for text in named) for name in ENDPOINTS] == [True] * len(ENDPOINTS)
    assert len(named) == len(ENDPOINTS)
    assert all(each["PrivateDnsEnabled"] for each in endpoints if each["VpcEndpointType"] == "Interface")
    rules = of_type(template, "AWS::EC2::SecurityGroupIngress")
    assert all("SourceSecurityGroupId" in each and "CidrIp" not in each for each in rules)
    assert all(not group.get("SecurityGroupIngress") for group in of_type(template, "AWS::EC2::SecurityGroup"))


def test_jobs_stand_in_it_and_their_roles_may(template: dict[str, Any]) -> None:
    functions = {each["Handler"]: each for each in of_type(template, "AWS::Lambda::Function")}
    for handler, function in functions.items():
        variables = function["Environment"]["Variables"]
        assert ("JOB_SUBNETS" in variables) is ("JOB_SECURITY_GROUPS" in variables) is ("launch_training" in handler)
    subnets = functions["functions.launch_training.handler"]["Environment"]["Variables"]["JOB_SUBNETS"]["Fn::Join"]
    assert (subnets[0], len(subnets[1])) == (",", ZONES)
    admitted = [each for each in of_type(template, "AWS::IAM::Policy") if "StandInNetwork" in json.dumps(each)]
    trusted = {key: json.dumps(each["Properties"]["AssumeRolePolicyDocument"])
               for key, each in template["Resources"].items() if each["Type"] == "AWS::IAM::Role"}  # fmt: skip
    roles = [key for key, trust in trusted.items() if "sagemaker.amazonaws.com" in trust]
    assert sorted(role["Ref"] for each in admitted for role in each["Roles"]) == sorted(roles)


def test_who_talks_to_whom_is_written_down_under_the_stages_key(template: dict[str, Any]) -> None:
    (flows,) = of_type(template, "AWS::EC2::FlowLog")
    assert flows["TrafficType"] == "ALL"
    groups = of_type(template, "AWS::Logs::LogGroup")
    assert all(each["KmsKeyId"] == {"Fn::GetAtt": ["StageKey", "Arn"]} for each in groups)


def test_a_stage_has_none_unless_it_is_asked_for(raw: dict[str, Any]) -> None:
    assert not [each for each in raw["Resources"].values() if each["Type"].startswith("AWS::EC2::")]
    assert "JOB_SUBNETS" not in json.dumps(raw)
