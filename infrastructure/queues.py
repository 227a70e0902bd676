"""The queues at the edges: every handler that something wakes reads from one, and each has its dead-letter queue.

To add one: a name in QUEUES, then a row in RULES (or a state of the machine) that fills it and one in FUNCTIONS that
reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aws_cdk as cdk
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infrastructure.names import PREFIX, construct_id, rule_arn, sub
from infrastructure.rules import RULES

if TYPE_CHECKING:
    from infrastructure.parameters import Parameters

QUEUES = (
    "specs",
    "commands",
    "training-events",
    "cost-events",
    "checkpoints",
    "execution-events",
    "admissions",
    "launches",
    "ticks",
)
DEAD_LETTER_QUEUES = tuple(f"{queue}-dlq" for queue in QUEUES)
MAX_RECEIVES = 4
KEPT_DAYS = 14  # the longest that SQS keeps a message


class Queues(Construct):
    """`by_name`: each queue and each dead-letter queue under its name in the tables."""

    def __init__(self, scope: Construct, *, parameters: Parameters) -> None:
        super().__init__(scope, "Queues")
        self._parameters = parameters
        self.by_name: dict[str, sqs.Queue] = {}
        for name in QUEUES:
            rules = [rule.name for rule in RULES if rule.queue == name]
            dead_letters = self._queue(f"{name}-dlq", rules, None)
            self._queue(name, rules, sqs.DeadLetterQueue(queue=dead_letters, max_receive_count=MAX_RECEIVES))

    def _queue(self, name: str, rules: list[str], dead_letter_queue: sqs.DeadLetterQueue | None) -> sqs.Queue:
        # SQS's own encryption: with a customer's key EventBridge drops what it may not encrypt, without a word.
        queue = sqs.Queue(
            self,
            construct_id(name),
            queue_name=sub(f"{PREFIX}-{name}"),
            visibility_timeout=cdk.Duration.seconds(self._parameters.queue_visibility_s.value_as_number),
            retention_period=cdk.Duration.days(KEPT_DAYS),
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            dead_letter_queue=dead_letter_queue,
        )
        self._policy(name, queue, rules)
        self.by_name[name] = queue
        return queue

    def _policy(self, name: str, queue: sqs.Queue, rules: list[str]) -> None:
        """TLS only (the emulator, which speaks plain HTTP, would enforce that too), and our rules may put into it."""
        on_aws = self._parameters.on_aws
        tls_only = _tls_only(queue)
        if rules:
            on_aws_only = cdk.Fn.condition_if(on_aws.logical_id, tls_only, cdk.Aws.NO_VALUE)
            statements = [on_aws_only, _our_rules(queue, rules)]
        else:
            statements = [tls_only]
        policy = sqs.CfnQueuePolicy(
            self,
            f"{construct_id(name)}Policy",
            queues=[queue.queue_url],
            policy_document={"Version": "2012-10-17", "Statement": statements},
        )
        if not rules:
            policy.cfn_options.condition = on_aws


def _tls_only(queue: sqs.Queue) -> dict[str, Any]:
    return {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "sqs:*",
        "Resource": queue.queue_arn,
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }


def _our_rules(queue: sqs.Queue, rules: list[str]) -> dict[str, Any]:
    """EventBridge may put into the queue, but only on behalf of our own rules for it."""
    return {
        "Sid": "OurRules",
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": queue.queue_arn,
        "Condition": {"ArnEquals": {"aws:SourceArn": [sub(rule_arn(rule)) for rule in rules]}},
    }
