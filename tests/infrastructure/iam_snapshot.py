"""Who may do what in the stage dev, as text that a person can read and a diff can show: iam.txt, kept by `make iam`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.infrastructure.conftest import Deployed, deployed

KEPT = Path(__file__).with_name("iam.txt")
HEADER = (
    "# Every statement of IAM in the stage dev (infrastructure/stages/dev.yaml), from the synthesized template.\n"
    "# Written by `make iam`; a change of it is a change of who may do what, and wants to be read.\n"
)
_ELSEWHERE = {  # type: (where its policy stands, what it is about)
    "AWS::KMS::Key": ("KeyPolicy", "Description"),
    "AWS::S3::BucketPolicy": ("PolicyDocument", "Bucket"),
    "AWS::SQS::QueuePolicy": ("PolicyDocument", "Queues"),
    "AWS::SNS::TopicPolicy": ("PolicyDocument", "Topics"),
}


def snapshot(stack: Deployed) -> str:
    owners = dict(_owners(stack))
    roles = stack.of_type("AWS::IAM::Role")
    blocks = [_role(owners.get(key) or each.get("RoleName") or key, each) for key, each in roles.items()]
    for kind, (where, about) in _ELSEWHERE.items():
        for each in stack.of_type(kind).values():
            blocks.append(_block(f"{kind.split('::')[1]} {_joined(each[about])}", each[where]["Statement"]))
    return HEADER + "".join(f"\n{block}" for block in sorted(blocks))


def _owners(stack: Deployed) -> Iterator[tuple[str, str]]:
    """The role of a function and of the state machine, by logical id: what it is of."""
    for each in stack.of_type("AWS::Lambda::Function").values():
        yield each["Role"].removesuffix(".Arn"), f"function {each['Handler'].split('.')[1]}"
    for each in stack.of_type("AWS::StepFunctions::StateMachine").values():
        yield each["RoleArn"].removesuffix(".Arn"), "state machine"


def _role(name: str, properties: Mapping[str, Any]) -> str:
    statements = [
        *properties["AssumeRolePolicyDocument"]["Statement"],
        *(each for policy in properties.get("Policies", ()) for each in policy["PolicyDocument"]["Statement"]),
    ]
    return _block(f"role of {name}" if " " in name else f"role {name}", statements)


def _block(title: str, statements: list[Mapping[str, Any]]) -> str:
    return f"{title}\n" + "".join(_statement(each) for each in statements)


def _statement(statement: Mapping[str, Any]) -> str:
    """`  allow Sid: actions`, then a line for each principal, resource and condition."""
    sid = f" {statement['Sid']}" if "Sid" in statement else ""
    lines = [f"  {statement['Effect'].lower()}{sid}: {_joined(statement['Action'])}"]
    principals = statement.get("Principal", {})
    for kind, who in principals.items() if isinstance(principals, Mapping) else [("", principals)]:
        lines.append(f"      by {kind} {_joined(who)}")
    lines += [f"      on {resource}" for resource in _as_list(statement.get("Resource", []))]
    for operator, keys in statement.get("Condition", {}).items():
        lines += [f"      if {key} {operator} {_joined(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _joined(value: Any) -> str:
    return ", ".join(str(each) for each in _as_list(value))


if __name__ == "__main__":
    from infrastructure.keep_template import synthesized

    KEPT.write_text(snapshot(deployed(synthesized("dev"))), encoding="utf-8")
