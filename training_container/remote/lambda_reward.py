"""A Lambda function as reward, in the shape of SageMaker's reinforcement fine-tuning of Nova models.

    event   [{"id": "12-0", "messages": [{"role": "user", …}, {"role": "assistant", "content": the completion}],
              "reference_answer": …, and every other column of the row}]
    answer  [{"id": "12-0", "aggregate_reward_score": 0.85,
              "metrics_list": [{"name": "accuracy", "value": 0.9, "type": "Reward"}, {…, "type": "Metric"}]}]

https://docs.aws.amazon.com/sagemaker/latest/dg/nova-implementing-reward-functions.html. Samples go in lists, answers are
told apart by their ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from ..failures import UserFailure
from ..rewards.functions import as_number, is_number
from ..rewards.http import shown, waits
from ..rewards.scores import TIMED_OUT, Answer, Answers, Question
from ..user_code import Refusal

if TYPE_CHECKING:
    from mypy_boto3_lambda import LambdaClient

# Of one invocation: samples, and bytes of its event (the service takes 6 MB).
_SAMPLES, _BYTES = 16, 5_000_000
_AT_ONCE, _TRIES = 8, 8
_BUSY = {
    "TooManyRequestsException", "ThrottlingException", "ServiceException", "EC2ThrottledException",
    "ServiceUnavailableException", "InternalFailure", "ResourceConflictException", "ResourceNotReadyException",
}  # fmt: skip
_EXPECTED = '[{"id": "…", "aggregate_reward_score": 0.5}], one a sample'

Sample = dict[str, Any]


class LambdaReward:
    """Invokes the function with a few samples at a time, a bounded number of times at once.

    Args:
        time_limit_s: of one invocation, with all that it is tried again where the function is throttled.
    """

    def __init__(
        self,
        arn: str,
        *,
        time_limit_s: float,
        client: LambdaClient | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._arn, self._time_limit_s, self._wait = arn, time_limit_s, wait
        self._client = client or make_client(arn, time_limit_s)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="lambda")

    def score(self, question: Question, *, step: int) -> Answers:
        """As Reward.score.

        Raises:
            UserFailure: the function raised, with its message, or answered what is no score; or it may not be invoked.
        """
        samples = [sample_of(question, index, f"{step}-{index}") for index in range(len(question))]
        try:
            return Answers.joined(list(self._threads.map(self._invoke, batches(samples))))
        except Refusal as error:
            raise UserFailure(f"The reward {self._arn}: {error}.") from error

    def _invoke(self, samples: Sequence[Sample]) -> Answers:
        ends_at_s = time.monotonic() + self._time_limit_s
        for wait_s in waits(_TRIES):
            try:
                return self._answers(samples)
            except (ClientError, BotoCoreError) as error:
                if not is_busy(error):
                    raise Refusal(f"it cannot be invoked: {error}") from error
                if wait_s is None or time.monotonic() + wait_s >= ends_at_s:
                    return Answers([TIMED_OUT] * len(samples), cause=f"{error}")
                self._wait(wait_s)
        raise AssertionError("the last wait is None")

    def _answers(self, samples: Sequence[Sample]) -> Answers:
        response = self._client.invoke(FunctionName=self._arn, Payload=json.dumps(samples).encode())
        body = response["Payload"].read()
        if "FunctionError" in response:
            if is_timeout(body):
                return Answers([TIMED_OUT] * len(samples), cause=shown(body))
            raise Refusal(f"the function raised {told(body)}")
        return Answers(answers_in(body, samples))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._client.close()


def make_client(arn: str, time_limit_s: float) -> LambdaClient:
    """Trying again is ours: botocore would invoke a second time what takes long."""
    config = Config(
        read_timeout=time_limit_s, connect_timeout=10, retries={"total_max_attempts": 1}, max_pool_connections=_AT_ONCE
    )
    return boto3.client("lambda", region_name=arn.split(":")[3], config=config)


def is_busy(error: ClientError | BotoCoreError) -> bool:
    """Whether it may do later, as where no answer came in time, or no connection."""
    if isinstance(error, ClientError):
        return error.response["Error"]["Code"] in _BUSY
    return isinstance(error, HTTPClientError | ConnectionError)


# --- what is sent ------------------------------------------------------------------------------------------------------


def sample_of(question: Question, index: int, name: str) -> Sample:
    """The row as it is in the data, with the completion as the last turn of its messages, and an id."""
    prompt, completion = question.prompts[index], question.completions[index]
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    return question.row(index) | {"id": name, "messages": [*asked, *said]}


def batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """As many samples an invocation as its limits allow, in their order."""
    batch: list[Sample] = []
    size = 0
    for sample in samples:
        bytes_of_it = len(json.dumps(sample).encode()) + 2
        if batch and (len(batch) == _SAMPLES or size + bytes_of_it > _BYTES):
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += bytes_of_it
    if batch:
        yield batch


# --- what comes back ---------------------------------------------------------------------------------------------------


def answers_in(body: bytes, samples: Sequence[Sample]) -> list[Answer]:
    """One answer a sample, in the samples' order, whatever order they come in.

    Raises:
        Refusal: it is no list of scores, or one is missing.
    """
    try:
        found = json.loads(body)
    except ValueError as error:
        raise Refusal(f"it answered {shown(body)}, which is not JSON; expected {_EXPECTED}") from error
    found = [found] if isinstance(found, dict) and len(samples) == 1 else found
    if not isinstance(found, list) or not all(isinstance(each, dict) and "id" in each for each in found):
        raise Refusal(f"it answered {shown(found)}; expected {_EXPECTED}")
    by_id = {str(each["id"]): each for each in found}
    missing = [sample["id"] for sample in samples if sample["id"] not in by_id]
    if missing or len(found) != len(samples):
        absent = f", none of them for id {missing[0]!r}" if missing else ""
        raise Refusal(f"it answered {len(found)} scores for {len(samples)} samples{absent}; expected {_EXPECTED}")
    return [answer_in(by_id[sample["id"]]) for sample in samples]


def answer_in(found: Mapping[str, Any]) -> Answer:
    if "aggregate_reward_score" not in found:
        raise Refusal(f"its answer {shown(dict(found))} has no aggregate_reward_score; expected {_EXPECTED}")
    metrics = found.get("metrics_list") or []
    named = [each for each in metrics if isinstance(each, Mapping) and "name" in each and is_number(each.get("value"))]
    components = {str(each["name"]): float(each["value"]) for each in named}
    return Answer(as_number(found["aggregate_reward_score"], str(found["id"])), components)


def is_timeout(body: bytes) -> bool:
    return b"Task timed out" in body or b"Sandbox.Timedout" in body


def told(body: bytes) -> str:
    """ "ValueError: no number in it", from what Lambda says of a function that raised."""
    try:
        error = json.loads(body)
        return f"{error['errorType']}: {error['errorMessage']}"
    except (ValueError, KeyError, TypeError):
        return shown(body)
