"""RULES: which events of the default bus go to which queue.

A key pattern only pre-filters (`*` crosses `/`); the handler's parser decides. To add a rule: a row here. Nothing that
the stack itself writes may match a pattern that starts something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aws_cdk import aws_events as events
from constructs import Construct

from infrastructure.names import BUCKET, PREFIX, construct_id, resolved, state_machine_arn, sub

if TYPE_CHECKING:
    from infrastructure.queues import Queues


@dataclass(frozen=True)
class Rule:
    """One rule: events that match `pattern`, or the ticks of `schedule`, go to `queue`."""

    name: str
    queue: str
    why: str
    pattern: dict[str, Any] | None = None
    schedule: str | None = None


def _objects(*key_patterns: str) -> dict[str, Any]:
    return {
        "source": ["aws.s3"],
        "detail-type": ["Object Created"],
        "detail": {
            "bucket": {"name": [BUCKET]},
            "object": {"key": [{"wildcard": pattern} for pattern in key_patterns]},
        },
    }


_OUR_JOBS = {
    "source": ["${SageMakerEventSource}"],
    "detail-type": ["SageMaker Training Job State Change"],
    "detail": {"TrainingJobName": [{"prefix": "${Stage}-"}]},
}
_OUR_EXECUTIONS_THAT_ENDED = {
    "source": ["aws.states"],
    "detail-type": ["Step Functions Execution Status Change"],
    "detail": {"stateMachineArn": [state_machine_arn()], "status": ["SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED"]},
}

RULES = (
    Rule("specs", "specs", "an uploaded spec starts a run", _objects("tenants/*/specs/*")),
    Rule("commands", "commands", "what a user asks of a run", _objects("tenants/*/commands/*")),
    Rule("training-events", "training-events", "failure recovery", _OUR_JOBS),
    Rule("cost-events", "cost-events", "cost aggregation", _OUR_JOBS),
    Rule(
        "checkpoints",
        "checkpoints",
        "a whole checkpoint, or a sign of life",
        _objects("tenants/*/runs/*/checkpoints/*/manifest.json", "tenants/*/runs/*/checkpoints/*/progress.json"),
    ),
    Rule(
        "execution-events",
        "execution-events",
        "an execution that died is taken up again, and what one cost is known at its end",
        _OUR_EXECUTIONS_THAT_ENDED,
    ),
    Rule("ticks", "ticks", "whatever no event told", schedule="${ReconcileRate}"),
)


class Rules(Construct):
    """The rules of the table. What cannot be put into a rule's queue goes to that queue's dead-letter queue."""

    def __init__(self, scope: Construct, *, queues: Queues) -> None:
        super().__init__(scope, "Rules")
        for rule in RULES:
            self._rule(rule, queues)

    def _rule(self, rule: Rule, queues: Queues) -> None:
        target = events.CfnRule.TargetProperty(
            id="queue",
            arn=queues.by_name[rule.queue].queue_arn,
            dead_letter_config=events.CfnRule.DeadLetterConfigProperty(
                arn=queues.by_name[f"{rule.queue}-dlq"].queue_arn
            ),
        )
        events.CfnRule(
            self,
            construct_id(rule.name),
            name=sub(f"{PREFIX}-{rule.name}"),
            description=rule.why,
            event_pattern=resolved(rule.pattern),
            schedule_expression=resolved(rule.schedule),
            targets=[target],
        )
