"""A Lambda function as reward: SageMaker's request and response, to the letter, and what goes wrong with it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError
from botocore.response import StreamingBody
from botocore.stub import Stubber

from training_container.failures import UserFailure
from training_container.remote.lambda_reward import LambdaReward, batches, make_client
from training_container.remote.secrets import key_named
from training_container.rewards import Question

ARN = "arn:aws:lambda:eu-west-1:123456789012:function:SageMaker-math"


class Function:
    """Stands for the service's client: `reply` gets the event and gives the answer, an error, or (body, FunctionError)."""

    def __init__(self, reply: Callable[[list[dict[str, Any]]], Any]) -> None:
        self._reply, self._lock = reply, threading.Lock()
        self.events: list[list[dict[str, Any]]] = []

    def invoke(self, *, FunctionName: str, Payload: bytes) -> dict[str, Any]:
        assert FunctionName == ARN
        event = json.loads(Payload)
        with self._lock:
            self.events.append(event)
            answer = self._reply(event)
        if isinstance(answer, Exception):
            raise answer
        body, error = answer if isinstance(answer, tuple) else (answer, None)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return {"Payload": io.BytesIO(data)} | ({"FunctionError": error} if error else {})

    def close(self) -> None:
        pass


def asked(count: int, **columns: list[Any]) -> Question:
    return Question([f"q{i}" for i in range(count)], [f"c{i}" for i in range(count)], [[7]] * count, columns)


def scores(function: Function, question: Question, waited: list[float] | None = None, limit_s: float = 60) -> Any:
    wait = (waited if waited is not None else []).append
    reward = LambdaReward(ARN, time_limit_s=limit_s, client=function, wait=wait)  # type: ignore[arg-type]
    try:
        return reward.score(question, step=12)
    finally:
        reward.close()


def by_number(event: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": each["id"], "aggregate_reward_score": float(each["messages"][-1]["content"][1:])} for each in event]


def test_a_sample_is_the_row_with_the_completion_as_its_last_message_and_an_id() -> None:
    function = Function(by_number)
    scores(function, asked(1, reference_answer=[{"x": 4}], level=["easy"]))
    (event,) = function.events
    assert event == [
        {
            "id": "12-0",
            "messages": [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "c0"}],
            "reference_answer": {"x": 4},
            "level": "easy",
        }
    ]


def test_chat_rows_keep_their_messages() -> None:
    function = Function(lambda event: [{"id": event[0]["id"], "aggregate_reward_score": 1}])
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    scores(function, Question([prompt], [[{"role": "assistant", "content": "a"}]], [[7]], {}))
    assert [each["content"] for each in function.events[0][0]["messages"]] == ["s", "u", "a"]


def test_scores_and_metrics_are_told_apart_by_id_whatever_their_order() -> None:
    def reply(event: list[dict[str, Any]]) -> list[dict[str, Any]]:
        metrics = [
            {"name": "accuracy", "value": 0.9, "type": "Reward"},
            {"name": "policy", "value": 0, "type": "Metric"},
        ]
        return [each | {"metrics_list": metrics} for each in reversed(by_number(event))]

    answers = scores(Function(reply), asked(3)).each
    assert [each.value for each in answers] == [0.0, 1.0, 2.0]
    assert answers[0].components == {"accuracy": 0.9, "policy": 0.0}


def test_forty_samples_go_in_three_lists_and_come_back_in_order() -> None:
    function = Function(by_number)
    answers = scores(function, asked(40)).each
    assert [each.value for each in answers] == [float(i) for i in range(40)]
    assert sorted(len(event) for event in function.events) == [8, 16, 16]


def test_a_list_never_grows_over_what_lambda_takes() -> None:
    large = {"id": "1", "messages": [{"role": "assistant", "content": "x" * 2_000_000}]}
    assert [len(batch) for batch in batches([large] * 5)] == [2, 2, 1]


def test_a_throttled_function_is_tried_again_with_growing_waits() -> None:
    refusals = iter([throttled(), throttled(), None])
    waited: list[float] = []
    answers = scores(Function(lambda event: next(refusals) or by_number(event)), asked(1), waited)
    assert [each.value for each in answers.each] == [0.0]
    assert waited == [0.25, 0.5]


def throttled() -> ClientError:
    error = {"Code": "TooManyRequestsException", "Message": "Rate Exceeded."}
    return ClientError({"Error": error}, "Invoke")  # type: ignore[arg-type]


def test_one_that_stays_throttled_is_counted_with_the_cause() -> None:
    answers = scores(Function(lambda event: throttled()), asked(2), limit_s=0.5)
    assert all(each.timed_out for each in answers.each)
    assert "Rate Exceeded" in answers.cause


@pytest.mark.parametrize(
    "reply",
    [
        ReadTimeoutError(endpoint_url="https://lambda"),
        ({"errorMessage": "2026-01-01T00:00:00Z 5f Task timed out after 3.00 seconds"}, "Unhandled"),
    ],
)
def test_a_function_that_takes_too_long_is_counted_as_timed_out(reply: Any) -> None:
    answers = scores(Function(lambda event: reply), asked(2), limit_s=0.2)
    assert [each.timed_out for each in answers.each] == [True, True]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            ({"errorType": "KeyError", "errorMessage": "'reference_answer'", "stackTrace": []}, "Unhandled"),
            r"SageMaker-math: the function raised KeyError: 'reference_answer'\.",
        ),
        ((b"gone", "Unhandled"), "the function raised gone"),
        (b"not json", "it answered not json, which is not JSON; expected"),
        ({"statusCode": 200, "body": "[]"}, 'it answered {"statusCode": 200, "body": .*; expected'),
        ([], r"it answered 0 scores for 2 samples, none of them for id '12-0'; expected"),
        ([{"id": "12-0"}, {"id": "12-1"}], "has no aggregate_reward_score"),
        (
            [{"id": "12-0", "aggregate_reward_score": "high"}, {"id": "12-1", "aggregate_reward_score": 1}],
            r"reward 12-0 is a str \('high'\), not a number",
        ),
    ],
)
def test_what_is_no_score_ends_the_run_as_the_users_with_what_was_expected(reply: Any, message: str) -> None:
    with pytest.raises(UserFailure, match=message):
        scores(Function(lambda event: reply), asked(2))


def test_a_function_the_job_may_not_invoke_is_said_at_once() -> None:
    error: Any = {"Code": "AccessDeniedException", "Message": "not authorized to perform: lambda:InvokeFunction"}
    with pytest.raises(UserFailure, match=r"it cannot be invoked: .*not authorized to perform: lambda:InvokeFunction"):
        scores(Function(lambda event: ClientError({"Error": error}, "Invoke")), asked(1))


def test_a_job_without_credentials_is_told_so_and_not_kept_waiting() -> None:
    with pytest.raises(UserFailure, match="it cannot be invoked: Unable to locate credentials"):
        scores(Function(lambda event: NoCredentialsError()), asked(1))


def test_the_client_speaks_to_the_functions_region_and_asks_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    client = make_client(ARN, 7.0)
    body = json.dumps([{"id": "12-0", "aggregate_reward_score": 0.5}]).encode()
    with Stubber(client) as stub:
        sent = [{"id": "12-0", "messages": [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "c0"}]}]
        expected = {"FunctionName": ARN, "Payload": json.dumps(sent).encode()}
        stub.add_response(
            "invoke", {"StatusCode": 200, "Payload": StreamingBody(io.BytesIO(body), len(body))}, expected
        )
        reward = LambdaReward(ARN, time_limit_s=7.0, client=client)
        assert reward.score(asked(1), step=12).each[0].value == 0.5
        reward.close()
    assert client.meta.region_name == "eu-west-1"
    assert (client.meta.config.read_timeout, client.meta.config.retries["total_max_attempts"]) == (7.0, 1)


# --- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_is_a_variable_or_else_a_secret_and_its_absence_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    client = boto3.client("secretsmanager", region_name="eu-west-1")
    monkeypatch.setattr(boto3, "client", lambda name: client)
    monkeypatch.setenv("IN_THE_ENVIRONMENT", "k-1")
    with Stubber(client) as stub:
        stub.add_response("get_secret_value", {"SecretString": "k-2\n"}, {"SecretId": "judge/key"})
        stub.add_client_error("get_secret_value", "ResourceNotFoundException")
        assert (key_named("IN_THE_ENVIRONMENT"), key_named("judge/key")) == ("k-1", "k-2")
        with pytest.raises(UserFailure, match=r"'lost' is neither an environment variable .* \(ResourceNotFound"):
            key_named("lost")
    client.close()
