"""What an attempt runs on: the cheapest machine whose memory holds the run, and what to choose after a failure.

    PlanRequest -> candidates -> [Plan, …], cheapest first
    PlanRequest + the attempts so far -> choose_plan -> Plan

Pure and small: a spec is turned into a PlanRequest by its caller. The memory estimate is an upper bound by rule of
thumb, in GiB on one worker; it decides what is tried first, and a run that still runs out of memory moves on by
choose_plan.
"""

from __future__ import annotations

from collections import Counter
from datetime import date
from decimal import ROUND_UP, Decimal
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from microtuning_core.domain.catalog import CATALOG, InstanceType, find
from microtuning_core.domain.errors import BudgetExceeded, InvalidSpec, NothingFits, Problem
from microtuning_core.domain.failures import NO_ROOM, AttemptSummary, FailureClass, no_room_streak
from microtuning_core.domain.prices import ListedPrice, priced
from microtuning_core.domain.record import UsdAmount, Value
from microtuning_core.domain.warm_pools import keep_alive_s

if TYPE_CHECKING:
    from collections.abc import Sequence

Adapter = Literal["none", "lora", "qlora"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd"]
Dtype = Literal["auto", "float32", "bfloat16"]

CPU_PARAMETERS_LIMIT = 300_000_000  # beyond it a step on CPU takes minutes; only the user may ask for that
SHORT_CPU_RUN_S = 600  # spot saves cents on such a run, and may cost minutes
DEAREST_TO_CHEAPEST = 8  # a plan nobody asked for by name never costs more than this times the cheapest one
SHORTEST_RUNTIME_S = 300
STOP_RESERVE_S = 180  # of the budget: 120 s between SIGTERM and the end, and the upload
RUNTIME_GIB = 1.5  # interpreter, libraries, CUDA context
HALVED_IN_PLACE = 8  # the container tries micro-batches down to an eighth before an attempt fails for memory
USABLE_SHARE = 0.9  # the rest goes to fragmentation, and to what a GPU of nominal size does not show


class ModelShape(Value):
    """A decoder, as far as its memory depends on it. `bytes_per_weight` is that of its stored weights."""

    parameters: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    layers: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    bytes_per_weight: int = Field(4, ge=1, le=8)


# The preset "tiny-decoder", rounded up; its vocabulary is the characters of the data.
TINY_DECODER = ModelShape(parameters=200_000, hidden_size=64, layers=3, vocabulary=128)


class MemoryNeed(Value):
    """GiB on one worker while it trains, by what takes them."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float

    @property
    def static_gib(self) -> float:
        """What no smaller micro-batch saves."""
        return self.weights_gib + self.gradients_gib + self.optimizer_gib

    @property
    def total_gib(self) -> float:
        return self.static_gib + self.activations_gib + self.logits_gib


class PlanRequest(Value):
    """What planning needs of a run.

    model: None = its shape is not known (a script that loads what it likes): then only GPU types, or what is named.
    batch_size: rows or completions an optimizer step (a pair is two rows); None = the script's own business.
    frozen: models beside the trained one that only answer: a teacher, a reference without an adapter, reward models.
    total_steps: optimizer steps of the whole run; None = not known, and then spot "auto" means on-demand.
    checkpoint_every_steps: None = by time.
    expected_s: how long it will train, where somebody knows.
    spent_usd: what earlier attempts cost; the budget covers them too.
    most_gpus: GPUs by family that its tenant may use at a time; a family that is not named has no limit.
    prices: by type, where they are newer than the catalog's.
    """

    model: ModelShape | None
    frozen: tuple[ModelShape, ...] = ()
    gradient_checkpointing: bool = False
    adapter: Adapter = "none"
    rank: int = Field(16, ge=1)
    optimizer: Optimizer = "adamw"
    dtype: Dtype = "auto"
    max_length: int = Field(1024, ge=1)
    batch_size: int | None = Field(None, ge=1)
    instance: str = "auto"
    fallbacks: tuple[str, ...] = ()
    count: int = Field(1, ge=1)
    spot: Literal["auto"] | bool = "auto"
    recovery: Literal["cheap", "fast"] = "cheap"
    max_runtime_s: int = Field(86_400, ge=1)
    budget_usd: UsdAmount | None = None
    spent_usd: UsdAmount = Decimal(0)
    total_steps: int | None = Field(None, ge=1)
    checkpoint_every_steps: int | None = Field(None, ge=1)
    expected_s: int | None = Field(None, ge=0)
    most_gpus: dict[str, int] = Field(default_factory=dict)
    prices: dict[str, ListedPrice] = Field(default_factory=dict)


class Plan(Value):
    """What an attempt runs on. `price_usd_per_hour`: on-demand, of one instance; for spot it is the upper bound.

    keep_alive_s: how long its machines are kept after it for a next attempt.
    """

    instance_type: str
    count: int
    spot: bool
    micro_batch_size: int | None
    max_runtime_s: int
    price_usd_per_hour: UsdAmount
    price_source: str | None = None
    price_as_of: date | None = None
    price_region: str = "us-east-1"
    keep_alive_s: int = 0
    notices: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------------- memory

_GIB = 2**30
_OPTIMIZER_BYTES = {
    "adamw": 8,
    "adamw_8bit": 2,
    "sgd": 0,
}  # two float32 moments a trained weight; arXiv:1910.02054, 3.1
_MASTER_BYTES = 4  # a float32 copy of each trained weight that is stored in 16 bits; ibid.
_NF4_BYTES = 0.516  # 4 bits and 0.127 bits of doubly quantized constants; arXiv:2305.14314, section 3
_LORA_WIDTH = 24  # sum of (inputs + outputs) of the seven matrices of a layer, in hidden sizes (MLP of 3.5)
# Elements kept for the backward pass, by token, layer and hidden size, with a fused attention. Measured with
# torch.autograd.graph.saved_tensors_hooks on transformers' Llama and Qwen2: 21 (MLP 2.7 times the hidden size),
# 25 (3.5), 28 (4.75). The 17 of arXiv:2205.05198, table 2, are for a GPT without gates.
_ACTIVATION_ELEMENTS = 32
# With gradient checkpointing a layer keeps its input alone, and one layer at a time is computed again.
_KEPT_ELEMENTS = 1
_LOGIT_BYTES = 12  # float32 copies beside the logits: for the loss, its log-softmax and its gradient


def estimate_memory(
    model: ModelShape,
    adapter: Adapter,
    optimizer: Optimizer,
    max_length: int,
    micro_batch: int,
    *,
    rank: int = 16,
    gradient_checkpointing: bool = False,
    frozen: Sequence[ModelShape] = (),
) -> MemoryNeed:
    """The memory of one worker at its peak, the backward pass.

    weights      parameters x bytes; with qlora 0.516 bytes each, and the embeddings as they are; and of `frozen` models
    gradients    trained weights x bytes
    optimizer    trained weights x (8 for AdamW's moments + 4 for a float32 master copy of 16-bit weights)
    activations  micro_batch x max_length x layers x hidden_size x 32 elements x bytes; with gradient checkpointing
                 (layers x 1 element + 32 elements of one layer)
    logits       micro_batch x max_length x vocabulary x (bytes + 12)

    Trained are all weights, or with an adapter rank x 24 x hidden_size x layers weights of 4 bytes. Full fine-tuning
    in 16 or 32 bits thus takes 16 bytes a parameter.

    Args:
        max_length: tokens of one row, prompt and completion together.
        micro_batch: rows in one forward and backward pass.
    """
    stored_bytes = model.bytes_per_weight
    trained, trained_bytes = model.parameters, stored_bytes
    if adapter != "none":
        trained, trained_bytes = rank * _LORA_WIDTH * model.hidden_size * model.layers, 4
    master_bytes = _MASTER_BYTES if trained_bytes < 4 and optimizer != "sgd" else 0
    tokens = micro_batch * max_length
    elements = model.layers * _ACTIVATION_ELEMENTS
    if gradient_checkpointing:
        elements = model.layers * _KEPT_ELEMENTS + _ACTIVATION_ELEMENTS
    frozen_bytes = sum(each.parameters * each.bytes_per_weight for each in frozen)
    own_bytes = _base_bytes(model, adapter) + (trained * trained_bytes if adapter != "none" else 0)
    return MemoryNeed(
        weights_gib=(own_bytes + frozen_bytes) / _GIB,
        gradients_gib=trained * trained_bytes / _GIB,
        optimizer_gib=trained * (_OPTIMIZER_BYTES[optimizer] + master_bytes) / _GIB,
        activations_gib=tokens * elements * model.hidden_size * stored_bytes / _GIB,
        logits_gib=tokens * model.vocabulary * (stored_bytes + _LOGIT_BYTES) / _GIB,
    )


def _base_bytes(model: ModelShape, adapter: Adapter) -> float:
    if adapter != "qlora":
        return model.parameters * model.bytes_per_weight
    embeddings = min(model.parameters, model.vocabulary * model.hidden_size)
    return embeddings * model.bytes_per_weight + (model.parameters - embeddings) * _NF4_BYTES


def _usable_gib(row: InstanceType) -> float:
    return row.memory_for_training_gib * USABLE_SHARE - RUNTIME_GIB


def _need(request: PlanRequest, row: InstanceType, micro_batch: int) -> MemoryNeed | None:
    """The estimate on this type; None when the shape is not known. Without bf16 in hardware weights take 4 bytes."""
    if request.model is None:
        return None
    wide = request.dtype == "float32" or not row.bf16
    stored_bytes = 4 if wide else 2 if request.dtype == "bfloat16" else request.model.bytes_per_weight
    model = request.model.model_copy(update={"bytes_per_weight": stored_bytes})
    return estimate_memory(
        model,
        request.adapter,
        request.optimizer,
        request.max_length,
        micro_batch,
        rank=request.rank,
        gradient_checkpointing=request.gradient_checkpointing,
        frozen=request.frozen,
    )


def memory_on(request: PlanRequest, plan: Plan) -> MemoryNeed | None:
    """The estimate for that plan, by what takes it; None where the model's shape is not known."""
    return _need(request, find(plan.instance_type), plan.micro_batch_size or request.batch_size or 1)


def _fits(request: PlanRequest, row: InstanceType, micro_batch: int) -> bool:
    need = _need(request, row, micro_batch)
    return need is None or need.total_gib <= _usable_gib(row)


def _largest_micro_batch(request: PlanRequest, row: InstanceType) -> int | None:
    """The whole batch, or its half, or … that fits; 1 if none does; None = the whole batch (or the script decides)."""
    size = request.batch_size
    if size is None or _fits(request, row, size):
        return None
    while size > 1 and not _fits(request, row, size):
        size //= 2
    return size


# ----------------------------------------------------------------------------------------------------- candidates


def candidates(request: PlanRequest) -> list[Plan]:
    """Every plan that may be tried, cheapest first (a named type first, then its fallbacks in the user's order).

    Raises:
        InvalidName: a named type is not in the catalog.
        NothingFits: no allowed type has the memory.
        BudgetExceeded: what is left of the budget does not buy 300 s and the reserve on any of them.
    """
    return _plans(request, _fitting_rows(request))


def _plans(request: PlanRequest, rows: Sequence[InstanceType]) -> list[Plan]:
    affordable = [row for row in rows if _runtime_s(request, row) >= SHORTEST_RUNTIME_S]
    if not affordable:
        raise _too_dear(request, rows)
    return [_plan(request, row, spot) for row in affordable for spot in _spot_choices(request, row)]


def _plan(request: PlanRequest, row: InstanceType, spot: bool) -> Plan:
    return Plan(
        instance_type=row.instance_type,
        count=request.count,
        spot=spot,
        micro_batch_size=_largest_micro_batch(request, row),
        max_runtime_s=_runtime_s(request, row),
        price_usd_per_hour=row.price_usd_per_hour,
        price_source=row.price_source,
        price_as_of=row.price_as_of,
        price_region=row.price_region,
        keep_alive_s=keep_alive_s(request.recovery, spot=spot),
        notices=_notices(request, row),
    )


def _fitting_rows(request: PlanRequest, *, above_gib: int = 0) -> list[InstanceType]:
    """The types that may be used and fit, in the order to try them; only those with more memory than `above_gib`."""
    named = [priced(find(name), request.prices) for name in (request.instance, *request.fallbacks) if name != "auto"]
    found = _automatic_rows(request, above_gib) if request.instance == "auto" else []
    for row in named:
        if row not in found and row.memory_for_training_gib > above_gib and _may_hold(request, row):
            found.append(row)
    if not found:
        raise _nothing_fits(request, _catalog(request) if request.instance == "auto" else named, above_gib)
    allowed = [row for row in found if _may_have_gpus(request, row)]
    if not allowed:
        raise _too_many_gpus(request, found)
    return allowed


def _may_have_gpus(request: PlanRequest, row: InstanceType) -> bool:
    most = request.most_gpus.get(row.gpu_family or "")
    return most is None or row.gpus * request.count <= most


def _too_many_gpus(request: PlanRequest, rows: Sequence[InstanceType]) -> InvalidSpec:
    cheapest = rows[0]
    takes = f"{request.count} x {cheapest.instance_type} has {cheapest.gpus * request.count}"
    most = request.most_gpus[cheapest.gpu_family or ""]
    message = f"its tenant may use {most} {cheapest.gpu_family} GPUs at a time, and {takes}; use less, or ask for more"
    return InvalidSpec([Problem("compute", message)])


def _automatic_rows(request: PlanRequest, above_gib: int) -> list[InstanceType]:
    suitable = [row for row in _catalog(request) if row.memory_for_training_gib > above_gib and _suits(request, row)]
    cheapest_first = sorted(suitable, key=lambda row: (row.price_usd_per_hour, row.instance_type))
    return [
        row
        for row in cheapest_first
        if row.price_usd_per_hour <= cheapest_first[0].price_usd_per_hour * DEAREST_TO_CHEAPEST
    ]


def _catalog(request: PlanRequest) -> list[InstanceType]:
    """Every type, at the newest price that is known."""
    return [priced(row, request.prices) for row in CATALOG.values()]


def _suits(request: PlanRequest, row: InstanceType) -> bool:
    """Whether a type that nobody named is a sensible choice."""
    if request.dtype == "bfloat16" and not row.bf16:
        return False
    if not row.gpus and (request.model is None or request.adapter == "qlora"):
        return False
    if not row.gpus and request.model is not None and request.model.parameters > CPU_PARAMETERS_LIMIT:
        return False
    return _fits(request, row, 1)


def _may_hold(request: PlanRequest, row: InstanceType) -> bool:
    """A named type is taken at the user's word, unless the weights and their optimizer alone are larger than it."""
    need = _need(request, row, 1)
    return need is None or need.static_gib <= row.memory_for_training_gib


def _nothing_fits(request: PlanRequest, rows: Sequence[InstanceType], above_gib: int) -> NothingFits:
    largest = max(rows, key=lambda row: row.memory_for_training_gib)
    need = _need(request, largest, 1)
    needed_gib = (need.total_gib + RUNTIME_GIB) / USABLE_SHARE if need else 0.0
    return NothingFits(max(needed_gib, above_gib + 1.0), float(largest.memory_for_training_gib))


def _notices(request: PlanRequest, row: InstanceType) -> tuple[str, ...]:
    found = []
    if request.dtype == "bfloat16" and not row.bf16:
        found.append(f"{row.instance_type} has no bfloat16 in hardware: float32 is used instead")
    if not _fits(request, row, 1):
        found.append(f"{row.instance_type} was named, but may be too small for this run")
    if request.checkpoint_every_steps is not None:
        notice = steps_between_checkpoints(request.checkpoint_every_steps, request.total_steps)[1]
        found += [notice] if notice else []
    return tuple(found)


# ----------------------------------------------------------------------------------------------- budget and spot


def _runtime_s(request: PlanRequest, row: InstanceType) -> int:
    """The longest run time: the user's, or what is left of the budget at the on-demand price, less the reserve."""
    if request.budget_usd is None:
        return request.max_runtime_s
    usd_per_hour = row.price_usd_per_hour * request.count
    bought_s = int((request.budget_usd - request.spent_usd) * 3600 / usd_per_hour)
    return min(request.max_runtime_s, bought_s - _reserve_s(request))


def _reserve_s(request: PlanRequest) -> int:
    """Of what the budget buys, what is not for training: the end of the job, and machines that may be kept after it."""
    return STOP_RESERVE_S + keep_alive_s(request.recovery, spot=request.spot is True)


def _too_dear(request: PlanRequest, rows: Sequence[InstanceType]) -> BudgetExceeded:
    cheapest = min(rows, key=lambda row: row.price_usd_per_hour)
    least = cheapest.price_usd_per_hour * request.count * (SHORTEST_RUNTIME_S + _reserve_s(request)) / 3600
    left = (request.budget_usd or Decimal(0)) - request.spent_usd
    return BudgetExceeded(left, least.quantize(Decimal("0.0001"), ROUND_UP), cheapest.instance_type)


def _spot_choices(request: PlanRequest, row: InstanceType) -> tuple[bool, ...]:
    """True, False or both, in the order to try them. A user who said true or false gets just that."""
    if request.spot != "auto":
        return (request.spot,)
    return (True, False) if _spot_pays(request, row) else (False,)


def _spot_pays(request: PlanRequest, row: InstanceType) -> bool:
    if request.recovery == "fast" or request.total_steps is None or request.total_steps < 2:
        return False
    return row.gpus > 0 or (request.expected_s is not None and request.expected_s >= SHORT_CPU_RUN_S)


def steps_between_checkpoints(every_steps: int, total_steps: int | None) -> tuple[int, str | None]:
    """The interval to use, and a notice when the asked one would never save before the end.

    A run of 6 steps that saves every 50 would begin at zero after each interruption: it saves every 2 instead.
    """
    if total_steps is None or every_steps < total_steps:
        return every_steps, None
    corrected = max(1, total_steps // 3)
    if corrected >= every_steps:
        return every_steps, None
    often = "after every step" if corrected == 1 else f"every {corrected} steps"
    return corrected, f"checkpoints {often} instead of every {every_steps} steps: the run has {total_steps}"


# -------------------------------------------------------------------------------------------------- after failures


def choose_plan(request: PlanRequest, history: Sequence[AttemptSummary]) -> Plan:
    """The plan of the next attempt.

    The first attempt takes the cheapest candidate; after no capacity or quota the one tried least in this streak; after
    memory a type with more of it, and where there is none a micro-batch smaller than those the container has tried; else
    the same again. The run time is counted anew each time, since the budget may have shrunk.

    Args:
        history: the settled attempts, oldest first.

    Raises:
        InvalidName, NothingFits, BudgetExceeded: as `candidates`, for what is left to try.
    """
    if not history:
        return candidates(request)[0]
    plans = _plans(request, _rows_left(request, history))
    chosen = _least_tried(plans, history) if history[-1].failure_class in NO_ROOM else _same_again(plans, history[-1])
    return _with_smaller_micro_batch(request, chosen, history)


def _least_tried(plans: Sequence[Plan], history: Sequence[AttemptSummary]) -> Plan:
    tries = Counter((each.instance_type, each.spot) for each in no_room_streak(history))
    return min(plans, key=lambda plan: tries[plan.instance_type, plan.spot])


def _same_again(plans: Sequence[Plan], last: AttemptSummary) -> Plan:
    """The plan of `last`, or the first of its type, or (its type is too small or too dear now) the first of all."""
    by_likeness = sorted(plans, key=lambda plan: (plan.instance_type != last.instance_type, plan.spot != last.spot))
    return by_likeness[0] if by_likeness[0].instance_type == last.instance_type else plans[0]


def _rows_left(request: PlanRequest, history: Sequence[AttemptSummary]) -> list[InstanceType]:
    """The types with more memory than those that proved too small; all of them where only micro-batches can shrink."""
    failed = [each for each in history if each.failure_class is FailureClass.MEMORY]
    too_small = [find(each.instance_type).memory_for_training_gib for each in failed]
    try:
        return _fitting_rows(request, above_gib=max(too_small, default=0))
    except NothingFits:
        if any((_tried_down_to(request, each) or 1) == 1 for each in failed):
            raise
        return _fitting_rows(request)


def _tried_down_to(request: PlanRequest, attempt: AttemptSummary) -> int | None:
    """The smallest micro-batch that ran out of memory in that attempt; None where a script has its own."""
    size = attempt.micro_batch_size or request.batch_size
    return max(1, size // HALVED_IN_PLACE) if size else None


def _with_smaller_micro_batch(request: PlanRequest, plan: Plan, history: Sequence[AttemptSummary]) -> Plan:
    """Half of the smallest that ran out of memory on this type."""
    failed = [
        each
        for each in history
        if (each.failure_class, each.instance_type) == (FailureClass.MEMORY, plan.instance_type)
    ]
    tried = [size for each in failed if (size := _tried_down_to(request, each)) is not None]
    sizes = [plan.micro_batch_size, *(max(1, size // 2) for size in tried)]
    return plan.model_copy(update={"micro_batch_size": min((size for size in sizes if size), default=None)})
