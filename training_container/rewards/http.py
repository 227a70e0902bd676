"""A reward behind an address: the batch a function would get, as JSON by POST, and a list of scores as the answer.

    POST https://scorer.example/v1   {"prompts": […], "completions": […], "completion_ids": [[…]], "answer": […]}
    200                              [1.0, null, {"reward": 0.5, "style": 0.2}]      or {"rewards": […]}

urllib3 rather than httpx: boto3 needs it, so it is in the image already; one blocking request is all that is asked of it.
Its own retries would wait as long as a server tells them to; here the time limit stands above all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import urllib3

from ..failures import UserFailure
from ..user_code import Refusal
from .functions import as_answers
from .scores import TIMED_OUT, Answers, Question

_TRIES = 6
_BUSY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_LONGEST_WAIT_S = 10.0
_SHOWN = 200  # characters of an answer that is refused


class Unanswered(Exception):
    """No answer within the limit, though it was asked again; the message says what came instead."""


class HttpReward:
    """One request a step for all completions.

    Args:
        time_limit_s: of one step's request, with all that it is asked again.
    """

    def __init__(self, url: str, *, time_limit_s: float) -> None:
        self._url, self._time_limit_s = url, time_limit_s
        self._web = Web()

    def score(self, question: Question, *, step: int) -> Answers:
        try:
            answer = self._web.post(self._url, question.as_arguments(), limit_s=self._time_limit_s)
            scores = answer.get("rewards") if isinstance(answer, dict) else answer
            if not isinstance(scores, list):
                raise Refusal(f'it answered {shown(answer)}; expected a JSON list of scores, or {{"rewards": […]}}')
            return Answers(as_answers(scores, len(question)))
        except Unanswered as error:
            return Answers([TIMED_OUT] * len(question), cause=str(error))
        except Refusal as error:
            raise UserFailure(f"The reward {self._url}: {error}.") from error

    def close(self) -> None:
        self._web.close()


class Web:
    """Requests with JSON in and out, asked again where the server is busy or gone. Safe to use from several threads."""

    def __init__(self, connections: int = 1, wait: Callable[[float], None] = time.sleep) -> None:
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False)
        self._wait = wait

    def post(
        self,
        url: str,
        body: Mapping[str, Any],
        *,
        limit_s: float,
        headers: Mapping[str, str] | None = None,
        tries: int = _TRIES,
        before: Callable[[], None] = lambda: None,
    ) -> Any:
        """The answer's JSON. before: called before each try.

        Raises:
            Refusal: the server refuses the request, or its answer is no JSON.
            Unanswered: nothing else came in `limit_s`, or in so many tries.
        """
        data = json.dumps(body).encode()
        head = {"Content-Type": "application/json", "User-Agent": "microtuning", **(headers or {})}
        ends_at_s = time.monotonic() + limit_s
        for wait_s in waits(tries):
            before()
            response, came, asked_s = self._try(url, data, head, max(0.001, ends_at_s - time.monotonic()))
            if response is not None:
                return answer_of(response)
            pause_s = max(wait_s or 0.0, asked_s)
            if wait_s is None or time.monotonic() + pause_s >= ends_at_s:
                raise Unanswered(f"no answer within {limit_s:g} s; last {came}")
            self._wait(pause_s)
        raise AssertionError("the last wait is None")

    def _try(
        self, url: str, data: bytes, headers: Mapping[str, str], limit_s: float
    ) -> tuple[urllib3.BaseHTTPResponse | None, str, float]:
        """The response; or None, what came instead, and the seconds the server asks to wait."""
        try:
            response = self._pool.request(
                "POST", url, body=data, headers=headers, timeout=urllib3.Timeout(total=limit_s), redirect=False
            )
        except urllib3.exceptions.HTTPError as error:
            return None, f"{type(error).__name__}: {error}", 0.0
        if response.status in _BUSY:
            return None, f"status {response.status}: {shown(response.data)}", seconds_asked(response.headers)
        return response, "", 0.0

    def close(self) -> None:
        self._pool.clear()


def waits(tries: int) -> Iterator[float | None]:
    """Seconds to wait after each try: 0.25, 0.5, 1, … and None after the last."""
    for number in range(tries - 1):
        yield min(_LONGEST_WAIT_S, 0.25 * 2**number)
    yield None


def seconds_asked(headers: Mapping[str, str]) -> float:
    """Retry-After in seconds; 0 where there is none, or a date."""
    try:
        return max(0.0, float(headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


def answer_of(response: urllib3.BaseHTTPResponse) -> Any:
    if not 200 <= response.status < 300:
        raise Refusal(f"it answered with status {response.status}: {shown(response.data)}")
    try:
        return json.loads(response.data)
    except ValueError as error:
        raise Refusal(f"it answered {shown(response.data)}, which is not JSON") from error


def shown(value: Any) -> str:
    """The beginning of an answer, for a message."""
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
