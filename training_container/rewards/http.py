"""A reward behind an address: the batch a function would get, as JSON by POST, and a list of scores as the answer.

    POST https://scorer.example/v1   {"prompts": […], "completions": […], "completion_ids": [[…]], "answer": […]}
    200                              [1.0, null, {"reward": 0.5, "style": 0.2}]      or {"rewards": […]}

urllib3 rather than httpx: boto3 needs it, so it is in the image already; one blocking request is all that is asked of it.
Its own retries would wait as long as a server tells them to, and its timeout is of each piece that comes; here the time
limit stands above all.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
_MOST_BYTES = 64 * 2**20  # of an answer
_PIECE_BYTES = 2**16


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


@dataclass(frozen=True)
class Response:
    """What a server answered, read to its end."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class Web:
    """Requests with JSON in and out, asked again where the server is busy or gone. Safe to use from several threads."""

    def __init__(self, connections: int = 1, wait: Callable[[float], None] = time.sleep) -> None:
        self._pool = urllib3.PoolManager(maxsize=connections, retries=False)
        self._pool.pool_classes_by_scheme = _POOLS
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
            Refusal: the server refuses the request, or its answer is no JSON, or longer than anyone's answer is.
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
    ) -> tuple[Response | None, str, float]:
        """The response; or None, what came instead, and the seconds the server asks to wait."""
        try:
            response = self._asked(url, data, headers, limit_s)
        except urllib3.exceptions.HTTPError as error:
            return None, f"{type(error).__name__}: {error}", 0.0
        if response.status in _BUSY:
            return None, f"status {response.status}: {shown(response.data)}", seconds_asked(response.headers)
        return response, "", 0.0

    def _asked(self, url: str, data: bytes, headers: Mapping[str, str], limit_s: float) -> Response:
        """One request and its whole answer, both within the limit."""
        timeout = urllib3.Timeout(total=limit_s)
        response = self._pool.request(
            "POST", url, body=data, headers=headers, timeout=timeout, redirect=False, preload_content=False
        )
        try:
            return Response(response.status, response.headers, body_of(response))
        finally:
            response.close()  # what was not read to its end is of no use for another request

    def close(self) -> None:
        self._pool.clear()


def body_of(response: urllib3.BaseHTTPResponse) -> bytes:
    """All of it.

    Raises:
        Refusal: it is longer than anyone's answer is, and does not go into this process's memory.
    """
    body = bytearray()
    for piece in response.stream(_PIECE_BYTES, decode_content=True):
        body += piece
        if len(body) > _MOST_BYTES:
            raise Refusal(f"it answered with more than {_MOST_BYTES >> 20} MiB: {shown(bytes(body[: 4 * _SHOWN]))}")
    return bytes(body)


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


def answer_of(response: Response) -> Any:
    """The answer's JSON.

    Raises:
        Refusal: the status is none of success, or the answer is no JSON that can be read.
    """
    if not 200 <= response.status < 300:
        raise Refusal(f"it answered with status {response.status}: {shown(response.data)}")
    try:
        return json.loads(response.data)
    except ValueError as error:
        raise Refusal(f"it answered {shown(response.data)}, which is not JSON") from error
    except RecursionError as error:
        raise Refusal(f"it answered {shown(response.data)}, which nests too deep to be read") from error


def shown(value: Any) -> str:
    """The beginning of an answer, for a message."""
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else _dumped(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:  # reading it took fewer frames
        return f"a {type(value).__name__} that nests too deep to be shown"


# --- the deadline ------------------------------------------------------------------------------------------------------


class _Timely(io.RawIOBase):
    """What a socket sends, until a moment: each read has the time that is left, where a socket's own timeout begins anew
    with every byte that drips in."""

    def __init__(self, sent: io.RawIOBase, channel: socket.socket) -> None:
        super().__init__()
        self._sent, self._channel = sent, channel
        self._ends_at_s = time.monotonic() + (channel.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """As of a socket's file.

        Raises:
            TimeoutError: the moment has come.
        """
        left_s = self._ends_at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._channel.settimeout(left_s)
        return self._sent.readinto(buffer)

    def close(self) -> None:
        self._sent.close()
        super().close()


class _TimelyResponse(http.client.HTTPResponse):
    """Head and body together within the timeout that the socket has when the answer is begun to be read."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Timely(self.fp.detach(), sock))


class _HTTPConnection(urllib3.connection.HTTPConnection):
    response_class = _TimelyResponse


class _HTTPSConnection(urllib3.connection.HTTPSConnection):
    response_class = _TimelyResponse


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


_POOLS = {"http": _HTTPPool, "https": _HTTPSPool}
