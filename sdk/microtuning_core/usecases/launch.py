"""The Train state asks for its job. Level-triggered: whatever happened before, the answer is what is true now."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from microtuning_core.aws.training_jobs import Refused
from microtuning_core.domain.errors import LaunchRefused
from microtuning_core.domain.failures import Failure, FailureClass
from microtuning_core.domain.layout import (
    S3Uri,
    checkpoints_prefix,
    config_prefix,
    kept_prefix,
    output_prefix,
    step_prefix,
)
from microtuning_core.domain.run import Attempt, Run
from microtuning_core.domain.settle import WaitingState
from microtuning_core.domain.spec import (
    RunSpec,
    reward_base_channel,
    reward_bases,
    reward_model_channel,
    reward_models,
    teacher_uri,
    warm_data,
)
from microtuning_core.domain.warm_pools import is_about_pool
from microtuning_core.usecases.job_security import secure
from microtuning_core.usecases.services import Services, StageSettings
from microtuning_core.usecases.settle import settle
from microtuning_core.usecases.tenancy import current_limits, gpus_of
from microtuning_core.usecases.warm_pools import end_unfit_pools

CHECKPOINT_PATH = "/opt/ml/checkpoints"
_VOLUME_GIB = 50


def launch(services: Services, token: str, execution: str, run_id: str, attempt: int) -> None:
    """Stores the token, makes the job if this attempt still wants one, then settles, in case it has ended already.

    That the job is asked for is written before it is: who ends the run meanwhile waits for that job and stops it.
    """
    run = services.runs.get(run_id)
    current = run.current
    if current and attempt < current.attempt:
        _give_up_job(services, run, attempt)
        return  # an old message, delivered again; the state that sent it was answered long ago
    services.runs.put_token(run_id, WaitingState("train", token, execution, attempt))
    now = datetime.now(UTC)
    run = services.runs.update(run_id, lambda run: _asked_for(run, attempt, now))
    settled = _ask(services, run, now) if run.wants_job(attempt) else settle(services, run_id, unlaunched=attempt)
    _give_up_job(services, settled, attempt)


def _asked_for(run: Run, number: int, now: datetime) -> Run:
    fresh = run.current is not None and run.current.launched_at is None and run.wants_job(number)
    return run.with_current(launched_at=now) if fresh else run


def _ask(services: Services, run: Run, now: datetime) -> Run:
    current = run.attempts[-1]
    if no_room := _no_gpus_left(services, run, current):
        return settle(services, run.run_id, refusal=no_room, unlaunched=current.attempt)
    try:
        services.jobs.create(job_request(services.settings, run, current))
    except Refused as error:
        if error.failure.failure_class == FailureClass.THROTTLED:
            raise LaunchRefused(error.failure.failure_class, error.failure.message) from error
        if current.plan.keep_alive_s and is_about_pool(error.failure):
            return _ask_without_pool(services, run, now, error.failure)
        return settle(services, run.run_id, refusal=error.failure, unlaunched=current.attempt)
    if current.launched_at == now:
        services.runs.note(
            run.run_id, "launched", current.job_name, attempt=current.attempt, instance_type=current.plan.instance_type
        )
        end_unfit_pools(services, run)
    return settle(services, run.run_id)


def _no_gpus_left(services: Services, run: Run, attempt: Attempt) -> Failure | None:
    """The GPUs of this very plan are set aside; it may be another than the one for which the run was let in."""
    limits, gpus = current_limits(services), gpus_of(attempt.plan.instance_type, attempt.plan.count)
    limited = {family: count for family, count in gpus.items() if family in limits.gpus_of(run.tenant)}
    if services.admissions.claim(run.run_id, limited, limits):
        return None
    wanted = ", ".join(f"{limits.gpus_of(run.tenant)[family]} {family}" for family in limited)
    message = f"{run.tenant} may use {wanted} GPUs at a time, and other runs of it use too many of them"
    return Failure(FailureClass.QUOTA, message)


def _ask_without_pool(services: Services, run: Run, now: datetime, refusal: Failure) -> Run:
    """The account may keep no machines of this type: the job is asked for without, and its user told what to request."""
    number = run.attempts[-1].attempt
    run = services.runs.update(run.run_id, lambda run: _without_pool(run, number))
    services.runs.note(run.run_id, "no_warm_pool", f"started without a warm pool: {refusal.message}", attempt=number)
    return _ask(services, run, now) if run.wants_job(number) else settle(services, run.run_id, unlaunched=number)


def _without_pool(run: Run, number: int) -> Run:
    current = run.current
    if current is None or current.attempt != number:
        return run
    return run.with_current(plan=current.plan.model_copy(update={"keep_alive_s": 0}))


def _give_up_job(services: Services, run: Run, number: int) -> None:
    """Stops, and lets be paid, the job of an attempt that was settled without one.

    A launch that is delivered twice at the same time may be refused once and accepted once.
    """
    attempt = next((each for each in run.attempts if each.attempt == number), None)
    if attempt is None or not attempt.is_settled or attempt.launched_at:
        return
    job = services.jobs.describe(attempt.job_name)
    if job is None:
        return
    services.runs.update(run.run_id, lambda run: _launched_after_all(run, number, job.created_at))
    services.jobs.stop(attempt.job_name)


def _launched_after_all(run: Run, number: int, at: datetime) -> Run:
    attempts = [
        each.model_copy(update={"launched_at": at}) if each.attempt == number else each for each in run.attempts
    ]
    return run.with_(attempts=tuple(attempts))


def job_request(settings: StageSettings, run: Run, attempt: Attempt) -> dict[str, Any]:
    """CreateTrainingJob for one attempt. Only fields that differ from the service's defaults."""
    plan, bucket = attempt.plan, settings.names.bucket
    request: dict[str, Any] = {
        "TrainingJobName": attempt.job_name,
        "AlgorithmSpecification": {"TrainingImage": settings.training_image_uri, "TrainingInputMode": "File"},
        "RoleArn": settings.job_role_arn(run.tenant),
        "InputDataConfig": [_channel(name, uri) for name, uri in channels(run, attempt, bucket)],
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/{output_prefix(run.run_id)}"},
        "ResourceConfig": {
            "InstanceType": plan.instance_type,
            "InstanceCount": plan.count,
            "VolumeSizeInGB": _VOLUME_GIB,
            **({"KeepAlivePeriodInSeconds": plan.keep_alive_s} if plan.keep_alive_s else {}),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": plan.max_runtime_s},
        "EnableManagedSpotTraining": plan.spot,
        "CheckpointConfig": {
            "S3Uri": f"s3://{bucket}/{checkpoints_prefix(run.run_id, attempt.lineage)}",
            "LocalPath": CHECKPOINT_PATH,
        },
        "Environment": {
            **run.spec.environment_variables,
            "MICROTUNING_RUN_ID": run.run_id,
            "MICROTUNING_ATTEMPT": str(attempt.attempt),
        },
        "HyperParameters": plain_hyperparameters(run.spec),
        "Tags": [
            {"Key": "microtuning:stage", "Value": settings.names.stage},
            {"Key": "microtuning:tenant", "Value": run.tenant},
            {"Key": "microtuning:run", "Value": run.run_id},
        ],
    }
    if plan.spot:  # without spot the field is an error; both limits together bound all interruptions of the job
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = plan.max_runtime_s + run.spec.compute.deadline_s
    if settings.tenants.by_tags:  # the job's session carries the tenant's tag on, and its role goes by that
        request["SessionChainingConfig"] = {"EnableSessionTagChaining": True}
    secure(
        request,
        plan,
        key_arn=settings.key_arn(run.tenant),
        network=settings.job_network,
        isolated=run.spec.compute.network_isolation,
    )
    return request


def plain_hyperparameters(spec: RunSpec) -> dict[str, str]:
    """A script's settings as SageMaker shows them, where they fit; the exact ones always travel by file.

    The service takes 100 keys of 256 characters and values of 2,500, each of one line.
    """
    given = spec.algorithm.hyperparameters if spec.algorithm.type == "script" else {}
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in given.items()
    }
    fitting = {key: value for key, value in texts.items() if _fits(key, 256) and _fits(value, 2500)}
    return dict(list(fitting.items())[:100])


def _fits(text: str, limit: int) -> bool:
    return 0 < len(text) <= limit and re.fullmatch(".*", text) is not None


def channels(run: Run, attempt: Attempt, bucket: str) -> list[tuple[str, S3Uri]]:
    """`(channel, uri)` of everything the job reads."""
    spec = run.spec
    uris: dict[str, str | None] = {
        "config": f"s3://{bucket}/{config_prefix(run.run_id, attempt.attempt)}",
        "train": spec.data.train,
        "eval": spec.data.eval,
        "code": spec.code.uri if spec.code else None,
        "warm": warm_data(spec),
        "teacher": teacher_uri(spec),
        "model": spec.model.base if (spec.model.base or "").startswith("s3://") else None,
        "resume": _resume_uri(run, bucket),
        **{reward_model_channel(name): uri for name, uri in reward_models(spec).items()},
        **{reward_base_channel(name): uri for name, uri in reward_bases(spec).items()},
    }
    return [(name, _split(uri)) for name, uri in uris.items() if uri]


def _resume_uri(run: Run, bucket: str) -> str | None:
    """Where a later lineage starts; it counts only while the lineage has no whole checkpoint of its own."""
    start = run.resume_from
    if start is None:
        return None
    if start.run_id:
        return f"s3://{bucket}/{kept_prefix(start.run_id, start.lineage, start.step)}"
    return f"s3://{bucket}/{step_prefix(run.run_id, start.lineage, start.step)}"


def _split(uri: str) -> S3Uri:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return S3Uri(bucket, key)


def _channel(name: str, uri: S3Uri) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": str(uri), "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": "File"}
