"""What differs from stage to stage: CloudFormation parameters, and the one condition `OnAws`.

The same template goes to AWS and to the local cloud; `OnAws` is false only where an emulator refuses a resource or a
property. Other constructs read a parameter as text: "${Stage}", "${MaxRunningRuns}" (see names.py).
"""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from constructs import Construct

from infrastructure.names import ON_AWS


class Parameters(Construct):
    """The parameters of the stack, under their plain names."""

    def __init__(self, scope: Construct, *, stage: str, image_uri: str, max_running_runs: int) -> None:
        super().__init__(scope, "Parameters")
        self._text("Stage", stage, "Part of every name; 2 to 6 characters.", allowed_pattern="^[a-z][a-z0-9]{1,5}$")
        self._text(
            "SageMakerEventSource", "aws.sagemaker", "The source of training job events on the default event bus."
        )
        on_aws = self._text("OnAws", "true", "false only on an emulator.", allowed_values=["true", "false"])
        self.image_uri = self._text(
            "TrainingImageUri", image_uri, "The training image; empty takes the one built from this repository."
        )
        self.queue_visibility_s = self._number(
            "QueueVisibilitySeconds", 180, "How long a message stays hidden while a handler works on it.", 1, 43200
        )
        self._text("ReconcileRate", "rate(5 minutes)", "How often every unfinished run is looked at again.")
        self._number("MaxRunningRuns", max_running_runs, "Runs that may train at the same time.", 1, 1000)
        self.on_aws = cdk.CfnCondition(
            self, "IsOnAws", expression=cdk.Fn.condition_equals(on_aws.value_as_string, "true")
        )
        self.on_aws.override_logical_id(ON_AWS)

    def _text(self, name: str, default: str, description: str, **rules: Any) -> cdk.CfnParameter:
        parameter = cdk.CfnParameter(self, name, type="String", default=default, description=description, **rules)
        parameter.override_logical_id(name)
        return parameter

    def _number(self, name: str, default: int, description: str, least: int, most: int) -> cdk.CfnParameter:
        parameter = cdk.CfnParameter(
            self, name, type="Number", default=default, description=description, min_value=least, max_value=most
        )
        parameter.override_logical_id(name)
        return parameter
