"""What the local SageMaker holds for a job goes with the job; what is asked of one that ended meanwhile is no error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from microtuning_local.home import Home
from microtuning_local.sagemaker.faults import Faults
from microtuning_local.sagemaker.jobs import Jobs
from microtuning_local.sagemaker.machine import JobRun
from microtuning_local.sagemaker.pool import Pool
from microtuning_local.sagemaker.server import Service
from tests.unit.test_sagemaker_rules import a_request


class Sts:
    def assume_role(self, **_: Any) -> dict[str, Any]:
        from datetime import UTC, datetime

        keys = {"AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "c"}
        return {"Credentials": keys | {"Expiration": datetime(2030, 1, 1, tzinfo=UTC)}}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    faults, jobs = Faults(), Jobs(tmp_path / "jobs")
    account = SimpleNamespace(
        home=Home(tmp_path),
        endpoint=SimpleNamespace(region="us-east-1", account="000000000000"),
        jobs=jobs,
        pool=Pool(2, faults, jobs),
        events=SimpleNamespace(emit=lambda *_: None),
        sts=Sts(),
        images={"local/tiny:1": []},
        tokens={},
    )
    return Service(account, faults)  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", ["well", "by a failure of ours"])
def test_a_job_that_ended_leaves_its_record_and_nothing_else(
    ends: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(run: JobRun) -> None:
        if ends != "well":
            raise RuntimeError("out of the blue")
        run._become("Completed", "Completed")

    monkeypatch.setattr(JobRun, "_once", once)
    service.create(a_request())
    run = service.runs.get("local-run-a001")
    if run:
        run.thread.join()
    assert service.runs == {} and service.account.tokens == {}
    assert service.describe({"TrainingJobName": "local-run-a001"})["TrainingJobStatus"] in ("Completed", "Failed")


def test_a_reclaim_that_comes_as_the_job_ends_is_no_error(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobRun, "_once", lambda run: run._become("InProgress", "Training"))
    spot = {"EnableManagedSpotTraining": True}
    waits = {"StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60}}
    service.create(a_request(**spot, **waits))
    if run := service.runs.get("local-run-a001"):
        run.thread.join()
    assert service.reclaim("local-run-a001") == {"job": "local-run-a001"}
