"""The stack of one stage: it only composes constructs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aws_cdk as cdk

from infrastructure.alarms import Alarms
from infrastructure.encryption import Encryption
from infrastructure.functions import Functions
from infrastructure.names import BUCKET, state_machine_arn, sub
from infrastructure.network import Network
from infrastructure.parameters import Parameters
from infrastructure.queues import Queues
from infrastructure.rules import Rules
from infrastructure.storage import Storage
from infrastructure.tables import Tables
from infrastructure.tenants import Tenants
from infrastructure.training import Training
from infrastructure.workflow import Workflow

if TYPE_CHECKING:
    from pathlib import Path

    from constructs import Construct

    from microtuning_core.domain.tenants import StageTenants


class MicrotuningStack(cdk.Stack):
    """Everything one stage needs; `stage` and `image_uri` become the defaults of their parameters."""

    def __init__(
        self, scope: Construct, *, stage: str, tenants: StageTenants, image_uri: str, vpc: bool, root: Path, build: Path
    ) -> None:
        super().__init__(
            scope,
            "Microtuning",
            stack_name=f"microtuning-{stage}",
            description="Microtuning: post-training of language models in your own account.",
            synthesizer=cdk.DefaultStackSynthesizer(generate_bootstrap_version_rule=False),
        )
        parameters = Parameters(self, stage=stage, image_uri=image_uri, max_running_runs=tenants.max_running_runs)
        encryption = Encryption(self)
        Storage(self, parameters=parameters, key=encryption.key)
        Tables(self)
        queues = Queues(self, parameters=parameters)
        Rules(self, queues=queues)
        training = Training(self, parameters=parameters, root=root, image_uri=image_uri)
        functions = Functions(
            self,
            parameters=parameters,
            queues=queues,
            tenants=tenants,
            image_uri=training.image_uri,
            root=root,
            build=build,
        )
        roles = Tenants(self, tenants, launch_training=functions.by_name["launch_training"])
        if vpc:
            network = Network(self)
            network.carries(functions.by_name["launch_training"])
            network.admits(roles)
        Workflow(self, parameters=parameters, queues=queues, functions=functions)
        alarms = Alarms(self, parameters=parameters, key=encryption.key)
        encryption.cover_logs(self)
        cdk.CfnOutput(self, "AlarmTopicArn", value=alarms.topic.topic_arn)
        cdk.CfnOutput(self, "BucketName", value=sub(BUCKET))
        cdk.CfnOutput(self, "StateMachineArn", value=sub(state_machine_arn()))
