"""Checkpoint sync: what the mirror brought to S3 is verified, registered, and pruned; progress keeps the run alive."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from microtuning_core.domain.errors import NotYetWhole
from microtuning_core.domain.layout import CheckpointKey, progress_key, step_prefix
from microtuning_core.domain.manifest import MANIFEST_NAME, CheckpointManifest
from microtuning_core.domain.progress import Progress
from microtuning_core.domain.record import Record
from microtuning_core.domain.retention import superfluous
from microtuning_core.domain.run import Liveness, Recovery, Run, RunMetrics, metered
from microtuning_core.domain.settle import register_checkpoint
from microtuning_core.usecases.services import Services

MANIFEST_BYTES = 8 * 2**20  # of tens of thousands of files
PROGRESS_BYTES = 64 * 2**10  # it is kept below 4 kB, and the run's record, of at most 400 kB, takes it in
_MOST_METRICS = 1000  # a row of the table takes 400 kB
T = TypeVar("T", bound=Record)

# Read and hashed of one checkpoint in S3, smallest files first; ten of them in a batch stay within the function's 30 s.
HASHED_BYTES = 32 * 2**20


def register(services: Services, key: CheckpointKey) -> None:
    """Registers the checkpoint once every file of its manifest is there with its size and, as far as can be told here,
    its hash; NotYetWhole until then.
    """
    manifest = manifest_at(services, key)
    if manifest is None:
        return
    prefix = step_prefix(manifest.run_id, manifest.lineage, manifest.step)
    sizes = {each.key: each.bytes for each in services.objects.walk(prefix)}
    if any(sizes.get(prefix + file.path) != file.bytes for file in manifest.files):
        raise NotYetWhole(f"checkpoint {prefix}")
    services.runs.put_checkpoint(manifest, _hashed_bytes(services, prefix, manifest))
    run = services.runs.update(key.run_id, lambda run: registered(run, manifest))
    prune(services, run)


def registered(run: Run, manifest: CheckpointManifest) -> Run:
    return register_checkpoint(run, manifest.lineage, manifest.step, manifest.created_at)


def manifest_at(services: Services, key: CheckpointKey) -> CheckpointManifest | None:
    """What a checkpoint of the run says of itself; None where it was pruned meanwhile or cannot be believed, which is
    written down.
    """
    step = key.step if key.step is not None else -1
    body = services.objects.read(step_prefix(key.run_id, key.lineage, step) + MANIFEST_NAME, at_most=MANIFEST_BYTES)
    manifest = None if body is None else _understood(services, key, CheckpointManifest, body)
    if manifest is None:
        return None
    if (manifest.run_id, manifest.lineage, manifest.step) != (key.run_id, key.lineage, step):
        _refuse(services, key, "speaks of another checkpoint")
        return None
    if len(manifest.metrics) > _MOST_METRICS:
        _refuse(services, key, f"metrics: has {len(manifest.metrics)}, and at most {_MOST_METRICS} are kept")
        return None
    return manifest


def _understood(services: Services, key: CheckpointKey, kind: type[T], body: bytes) -> T | None:
    """A job's own words. Code of the user's may write anything there: what cannot be read is written down and left alone,
    for delivered again it would say the same."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        _refuse(services, key, f"{where}: {first['msg']}")
        return None


def _refuse(services: Services, key: CheckpointKey, why: str) -> None:
    file = "progress.json" if key.step is None else f"step-{key.step}/{MANIFEST_NAME}"
    services.runs.note(key.run_id, "checkpoint_refused", f"{file} of lineage {key.lineage} was ignored: {why[:300]}")


def _hashed_bytes(services: Services, prefix: str, manifest: CheckpointManifest) -> int:
    """Bytes in the files whose hash is the manifest's: of small files, and of those that S3 keeps a hash of.

    Raises:
        NotYetWhole: a file has another hash, be it spoiled or of an earlier attempt at the same step.
    """
    left, hashed = HASHED_BYTES, 0
    for file in sorted(manifest.files, key=lambda file: file.bytes):
        key, is_small = prefix + file.path, file.bytes <= left
        left -= file.bytes if is_small else 0
        found = services.objects.sha256_of(key) if is_small else services.objects.stored_sha256_of(key)
        if found is None:
            continue
        if found != file.sha256:
            raise NotYetWhole(f"checkpoint {prefix}: {file.path} is not what its manifest says, and so it")
        hashed += file.bytes
    return hashed


def prune(services: Services, run: Run) -> None:
    """Removes what the spec does not want kept of the current lineage, and nothing that the run is at or goes back to.

    While a job fetches the checkpoints nothing goes: it would miss an object that it has seen a moment before. The first
    sign of its container makes up for it.
    """
    if run.is_being_restored:
        return
    registered = [each for each in services.runs.checkpoints(run.run_id) if each.lineage == run.lineage]
    wanted = (run.last_checkpoint, run.rollback_to)
    in_use = {each.step for each in wanted if each and each.lineage == run.lineage}
    for old in superfluous(registered, run.spec.checkpoint, in_use=in_use):
        prefix = step_prefix(run.run_id, old.lineage, old.step)
        # The manifest first: what is half deleted must not look whole.
        services.objects.delete([prefix + MANIFEST_NAME])
        services.objects.delete([each.key for each in services.objects.walk(prefix)])
        services.runs.delete_checkpoint(run.run_id, old.lineage, old.step)


def hear_progress(services: Services, key: CheckpointKey) -> None:
    """The sign of life: step, metrics and restarts of the current attempt, as progress.json has them."""
    progress = progress_at(services, key)
    if progress is None:
        return
    before: Run | None = None

    def heard(run: Run) -> Run:
        nonlocal before
        before = run
        return with_progress(run, progress)

    run = services.runs.update(key.run_id, heard)
    if before is None:
        return
    services.note_recoveries(before, run)
    if before.is_being_restored:
        prune(services, run)


def progress_at(services: Services, key: CheckpointKey) -> Progress | None:
    """The last sign of life in that lineage; None where there is none, or none that can be believed."""
    document = services.objects.read(progress_key(key.run_id, key.lineage), at_most=PROGRESS_BYTES)
    return None if document is None else _understood(services, key, Progress, document)


def with_last_words(services: Services, run: Run) -> Run:
    """The run with the last sign of its current attempt, which has ended: the message of it may be late, or lost with a
    function or a queue, and the next attempt writes its own over it.
    """
    progress = progress_at(services, CheckpointKey(run.tenant, run.run_id, run.lineage, None))
    return with_progress(run, progress) if progress else run


def with_progress(run: Run, progress: Progress) -> Run:
    """News of an older attempt or an older moment change nothing; the last of a run may come after it has ended."""
    current = run.current
    stale = run.liveness is not None and progress.at <= run.liveness.at
    if current is None or progress.attempt != current.attempt or stale:
        return run
    restarts = tuple(Recovery(**each.model_dump()) for each in progress.restarts)
    known = {(each.cause, each.at) for each in restarts}
    others = tuple(each for each in current.recoveries if (each.cause, each.at) not in known)
    recoveries = tuple(sorted((*others, *restarts), key=lambda each: each.at))
    return run.with_current(recoveries=recoveries, starts=progress.starts, metered=metered(progress)).with_(
        liveness=Liveness(
            at=progress.at,
            step=progress.step,
            total_steps=progress.total_steps,
            longest_step_ms=progress.longest_step_ms,
            checkpoint=progress.checkpoint,
        ),
        metrics=RunMetrics(
            first=run.metrics.first or dict(progress.metrics.first),
            last=dict(progress.metrics.last),
            eval_before=dict(progress.metrics.eval_before) or run.metrics.eval_before,
            eval_after=dict(progress.metrics.eval_after) or run.metrics.eval_after,
        ),
    )
