"""The judge of policies against the examples of the IAM User Guide, and each rule of it alone.

Pages (docs.aws.amazon.com/IAM/latest/UserGuide): reference_policies_evaluation-logic, reference_policies_variables,
reference_policies_elements_condition_operators, reference_policies_condition-single-vs-multi-valued-context-keys,
reference_policies_elements_notaction, reference_policies_examples_dynamodb_items; access_policies_examples.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.infrastructure.policies import Request, is_allowed

S3 = "arn:aws:s3:::amzn-s3-demo-bucket"
ALLOW_ALL = {"Effect": "Allow", "Action": "*", "Resource": "*"}


def judged(statement: dict[str, Any], action: str, resource: str, **context: Any) -> bool:
    return is_allowed([{"Effect": "Allow", **statement}], Request(action, resource, context.get("keys", {})))


def test_nothing_is_allowed_that_no_statement_allows() -> None:
    assert not is_allowed([], Request("s3:GetObject", f"{S3}/a"))
    assert not judged({"Action": "s3:ListBucket", "Resource": "*"}, "s3:GetObject", f"{S3}/a")


def test_an_explicit_deny_wins_wherever_it_stands() -> None:
    deny = {"Effect": "Deny", "Action": "s3:*", "Resource": f"{S3}/secret/*"}
    for statements in ([ALLOW_ALL, deny], [deny, ALLOW_ALL]):
        assert not is_allowed(statements, Request("s3:GetObject", f"{S3}/secret/a"))
        assert is_allowed(statements, Request("s3:GetObject", f"{S3}/open/a"))


def test_a_deny_whose_condition_does_not_hold_denies_nothing() -> None:
    deny = {**ALLOW_ALL, "Effect": "Deny", "Condition": {"StringNotEquals": {"aws:PrincipalTag/team": "red"}}}
    assert is_allowed([ALLOW_ALL, deny], Request("s3:GetObject", S3, {"aws:PrincipalTag/team": "red"}))
    assert not is_allowed([ALLOW_ALL, deny], Request("s3:GetObject", S3, {"aws:PrincipalTag/team": "blue"}))
    assert not is_allowed([ALLOW_ALL, deny], Request("s3:GetObject", S3))  # a negated operator holds of a missing key


@pytest.mark.parametrize(
    ("pattern", "action", "matches"),
    [
        ("iam:*AccessKey*", "iam:CreateAccessKey", True),  # from the page on Action
        ("iam:*AccessKey*", "iam:ListUsers", False),
        ("S3:getobject", "s3:GetObject", True),  # actions have no case
        ("s3:Get?bject", "s3:GetObject", True),
        ("s3:Get", "s3:GetObject", False),
    ],
)
def test_actions(pattern: str, action: str, matches: bool) -> None:
    assert judged({"Action": pattern, "Resource": "*"}, action, "*") is matches


@pytest.mark.parametrize(
    ("pattern", "resource", "matches"),
    [
        (f"{S3}/*/test/*", f"{S3}/1/test/2/3/object.jpg", True),  # from the page on Resource: a star crosses slashes
        (f"{S3}/*/test/*", f"{S3}/1/2/test/object.jpg", True),
        (f"{S3}/*/test/*", f"{S3}/1-test/object.jpg", False),
        (f"{S3}/tenants/a/*", f"{S3}/tenants/ab/x", False),
        (f"{S3}/A", f"{S3}/a", False),  # resources have case
        (f"{S3}/file.txt", f"{S3}/fileXtxt", False),
    ],
)
def test_resources(pattern: str, resource: str, matches: bool) -> None:
    assert judged({"Action": "s3:GetObject", "Resource": pattern}, "s3:GetObject", resource) is matches


def test_notaction_and_notresource_name_what_they_leave_out() -> None:
    but_iam = {"NotAction": "iam:*", "Resource": "*"}
    assert judged(but_iam, "ec2:RunInstances", "*") and not judged(but_iam, "iam:CreateUser", "*")
    elsewhere = {"Action": "s3:*", "NotResource": [S3, f"{S3}/*"]}
    assert judged(elsewhere, "s3:GetObject", "arn:aws:s3:::other/a")
    assert not judged(elsewhere, "s3:GetObject", f"{S3}/a")


HOME = {
    "Action": "s3:ListBucket",
    "Resource": S3,
    "Condition": {"StringLike": {"s3:prefix": ["", "home/", "home/${aws:username}/*"]}},
}


@pytest.mark.parametrize(
    ("prefix", "matches"), [("", True), ("home/", True), ("home/ann/x", True), ("home/bob/x", False), ("etc", False)]
)
def test_the_home_folders_of_the_guide(prefix: str, matches: bool) -> None:
    keys = {"s3:prefix": prefix, "aws:username": "ann"}
    assert judged(HOME, "s3:ListBucket", S3, keys=keys) is matches


def test_a_variable_without_a_value_matches_nothing_and_its_value_is_no_pattern() -> None:
    own = {"Action": "s3:GetObject", "Resource": f"{S3}/home/${{aws:PrincipalTag/tenant}}/*"}
    assert judged(own, "s3:GetObject", f"{S3}/home/acme/x", keys={"aws:PrincipalTag/tenant": "acme"})
    assert not judged(own, "s3:GetObject", f"{S3}/home/acme/x")
    assert not judged(own, "s3:GetObject", f"{S3}/home/acme/x", keys={"aws:PrincipalTag/tenant": "*"})
    assert judged(own, "s3:GetObject", f"{S3}/home/*/x", keys={"aws:PrincipalTag/tenant": "*"})
    literal = {"Action": "s3:GetObject", "Resource": f"{S3}/${{*}}"}
    assert judged(literal, "s3:GetObject", f"{S3}/*") and not judged(literal, "s3:GetObject", f"{S3}/a")


def test_all_conditions_must_hold_and_one_of_the_values_of_each() -> None:
    both = {
        **ALLOW_ALL,
        "Condition": {
            "StringEquals": {"aws:PrincipalTag/job": ["iamuser", "admin"], "aws:PrincipalTag/team": "red"},
            "Bool": {"aws:SecureTransport": "true"},
        },
    }
    keys = {"aws:PrincipalTag/job": "admin", "aws:PrincipalTag/team": "red", "aws:SecureTransport": "true"}
    assert judged(both, "s3:GetObject", "*", keys=keys)
    for missing in keys:
        assert not judged(both, "s3:GetObject", "*", keys={**keys, missing: "other"})
        assert not judged(both, "s3:GetObject", "*", keys={name: keys[name] for name in keys if name != missing})
    assert judged(both, "s3:GetObject", "*", keys={name.upper(): value for name, value in keys.items()})


LEADING = {
    "Action": ["dynamodb:GetItem", "dynamodb:Query"],
    "Resource": "arn:aws:dynamodb:us-east-1:111122223333:table/GameScores",
    "Condition": {"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": ["${www.amazon.com:user_id}"]}},
}


def test_the_leading_keys_of_the_guide() -> None:
    def may(*leading: str) -> bool:
        keys = {"www.amazon.com:user_id": "u1", "dynamodb:LeadingKeys": list(leading)}
        return judged(LEADING, "dynamodb:Query", LEADING["Resource"], keys=keys)

    assert may("u1") and may("u1", "u1")
    assert not may("u2") and not may("u1", "u2")
    assert may()  # ForAllValues holds of nothing: why nobody is granted Scan


def test_forallvalues_holds_and_foranyvalue_fails_of_a_missing_key() -> None:
    def may(operator: str, **keys: Any) -> bool:
        return judged({**ALLOW_ALL, "Condition": {operator: {"aws:TagKeys": ["a", "b"]}}}, "x:Y", "*", keys=keys)

    assert may("ForAllValues:StringEquals") and not may("ForAnyValue:StringEquals")
    given = {"aws:TagKeys": ["a", "c"]}
    assert may("ForAnyValue:StringEquals", **given) and not may("ForAllValues:StringEquals", **given)


def test_ifexists_and_null() -> None:
    def may(condition: dict[str, Any], **keys: Any) -> bool:
        return judged({**ALLOW_ALL, "Condition": condition}, "x:Y", "*", keys=keys)

    source = {"aws:SourceAccount": "1"}
    assert may({"StringEqualsIfExists": source}) and may({"StringEqualsIfExists": source}, **source)
    assert not may({"StringEqualsIfExists": source}, **{"aws:SourceAccount": "2"})
    assert not may({"StringEquals": source})
    assert may({"Null": {"aws:TokenIssueTime": "true"}}) and not may({"Null": {"aws:TokenIssueTime": "false"}})


def test_what_the_judge_does_not_know_it_does_not_judge() -> None:
    with pytest.raises(ValueError, match="does not know the condition operator DateLessThan"):
        judged({**ALLOW_ALL, "Condition": {"DateLessThan": {"aws:CurrentTime": "2026-01-01"}}}, "x:Y", "*",
               keys={"aws:CurrentTime": "2025-01-01"})  # fmt: skip
    with pytest.raises(ValueError, match="does not know"):
        judged({**ALLOW_ALL, "Effekt": "Deny"}, "x:Y", "*")
    with pytest.raises(ValueError, match="has Action or NotAction"):
        judged({"Resource": "*"}, "x:Y", "*")
