"""The next attempt of a run: which machine, and the configuration that its job will read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from microtuning_core.aws.objects import ObjectStore
from microtuning_core.domain.budget import run_usd, too_dear
from microtuning_core.domain.errors import BudgetExceeded, InvalidSpec, NothingFits, Problem, StaleRevision
from microtuning_core.domain.failures import FailureClass
from microtuning_core.domain.layout import config_prefix, prices_key
from microtuning_core.domain.names import job_name
from microtuning_core.domain.planning import (
    TINY_DECODER,
    ModelShape,
    Plan,
    PlanRequest,
    choose_plan,
)
from microtuning_core.domain.prices import ListedPrice, PriceTable
from microtuning_core.domain.reliability import mtbf_s
from microtuning_core.domain.run import Attempt, AttemptPlan, Run, RunStatus
from microtuning_core.domain.settle import fail_run, history, stop_run
from microtuning_core.domain.shapes import shape_from_config, shape_from_name
from microtuning_core.domain.spec import POLICIES, RunSpec, reward_bases, reward_models
from microtuning_core.domain.spec_checks import dump_spec
from microtuning_core.usecases.services import Services

_PLANS_NOW = frozenset({RunStatus.PLANNING, RunStatus.RECOVERING})
_TRIES = 8
_CONFIG_BYTES = 2**20  # of a model's config.json; the longest ones have a few kB
_NOT_FOR_THE_CONTAINER = {"keep_alive_s", "price_source", "price_as_of", "price_region"}


def plan_attempt(services: Services, run_id: str) -> Run:
    """A new attempt where one is due; otherwise the run as it stands, whose state Train then reports.

    Its files are written first, under the attempt's own number: written twice they are the same files. Planned again
    while others (costs, signs of life) write to the run first.
    """
    for _ in range(_TRIES):
        run = services.runs.get(run_id)
        if run.verdict or run.status not in _PLANS_NOW:
            return run
        try:
            return _plan(services, run)
        except StaleRevision:
            continue
    raise StaleRevision(run_id, run.revision)


def _plan(services: Services, run: Run) -> Run:
    run_id = run.run_id
    try:
        plan = choose_plan(limited_request(services, run.budgeted_spec, run_usd(run, datetime.now(UTC))), history(run))
    except BudgetExceeded as error:
        why = too_dear(run, str(error))
        return services.runs.update(run_id, lambda run: stop_run(run, why))
    except (NothingFits, InvalidSpec) as error:
        reason = str(error)
        return services.runs.update(run_id, lambda run: fail_run(run, reason, FailureClass.USER))
    attempt = new_attempt(services.names.stage, run, plan, datetime.now(UTC))
    _write_config(services, run, attempt)
    planned = services.runs.put(run.moved_to(RunStatus.TRAINING, attempts=(*run.attempts, attempt), reason=None))
    services.runs.note(
        run_id,
        "planned",
        "; ".join(plan.notices),
        attempt=attempt.attempt,
        instance_type=plan.instance_type,
        spot=plan.spot,
    )
    return planned


def new_attempt(stage: str, run: Run, plan: Plan, now: datetime) -> Attempt:
    number = len(run.attempts) + 1
    return Attempt(
        attempt=number,
        job_name=job_name(stage, run.run_id, number),
        lineage=run.lineage,
        plan=AttemptPlan(**plan.model_dump(exclude={"notices"})),
        created_at=now,
    )


def _write_config(services: Services, run: Run, attempt: Attempt) -> None:
    """spec.json, plan.json and hyperparameters.json: many and long values go by file, whatever the API's limits."""
    prefix = config_prefix(run.run_id, attempt.attempt)
    script = run.spec.algorithm if run.spec.algorithm.type == "script" else None
    services.objects.put(f"{prefix}spec.json", dump_spec(run.spec).encode())
    services.objects.put_json(f"{prefix}plan.json", plan_document(run, attempt))
    services.objects.put_json(f"{prefix}hyperparameters.json", script.hyperparameters if script else {})


def plan_document(run: Run, attempt: Attempt) -> dict[str, Any]:
    """What the container is told of its attempt; what happens to its machines afterwards is none of its business."""
    plan: dict[str, Any] = json.loads(attempt.plan.model_dump_json(exclude=_NOT_FOR_THE_CONTAINER))
    identity = {"schema_version": 1, "run_id": run.run_id, "attempt": attempt.attempt, "lineage": attempt.lineage}
    lasts_s = mtbf_s(spot=attempt.plan.spot, count=attempt.plan.count, history=history(run))
    return identity | plan | {"mtbf_s": lasts_s}


def plan_request(services: Services, spec: RunSpec, spent_usd: Decimal = Decimal(0)) -> PlanRequest:
    """What planning needs of a spec. InvalidSpec when the model's size cannot be told and no type is named."""
    others = [_shape_of(services, source) for source in frozen_sources(spec)]
    request = request_for(spec, _shape(services, spec), spent_usd, frozen=others)
    return request.model_copy(update={"prices": newest_prices(services.objects, services.names.region)})


def newest_prices(objects: ObjectStore, region: str) -> dict[str, ListedPrice]:
    """What `microtuning prices refresh` has read for the region, by type; none where nobody asked it to."""
    document = objects.read(prices_key(region))
    table = PriceTable.model_validate_json(document) if document else None
    return {each.instance_type: each for each in table.prices} if table else {}


def limited_request(services: Services, spec: RunSpec, spent_usd: Decimal = Decimal(0)) -> PlanRequest:
    """The same, within the GPUs that the run's tenant may use now."""
    limits = services.settings.tenants.limits_of(spec.tenant, services.admissions.limit_changes())
    request = plan_request(services, spec, spent_usd)
    return request.model_copy(update={"most_gpus": dict(limits.gpus)})


def frozen_sources(spec: RunSpec) -> list[str]:
    """Where the models are from that only answer: the teacher, and the reward models; of an adapter, its base."""
    teacher = [spec.algorithm.teacher.base] if spec.algorithm.type == "distillation" else []
    return [*teacher, *(reward_models(spec) | reward_bases(spec)).values()]


def request_for(
    spec: RunSpec,
    shape: ModelShape | None,
    spent_usd: Decimal = Decimal(0),
    *,
    frozen: Sequence[ModelShape | None] = (),
) -> PlanRequest:
    """The same from shapes that are known already (fit() reads them from local folders); None = not known."""
    algorithm, compute, model = spec.algorithm, spec.compute, spec.model
    trained = algorithm if algorithm.type != "script" else None
    total_steps = trained.max_train_steps if trained else None
    return PlanRequest(
        model=shape,
        frozen=(*(each for each in frozen if each), *_own_reference(spec, shape)),
        gradient_checkpointing=model.gradient_checkpointing,
        adapter=model.effective_adapter if trained else "none",
        rank=model.rank,
        dtype=model.dtype,
        max_length=trained.max_length if trained else 1024,
        batch_size=trained.batch_size * _rows_of(trained.type) if trained else None,
        instance=compute.instance,
        fallbacks=compute.fallbacks,
        count=compute.count,
        spot=compute.spot,
        recovery=compute.recovery,
        max_runtime_s=compute.max_runtime_s,
        budget_usd=spec.budget_usd,
        spent_usd=spent_usd,
        total_steps=total_steps,
        checkpoint_every_steps=spec.checkpoint.every_steps if isinstance(spec.checkpoint.every_steps, int) else None,
    )


def _rows_of(algorithm_type: str) -> int:
    """Sequences in what `batch_size` counts: of a pair two."""
    return 2 if algorithm_type in ("dpo", "orpo", "reward") else 1


def _own_reference(spec: RunSpec, shape: ModelShape | None) -> tuple[ModelShape, ...]:
    """A policy with a penalty and no adapter to switch off is held to a second copy of the model."""
    is_held = isinstance(spec.algorithm, POLICIES) and spec.algorithm.kl_coef > 0
    return (shape,) if is_held and shape and spec.model.effective_adapter == "none" else ()


def _shape(services: Services, spec: RunSpec) -> ModelShape | None:
    """The model's shape: of the preset, from config.json of an own prefix, or from the size in a hub id's name."""
    base = spec.model.base
    if base is None:
        return TINY_DECODER
    shape = _shape_of(services, base)
    if shape is None and spec.algorithm.type != "script" and spec.compute.instance == "auto":
        message = f"the size of {base} cannot be told from its name or config.json; name a type that holds it"
        raise InvalidSpec([Problem("compute.instance", message)])
    return shape


def _shape_of(services: Services, source: str) -> ModelShape | None:
    if not source.startswith("s3://"):
        return shape_from_name(source)
    key = source.removeprefix(f"s3://{services.names.bucket}/").rstrip("/")
    return _shape_in(services, f"{key}/config.json")


def _shape_in(services: Services, config_key: str) -> ModelShape | None:
    body = services.objects.read(config_key, at_most=_CONFIG_BYTES)
    try:
        return shape_from_config(json.loads(body)) if body else None
    except (ValueError, RecursionError) as error:
        raise InvalidSpec([Problem("model.base", f"its config.json is not valid JSON: {error}")]) from error
