"""A network of the stage's own for its training jobs, without a way to the internet: `-c vpc=true`, off by default.

S3 is reached through a gateway (free); what a job may ask beside it through interface endpoints, each an address in every
zone that costs by the hour (docs/security.md). A hub, a package index or a reward on the internet is out of reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from infrastructure.functions import LOGS_KEPT
from infrastructure.names import sub

if TYPE_CHECKING:
    from aws_cdk import aws_lambda as lambda_

ZONES = 2  # SageMaker takes the zone that has the type; with one it waits for that one
HTTPS = 443
# What a job's own code may ask: a reward's function, a judge's key, who it is; and where its lines and image are.
ENDPOINTS = ("lambda", "secretsmanager", "sts", "logs", "ecr.api", "ecr.dkr")

# What SageMaker does with the job's role to put its machines into the network. EC2 names no resource for most of it.
_INTERFACES = (
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeVpcs",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeSubnets",
    "ec2:DescribeSecurityGroups",
)


class Network(Construct):
    """`vpc`: two zones, private subnets and endpoints. `jobs`: the security group of machines."""

    def __init__(self, scope: Construct) -> None:
        super().__init__(scope, "Network")
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            max_azs=ZONES,
            nat_gateways=0,
            # CDK would empty the default group by a function of its own; nothing here is in that group.
            restrict_default_security_group=False,
            subnet_configuration=[ec2.SubnetConfiguration(name="jobs", subnet_type=ec2.SubnetType.PRIVATE_ISOLATED)],
        )
        self.vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        self.vpc.add_gateway_endpoint("DynamoDb", service=ec2.GatewayVpcEndpointAwsService.DYNAMODB)
        self.jobs = self._group("Jobs", "Machines of training jobs")
        self._may_talk_to_each_other()
        self._endpoints()
        self._flow_logs()

    def carries(self, launch_training: lambda_.Function) -> None:
        """Jobs that the function makes stand in this network."""
        launch_training.add_environment("JOB_SUBNETS", cdk.Fn.join(",", [each.subnet_id for each in self._subnets]))
        launch_training.add_environment("JOB_SECURITY_GROUPS", self.jobs.security_group_id)

    def admits(self, roles: Construct) -> None:
        """Every role below `roles` that SageMaker takes for a job may have interfaces in a network."""
        for each in roles.node.find_all():
            if isinstance(each, iam.Role) and each.node.id.endswith("JobRole"):
                each.add_to_policy(
                    iam.PolicyStatement(sid="StandInNetwork", actions=list(_INTERFACES), resources=["*"])
                )

    @property
    def _subnets(self) -> list[ec2.ISubnet]:
        return list(self.vpc.isolated_subnets)

    def _group(self, name: str, description: str) -> ec2.SecurityGroup:
        return ec2.SecurityGroup(self, name, vpc=self.vpc, description=description, allow_all_outbound=False)

    def _may_talk_to_each_other(self) -> None:
        """Machines of one job exchange gradients, encrypted; S3 answers over HTTPS at addresses of its own."""
        self.jobs.add_ingress_rule(self.jobs, ec2.Port.all_tcp(), "between the machines of a job")
        self.jobs.add_egress_rule(self.jobs, ec2.Port.all_tcp(), "between the machines of a job")
        self.jobs.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(HTTPS), "AWS; no other route leads out")

    def _endpoints(self) -> None:
        group = self._group("Endpoints", "Endpoints of AWS services")
        group.add_ingress_rule(self.jobs, ec2.Port.tcp(HTTPS), "machines of training jobs")
        for name in ENDPOINTS:
            self.vpc.add_interface_endpoint(
                name.replace(".", "").capitalize(),
                service=ec2.InterfaceVpcEndpointAwsService(name),
                security_groups=[group],
                open=False,
            )

    def _flow_logs(self) -> None:
        group = logs.LogGroup(
            self,
            "FlowLogs",
            log_group_name=sub("/microtuning/${Stage}/network"),
            retention=LOGS_KEPT,
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        self.vpc.add_flow_log(
            "Flows",
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(group),
            traffic_type=ec2.FlowLogTrafficType.ALL,
        )
