"""Executions of the stage's state machine, and the tokens its waiting states gave out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import ClientError

from microtuning_core.aws.errors import code_of, is_missing
from microtuning_core.domain.names import StackNames
from microtuning_core.domain.orchestration import HistoryEvent
from microtuning_core.domain.settle import ExecutionStatus

if TYPE_CHECKING:
    from mypy_boto3_stepfunctions import SFNClient
    from mypy_boto3_stepfunctions.type_defs import HistoryEventTypeDef

# The state that held the token is gone: it was answered before, or its execution ended. Either way nobody waits.
_NOBODY_WAITS = frozenset({"TaskDoesNotExist", "TaskTimedOut", "InvalidToken"})


class Executions:
    def __init__(self, stepfunctions: SFNClient, names: StackNames) -> None:
        self._stepfunctions = stepfunctions
        self._names = names

    def start(self, execution: str, state: dict[str, Any]) -> str:
        """Starts the execution of that name; one that exists already is success. Its ARN."""
        try:
            self._stepfunctions.start_execution(
                stateMachineArn=self._names.state_machine_arn, name=execution, input=json.dumps(state)
            )
        except ClientError as error:
            if code_of(error) != "ExecutionAlreadyExists":
                raise
        return self._names.execution_arn(execution)

    def status(self, execution: str) -> ExecutionStatus:
        try:
            answer = self._stepfunctions.describe_execution(executionArn=self._names.execution_arn(execution))
        except ClientError as error:
            if is_missing(error):
                return "MISSING"
            raise
        return cast("ExecutionStatus", answer["status"])

    def history(self, execution: str) -> list[HistoryEvent]:
        """What happened in it, without the data that went through; empty where it is not there any more."""
        pages = self._stepfunctions.get_paginator("get_execution_history").paginate(
            executionArn=self._names.execution_arn(execution), includeExecutionData=False
        )
        try:
            return [_history_event(event) for page in pages for event in page["events"]]
        except ClientError as error:
            if is_missing(error):
                return []
            raise

    def succeed(self, token: str, output: dict[str, Any]) -> None:
        self._send(lambda: self._stepfunctions.send_task_success(taskToken=token, output=json.dumps(output)))

    def fail(self, token: str, error: str, cause: str) -> None:
        self._send(
            lambda: self._stepfunctions.send_task_failure(taskToken=token, error=error[:256], cause=cause[:32_768])
        )

    def _send(self, call: Any) -> None:
        try:
            call()
        except ClientError as error:
            if code_of(error) not in _NOBODY_WAITS:
                raise


def _history_event(event: HistoryEventTypeDef) -> HistoryEvent:
    return HistoryEvent(event["type"], event["timestamp"], event.get("stateEnteredEventDetails", {}).get("name", ""))
