"""What a run would take and cost on the machine that was chosen and on the two next best, before it starts.

The guess of core.domain.estimates, corrected by what past attempts of the same tenant measured (core.domain.calibration).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from microtuning_core.domain.calibration import (
    Estimate,
    Sample,
    calibration,
    drawing_of,
    estimate,
    family_of,
    samples_of,
)
from microtuning_core.domain.catalog import find
from microtuning_core.domain.errors import BudgetExceeded
from microtuning_core.domain.estimates import Work, steps_of, training_s
from microtuning_core.domain.planning import candidates
from microtuning_core.domain.spec import POLICIES
from microtuning_sdk._draft import at_newest_prices

if TYPE_CHECKING:
    from microtuning_core.domain.datasets import Row
    from microtuning_core.domain.planning import Plan
    from microtuning_core.domain.spec import RunSpec
    from microtuning_sdk._connection import Stage
    from microtuning_sdk._draft import Draft

MEASURED_ROWS = 2000
_PLANS = 3
_CHARACTERS_A_TOKEN = 4
_RUNS_LOOKED_AT = 50


def past_samples(stage: Stage, tenant: str) -> list[Sample]:
    """What the newest runs of the tenant measured."""
    return samples_of(stage.runs.list_runs(tenant, limit=_RUNS_LOOKED_AT))


def as_the_stage_knows(stage: Stage, ready: Draft) -> tuple[Draft, list[Sample], str]:
    """The draft at the prices that the stage would plan with, what past runs measured, and why neither if it is silent.

    A spec can be checked before there is a stage, or by somebody who may not read it: the catalog's prices do.
    """
    try:
        return at_newest_prices(stage, ready), past_samples(stage, ready.spec.tenant), ""
    except (BotoCoreError, ClientError) as error:
        return ready, [], f"could not be asked for prices and past runs ({error})"


def estimates(ready: Draft, past: Sequence[Sample] = ()) -> tuple[Estimate, ...]:
    """Of the chosen plan first, then of the next best ones; none where nobody can tell how much work it is."""
    work = work_of(ready)
    if work is None or ready.request.model is None:
        return ()
    return tuple(_estimate(ready, plan, work, past) for plan in _plans(ready))


def _plans(ready: Draft) -> list[Plan]:
    """The chosen plan, and the first ones on other types: without the user's choice of a type, where that was one."""
    request = ready.request.model_copy(update={"instance": "auto", "fallbacks": ()})
    others = {ready.plan.instance_type: ready.plan}
    try:
        for plan in candidates(request):
            others.setdefault(plan.instance_type, plan)
    except BudgetExceeded:
        pass  # a budget that buys the chosen plan, and none that a machine would choose
    return list(others.values())[:_PLANS]


def _estimate(ready: Draft, plan: Plan, work: Work, past: Sequence[Sample]) -> Estimate:
    model, adapter = ready.request.model, ready.request.adapter
    assert model is not None  # estimates() asked
    guessed_s = training_s(model, adapter, find(plan.instance_type), work, count=plan.count)
    family = family_of(ready.spec.model.base or ready.spec.model.arch or "")
    found = calibration(past, family, plan.instance_type)
    return estimate(guessed_s, plan.instance_type, plan.count, plan.price_usd_per_hour, found, spot=plan.spot)


def work_of(ready: Draft) -> Work | None:
    """Steps from the rows; tokens from their characters, which is enough for a guess."""
    algorithm, rows = ready.spec.algorithm, ready.rows.get("data.train", [])
    if algorithm.type == "script" or algorithm.type == "custom" or not rows:
        return None
    a_token = 1 if ready.spec.model.arch else _CHARACTERS_A_TOKEN
    some = spread(rows)
    tokens = min(sum(len(mark(row)) for row in some) / len(some) / a_token, algorithm.max_length)
    if isinstance(algorithm, POLICIES) or algorithm.type == "distillation":
        return _work_of_drawing(ready.spec, algorithm, len(rows), tokens)
    answers = len(rows) * (2 if algorithm.type == "kto" and "chosen" in rows[0].values else 1)  # a pair is one of each
    steps = steps_of(answers, algorithm.batch_size, algorithm.epochs, algorithm.max_train_steps)
    return Work(steps=steps, tokens_a_step=algorithm.batch_size * tokens)


def _work_of_drawing(spec: RunSpec, algorithm: Any, rows: int, prompt_tokens: float) -> Work:
    """Half of what a completion may have is what it has."""
    drawing = drawing_of(spec)
    groups = algorithm.batch_size // algorithm.group_size * drawing["minibatches"]
    updates = drawing["minibatches"] * drawing["passes"]
    return Work(
        steps=steps_of(rows, groups, algorithm.epochs, algorithm.max_train_steps, updates=updates),
        tokens_a_step=algorithm.batch_size * (prompt_tokens + drawing["drawn_positions"] / 2),
        **drawing,
    )


def spread(rows: Sequence[Row]) -> list[Row]:
    """At most MEASURED_ROWS, from everywhere in the data."""
    step = -(-len(rows) // MEASURED_ROWS) or 1
    return list(rows[::step])


def mark(row: Row) -> str:
    """A row as one text: the same for rows that say the same."""
    return json.dumps(row.values, sort_keys=True, ensure_ascii=False)


def shown_time(seconds: float) -> str:
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def shown_estimate(found: Estimate) -> str:
    """One line: how long, for how much, between what and what, and by what it is known."""
    machines = found.instance_type if found.count == 1 else f"{found.count} x {found.instance_type}"
    money = f"{found.usd:.2f} USD ({found.low_usd:.2f} to {found.high_usd:.2f})"
    spot = f"; spot would be about {found.spot_usd:.2f} USD" if found.spot_usd is not None else ""
    return f"{machines}: {shown_time(found.seconds)} and {money} on AWS, on demand; {found.basis}{spot}"


def estimate_view(found: Estimate) -> dict[str, Any]:
    """As JSON: money as text, with every decimal."""
    view = asdict(found) | {"basis": found.basis}
    return {key: str(value) if isinstance(value, Decimal) else value for key, value in view.items()}
