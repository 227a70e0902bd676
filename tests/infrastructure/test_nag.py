"""AWS's rule packs find nothing that infrastructure/nag.py does not excuse, and every excuse there is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infrastructure import nag
from infrastructure.app import build_app

IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/microtuning:1"
CONTEXT = {"image_uri": IMAGE, "stage": "dev", "vpc": "true"}  # with all that a stage may have


def findings(root: Path, work: Path, monkeypatch: pytest.MonkeyPatch, **table: Any) -> dict[str, set[str]]:
    """Rule -> construct paths that it was found at."""
    for name, value in table.items():
        monkeypatch.setattr(nag, name, value)
    app = build_app(root=root, build=work / "lambda", outdir=work / "out", context=CONTEXT)
    nag.check(app)
    try:
        app.synth()
    except RuntimeError as error:
        assert "ValidationFailed" in str(error), error  # anything else is a fault of the app
    report = json.loads((work / "out" / "validation-report.json").read_text("utf-8"))
    assert {each["pluginName"] for each in report["pluginReports"]} == set(nag.PACKS)
    found: dict[str, set[str]] = {}
    for each in report["pluginReports"]:
        for violation in each["violations"]:
            paths = {place["constructPath"].removeprefix("Microtuning/") for place in violation["violatingConstructs"]}
            found.setdefault(violation["ruleName"], set()).update(paths)
    return found


def test_the_packs_find_nothing_that_is_not_excused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(root, tmp_path, monkeypatch) == {}


def test_every_excuse_answers_a_finding_and_only_where_it_says(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the tables the packs say all that they have to say: what no row is about, and rows about nothing."""
    found = findings(root, tmp_path, monkeypatch, EXCUSES=(), WILDCARDS={})
    wildcards = {
        rule.removeprefix("AwsSolutions-IAM5[Resource::").removesuffix("]") for rule in found if "IAM5[" in rule
    }
    unused = [
        (excuse.rule, excuse.where)
        for excuse in EXCUSES
        if not any(re.fullmatch(rf"{excuse.where}(/Resource)?", path) for path in found.get(excuse.rule, ()))
    ]
    assert unused == []
    assert [each for each in WILDCARDS if not any(re.fullmatch(each, text) for text in wildcards)] == []


EXCUSES, WILDCARDS = nag.EXCUSES, nag.WILDCARDS


def test_every_excuse_has_a_reason_that_can_be_judged() -> None:
    reasons = {excuse.rule: excuse.why for excuse in EXCUSES} | WILDCARDS
    by_reference = [why.removeprefix("As ").rstrip(".") for why in reasons.values() if why.startswith("As ")]
    assert set(by_reference) <= {excuse.rule for excuse in EXCUSES}
    assert all(len(why) > 30 for why in reasons.values() if not why.startswith("As "))


def test_a_wildcard_that_no_row_knows_is_not_excused() -> None:
    def policies(resource: Any) -> list[Any]:
        return [{"policyDocument": {"Statement": [{"Resource": resource}]}}]

    assert list(nag.excused_wildcards(policies("arn:aws:s3:::*"))) == []
    assert (
        list(nag.excused_wildcards(policies({"Fn::Sub": "arn:${AWS::Partition}:iam::${AWS::AccountId}:role/*"}))) == []
    )
    assert (
        list(nag.excused_wildcards(policies([{"Fn::Sub": "arn:${AWS::Partition}:s3:::microtuning-${Stage}-x/*"}])))
        == []
    )
    assert [text for text, _ in nag.excused_wildcards(policies("*"))] == ["*"]
