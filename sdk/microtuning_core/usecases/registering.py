"""A completed run becomes a model version: what was trained, from which checkpoint, and how good it is on held-out rows."""

from __future__ import annotations

from datetime import UTC, datetime

from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.layout import CheckpointKey, model_version_key
from microtuning_core.domain.manifest import CheckpointManifest
from microtuning_core.domain.model import EVALUATION_METRICS, ModelVersion
from microtuning_core.domain.names import slug
from microtuning_core.domain.run import Run
from microtuning_core.domain.settle import fail_run
from microtuning_core.usecases.checkpoint import manifest_at, registered
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import newest_whole_step


def register_model(services: Services, run_id: str) -> Run:
    """Registers the model and gives the verdict; a model without the metrics it was asked to have is refused.

    A script evaluates for itself, and a run without data.eval has nothing to be judged on: both complete without a version.
    """
    run = services.runs.get(run_id)
    if run.verdict or run.is_final:
        return run
    manifest = _newest_manifest(services, run)
    if manifest:
        _keep(services, manifest)
    if run.spec.algorithm.type == "script" or run.spec.data.eval is None:
        services.runs.note(run_id, "model_not_registered", "there is no evaluation to register it with (data.eval)")
        return services.runs.update(run_id, lambda run: _completed(run, manifest))
    missing = _missing_metrics(run, manifest)
    if manifest is None or missing:
        services.runs.note(run_id, "model_not_registered", missing)
        return services.runs.update(run_id, lambda run: fail_run(run, missing, FailureClass.PLATFORM))
    version = _register(services, run, manifest)
    return services.runs.update(run_id, lambda run: _completed(_with_model(run, version), manifest))


def _with_model(run: Run, version: str) -> Run:
    return run.with_(model_version=run.model_version or version)


def _completed(run: Run, manifest: CheckpointManifest | None) -> Run:
    """A run that completed can be gone on from at once, so it names its final checkpoint."""
    if manifest:
        run = registered(run, manifest)
    return run if run.verdict else run.with_(verdict="completed", reason=None)


def _keep(services: Services, manifest: CheckpointManifest) -> None:
    """The message that the manifest is there may come later, and then tells how much of it was hashed."""
    known = {(each.lineage, each.step) for each in services.runs.checkpoints(manifest.run_id)}
    if (manifest.lineage, manifest.step) not in known:
        services.runs.put_checkpoint(manifest)


def _newest_manifest(services: Services, run: Run) -> CheckpointManifest | None:
    """Read from S3, since the event of the last manifest may come after the job's end."""
    step = newest_whole_step(services, run)
    if step is None:
        return None
    return manifest_at(services, CheckpointKey(run.tenant, run.run_id, run.lineage, step))


def _missing_metrics(run: Run, manifest: CheckpointManifest | None) -> str:
    if manifest is None or not manifest.final:
        return "the job completed and its final checkpoint is not in S3; the model was not registered"
    wanted = EVALUATION_METRICS[run.spec.algorithm.type]
    missing = [name for name in wanted if name not in manifest.metrics]
    return f"the final checkpoint has no {', '.join(missing)}; the model was not registered" if missing else ""


def _register(services: Services, run: Run, manifest: CheckpointManifest) -> str:
    group = slug(run.name)
    job = services.jobs.describe(run.attempts[-1].job_name)
    number = services.runs.next_version(run.tenant, group)
    version = ModelVersion(
        group=group,
        version=number,
        tenant=run.tenant,
        run_id=run.run_id,
        lineage=manifest.lineage,
        step=manifest.step,
        uri=(job.artifact_uri if job else None) or "",
        metrics=dict(manifest.metrics),
        status="registered",
        created_at=datetime.now(UTC),
    )
    services.objects.put(model_version_key(run.tenant, group, number), version.model_dump_json(indent=1).encode())
    services.runs.note(run.run_id, "model_registered", f"{group}/v{number}", uri=version.uri)
    return f"{group}/v{number}"
