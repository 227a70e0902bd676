"""The local SageMaker ships a job's lines whatever the log service does meanwhile: in order, and none left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError

from microtuning_local.sagemaker import logs
from microtuning_local.sagemaker.logs import LogShipper

LINES = [f"line {number}" for number in range(6)]


def refusal(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "PutLogEvents",
    )


class Missing(ClientError):
    def __init__(self) -> None:
        super().__init__(refusal("ResourceNotFoundException", 400).response, "PutLogEvents")


class Exists(ClientError):
    def __init__(self) -> None:
        super().__init__(refusal("ResourceAlreadyExistsException", 400).response, "CreateLogGroup")


class LogService:
    """Groups and streams as CloudWatch keeps them, and whatever goes wrong before the n-th put."""

    class exceptions:  # noqa: N801 - as botocore calls it
        ResourceNotFoundException, ResourceAlreadyExistsException = Missing, Exists

    def __init__(self, before_put: dict[int, Callable[[LogService], None]] | None = None) -> None:
        self.groups: set[str] = set()
        self.streams: dict[str, list[str]] = {}
        self.puts, self.before_put = 0, before_put or {}

    def create_log_group(self, logGroupName: str) -> None:  # noqa: N803
        if logGroupName in self.groups:
            raise Exists
        self.groups.add(logGroupName)

    def create_log_stream(self, logGroupName: str, logStreamName: str) -> None:  # noqa: N803
        if logGroupName not in self.groups:
            raise Missing
        self.streams[logStreamName] = []

    def put_log_events(self, logGroupName: str, logStreamName: str, logEvents: list[dict[str, Any]]) -> None:  # noqa: N803
        self.puts += 1
        self.before_put.get(self.puts, lambda _: None)(self)
        if logStreamName not in self.streams:
            raise Missing
        self.streams[logStreamName] += [event["message"] for event in logEvents]

    def forget(self) -> None:
        """As the emulator does that was killed."""
        self.groups, self.streams = set(), {}


def shipped(service: LogService, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the service has of a job that writes LINES, a batch each."""
    monkeypatch.setattr(logs, "FLUSH_S", 0.001)
    monkeypatch.setattr(logs, "MAX_EVENTS", 1)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        shipper = LogShipper(service, service, "job/algo-1-1", os.fdopen(reader, "rb"))
        shipper.start()
        print(*LINES, sep="\n", file=out)
    shipper.finish()
    return service.streams.get("job/algo-1-1", [])


def raises(error: Exception) -> Callable[[LogService], None]:
    def strike(_: LogService) -> None:
        raise error

    return strike


def test_the_first_line_makes_group_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped(LogService(), monkeypatch) == LINES


@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
        ConnectTimeoutError(endpoint_url="http://127.0.0.1:1"),
        refusal("ServiceUnavailableException", 503),
        refusal("InternalFailure", 500),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("put", [1, 4, 7])
def test_lines_wait_in_order_for_a_service_that_does_not_answer(
    error: Exception, put: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = LogService({put: raises(error), put + 1: raises(error)})
    assert shipped(service, monkeypatch) == LINES


@pytest.mark.parametrize("put", range(3, 8))
def test_a_service_that_has_forgotten_everything_gets_the_lines_from_there_on(
    put: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first put met no stream and the second made it: put 3 is of the second line."""
    service = LogService({put: LogService.forget})
    assert shipped(service, monkeypatch) == LINES[put - 2 :]


def test_a_role_that_may_not_write_has_no_log_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    service = LogService({1: raises(refusal("AccessDeniedException", 400))})
    assert shipped(service, monkeypatch) == []
    assert service.puts == 1
