"""All that the SDK does for its user is done with a tenant's user role: whole runs with its credentials, and each call that
was made judged by the role's policies, leading keys and all, as the emulator does not.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_sdk import SFTTrainer, Stage
from microtuning_sdk._connection import _LocalSession
from tests.infrastructure.conftest import Deployed, deployed
from tests.infrastructure.policies import Request, is_allowed

if TYPE_CHECKING:
    from tests.integration.conftest import StageUnderTest

TENANT = "beta"
ROWS = [{"prompt": f"{number}>", "completion": str(number)} for number in range(16)]
Call = tuple[str, str, dict[str, Any]]  # service, operation, parameters


class Recorded(_LocalSession):
    """A session with a role's credentials that writes down what it is asked for."""

    calls: list[Call]

    def client(self, service_name: Any, *args: Any, **settings: Any) -> Any:
        client = super().client(service_name, *args, **settings)
        client.meta.events.register("provide-client-params", self._note)
        return client

    def _note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.calls.append((model.service_model.service_name, model.name, dict(params)))


@pytest.fixture(scope="module")
def session(stage: StageUnderTest) -> Recorded:
    role = stage.names.user_role_arn(TENANT)
    given = stage.client("sts").assume_role(RoleArn=role, RoleSessionName="ann")["Credentials"]
    recorded = Recorded(
        stage.cloud.environment,
        aws_access_key_id=given["AccessKeyId"],
        aws_secret_access_key=given["SecretAccessKey"],
        aws_session_token=given["SessionToken"],
        region_name=stage.names.region,
    )
    recorded.calls = []
    return recorded


@pytest.fixture(scope="module")
def own(stage: StageUnderTest, session: Recorded) -> Stage:
    return Stage(stage.names, session)


def trainer(own: Stage, tenant: str, behaviour: str) -> SFTTrainer:
    return SFTTrainer(
        model_arch="Transformer", stage=own, tenant=tenant, name=behaviour, compute={"instance": "ml.m5.large"},
        environment_variables={"BEHAVIOUR": behaviour},
    )  # fmt: skip


@pytest.fixture(scope="module")
def emulated() -> Deployed:
    template = json.loads((resources.files("microtuning_local") / "template" / "template.json").read_text())
    return deployed(template, OnAws="true", **{"AWS::AccountId": "000000000000"})


def request_of(call: Call, account: str, region: str) -> Request:
    service, operation, params = call
    match service:
        case "s3":
            return _object_request(operation, params)
        case "dynamodb":
            table = f"arn:aws:dynamodb:{region}:{account}:table/{params['TableName']}"
            arn = f"{table}/index/{params['IndexName']}" if "IndexName" in params else table
            return Request(f"dynamodb:{operation}", arn, {"dynamodb:LeadingKeys": [_leading_key(params)]})
        case "logs":
            group = f"arn:aws:logs:{region}:{account}:log-group:{params['logGroupName']}"
            stream = params.get("logStreamName")
            return Request(f"logs:{operation}", f"{group}:log-stream:{stream}" if stream else group)
    raise AssertionError(f"the SDK asks {service} for {operation}, which no tenant is granted")


def _object_request(operation: str, params: dict[str, Any]) -> Request:
    bucket = f"arn:aws:s3:::{params['Bucket']}"
    if operation == "ListObjectsV2":
        return Request("s3:ListBucket", bucket, {"s3:prefix": params["Prefix"]})
    action = {"HeadObject": "GetObject", "UploadPart": "PutObject", "CreateMultipartUpload": "PutObject",
              "CompleteMultipartUpload": "PutObject"}.get(operation, operation)  # fmt: skip
    return Request(f"s3:{action}", f"{bucket}/{params['Key']}")


def _leading_key(params: dict[str, Any]) -> str:
    """The partition that a read names: by key, or as the first value of a query's key condition."""
    if "Key" in params:
        return str(params["Key"]["pk"]["S"])
    name = params["KeyConditionExpression"].split("=")[1].split()[0]
    return str(params["ExpressionAttributeValues"][name]["S"])


def test_a_tenants_user_trains_looks_and_cancels_and_each_call_is_within_the_roles_policies(
    own: Stage, session: Recorded, emulated: Deployed, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(own, TENANT, "succeed").fit(ROWS, ROWS[:4], batch_size=8, epochs=1)
    assert (run.status, run.view()["place"]) == ("completed", None)
    assert run.cost().total_usd > 0
    assert len(list(run.logs())) > 0 and run.checkpoints() is not None
    assert [each.run_id for each in own.runs.list_runs(TENANT, 5)][:1] == [run.run_id]
    assert own.admissions.standing(TENANT) is not None
    assert own.ledger.month(TENANT, f"{run.record.created_at:%Y-%m}")
    waiting = trainer(own, TENANT, "hang").fit(ROWS, ROWS[:4], batch_size=8, epochs=1, wait=False)
    assert waiting.cancel()
    assert waiting.wait(120, logs=False).status == "stopped"
    statements = emulated.statements_of_role(emulated.role(f"microtuning-local-user-{TENANT}"))
    asked = [request_of(call, own.names.account, own.names.region) for call in session.calls]
    assert {each.action for each in asked} >= {"s3:GetObject", "s3:PutObject", "dynamodb:Query", "logs:GetLogEvents"}
    assert [each for each in asked if not is_allowed(statements, each)] == []


def test_a_tenants_user_starts_nothing_in_anothers_name(own: Stage, session: Recorded) -> None:
    from microtuning_core.domain.errors import StageUnreachable

    with pytest.raises(StageUnreachable, match=r"did not take the upload: .*Forbidden"):
        trainer(own, "acme", "succeed").fit(ROWS, ROWS[:4], batch_size=8, epochs=1)
