"""A real Lambda function of the local cloud as reward, in SageMaker's request and response."""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING

import pytest

from training_container.failures import UserFailure
from training_container.remote.lambda_reward import LambdaReward
from training_container.rewards import Question

if TYPE_CHECKING:
    from collections.abc import Iterator

    from microtuning_local.cloud import LocalCloud

pytestmark = pytest.mark.cloud

GRADER = """
def lambda_handler(event, context):
    return [grade(sample) for sample in event]


def grade(sample):
    said, right = sample["messages"][-1]["content"], sample["reference_answer"]["x"]
    metrics = [{"name": "length", "value": len(said), "type": "Metric"}]
    return {"id": sample["id"], "aggregate_reward_score": 1.0 if int(said) == right else 0.0, "metrics_list": metrics}
"""
TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}


@pytest.fixture
def grader(cloud: LocalCloud) -> Iterator[str]:
    """The ARN of a grader as a user would deploy it."""
    iam, functions = cloud.client("iam"), cloud.client("lambda")
    role = iam.create_role(RoleName="SageMaker-grader", AssumeRolePolicyDocument=json.dumps(TRUST))["Role"]["Arn"]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("grader.py", GRADER)
    answer = functions.create_function(
        FunctionName="SageMaker-grader", Runtime="python3.12", Role=role, Handler="grader.lambda_handler",
        Code={"ZipFile": packed.getvalue()}, Timeout=30,
    )  # fmt: skip
    yield answer["FunctionArn"]
    functions.delete_function(FunctionName="SageMaker-grader")
    iam.delete_role(RoleName="SageMaker-grader")


def test_a_deployed_grader_scores_and_its_exception_is_the_users(cloud: LocalCloud, grader: str) -> None:
    reward = LambdaReward(grader, time_limit_s=60, client=cloud.client("lambda"))
    try:
        columns = {"reference_answer": [{"x": 4}] * 3}
        answers = reward.score(Question(["2+2"] * 3, ["4", "5", "04"], [[7]] * 3, columns), step=1)
        assert [(each.value, each.components) for each in answers.each] == [
            (1.0, {"length": 1.0}), (0.0, {"length": 1.0}), (1.0, {"length": 2.0}),
        ]  # fmt: skip
        with pytest.raises(UserFailure, match=r"SageMaker-grader: the function raised [\w.]+: invalid literal"):
            reward.score(Question(["2+2"], ["four"], [[7]], {"reference_answer": [{"x": 4}]}), step=2)
    finally:
        reward.close()
