"""The template, synthesized once a session, as the tests want to read it: with every name written out.

`aws` is what CloudFormation would make of it on AWS, `emulated` on the local cloud: conditions decided, Fn::Sub and Ref
replaced. A resource that is not there is not in the dict; GetAtt of a resource stays readable as `<LogicalId>.<Attribute>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ACCOUNT, REGION = "111122223333", "us-east-1"
_NOTHING = object()


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def raw() -> dict[str, Any]:
    """The local stage's template as synthesized; without aws-cdk-lib every test that needs it fails with the import's own
    words."""
    from infrastructure.keep_template import synthesized

    return synthesized()


@pytest.fixture(scope="session")
def raw_dev() -> dict[str, Any]:
    from infrastructure.keep_template import synthesized

    return synthesized("dev")


@dataclass
class Deployed:
    """Resources by logical id, as deployed."""

    resources: dict[str, dict[str, Any]]

    def of_type(self, kind: str) -> dict[str, dict[str, Any]]:
        """Properties by logical id."""
        return {key: each["Properties"] for key, each in self.resources.items() if each["Type"] == kind}

    def only(self, kind: str) -> dict[str, Any]:
        (properties,) = self.of_type(kind).values()
        return properties

    def function(self, name: str) -> dict[str, Any]:
        handler = f"functions.{name}.handler"
        return next(each for each in self.of_type("AWS::Lambda::Function").values() if each["Handler"] == handler)

    def statements_of(self, function: str) -> list[dict[str, Any]]:
        """What the role of a function allows."""
        return self.statements_of_role(self.function(function)["Role"].removesuffix(".Arn"))

    def statements_of_role(self, logical_id: str) -> list[dict[str, Any]]:
        policies = self.resources[logical_id]["Properties"]["Policies"]
        return [statement for each in policies for statement in each["PolicyDocument"]["Statement"]]

    def role(self, name: str) -> str:
        """The logical id of the role of that name."""
        roles = self.of_type("AWS::IAM::Role")
        return next(key for key, each in roles.items() if each.get("RoleName") == name)


def deployed(template: dict[str, Any], **given: str) -> Deployed:
    values = {
        "AWS::AccountId": ACCOUNT,
        "AWS::Region": REGION,
        "AWS::Partition": "aws",
        "AWS::URLSuffix": "amazonaws.com",
        **{name: str(each["Default"]) for name, each in template["Parameters"].items()},
        **given,
    }

    def substituted(name: str) -> str:
        return f"${{{name[1:]}}}" if name.startswith("!") else values.get(name, name)

    def decide(name: str) -> bool:
        return bool(resolve(template["Conditions"][name]))

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [each for each in map(resolve, value) if each is not _NOTHING]
        if not isinstance(value, dict):
            return value
        match value:
            case {"Ref": "AWS::NoValue"}:
                return _NOTHING
            case {"Ref": name}:
                return values.get(name, name)
            case {"Fn::Sub": text}:
                return re.sub(r"\$\{([^}]+)\}", lambda found: substituted(found[1]), text)
            case {"Fn::GetAtt": [resource, attribute]}:
                return f"{resource}.{attribute}"
            case {"Fn::Join": [separator, parts]}:
                return separator.join(resolve(parts))
            case {"Fn::If": [condition, then, otherwise]}:
                return resolve(then if decide(condition) else otherwise)
            case {"Fn::Equals": [left, right]}:
                return resolve(left) == resolve(right)
            case {"Fn::Not": [condition]}:
                return not resolve(condition)
        resolved = {key: resolve(each) for key, each in value.items()}
        return {key: each for key, each in resolved.items() if each is not _NOTHING}

    return Deployed(
        {
            key: resolve(each)
            for key, each in template["Resources"].items()
            if "Condition" not in each or decide(each["Condition"])
        }
    )


@pytest.fixture(scope="session")
def aws(raw_dev: dict[str, Any]) -> Deployed:
    """The stage dev."""
    return deployed(raw_dev)


@pytest.fixture(scope="session")
def emulated(raw: dict[str, Any]) -> Deployed:
    return deployed(
        raw,
        Stage="local",
        SageMakerEventSource="local.sagemaker",
        OnAws="false",
        TrainingImageUri="local/microtuning-training:1",
        QueueVisibilitySeconds="10",
    )
