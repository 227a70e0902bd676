"""The model that a job leaves: weights or adapter, and on request the adapter merged into plain weights.

    model/           as from_pretrained reads it: all weights, or the adapter for peft
    model/merged/    with `model.merge`: plain weights, for whatever knows no adapters

Merged weights are kept only after they were read back from their files and gave the adapter's logits on real rows.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .core import Engine
from .forward import call, undressed
from .models import ADAPTER_FILE, is_adapter

MERGED = "merged"
# Of the largest logit: float32 keeps seven digits of a sum, and a merged weight is rounded once more than the two apart.
TOLERANCE = 1e-5


class Unequal(Exception):
    """The merged weights give other logits than the adapter; the message says by how much."""


def name_base(folder: Path, base: str, revision: str | None) -> None:
    """Say in an adapter's own file which model it belongs to: the path it was loaded from here is gone with the machine."""
    path = folder / ADAPTER_FILE
    if path.is_file():
        config = json.loads(path.read_text("utf-8"))
        config |= {"base_model_name_or_path": base, "revision": revision}
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


@torch.no_grad()
def export_merged(engine: Engine, folder: Path, rows: Sequence[Sequence[int]]) -> float:
    """Write the model with its adapter merged to `folder`; the largest difference of logits, as a share of the largest one.

    The merge is done on a copy in host memory, in float32, and what is written has the base model's own type.

    Args:
        rows: token ids to compare the logits on.

    Raises:
        Unequal: the difference is above 1e-5 (float32); nothing is left in `folder`.
    """
    dtype = undressed(engine.model).dtype
    adapted = plain_copy(engine.model)
    wanted = [_logits(adapted, row) for row in rows]
    part_tied(adapted)
    merged = adapted.merge_and_unload()
    merged.to(dtype).save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)
    read_back = type(merged).from_pretrained(folder, dtype=torch.float32).eval()
    difference = max(_difference(want, _logits(read_back, row)) for want, row in zip(wanted, rows, strict=True))
    if not difference <= _tolerance(dtype):
        shutil.rmtree(folder)
        raise Unequal(f"its logits differ from the adapter's by {difference:.1e} of the largest")
    return difference


def plain_copy(model: Any) -> Any:
    """The model in host memory and float32, computing as its class does: a forward that was wrapped would call ours."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        module.__dict__.pop("forward", None)
    return copied.cpu().float().eval()


def _logits(model: Any, row: Sequence[int]) -> Tensor:
    logits: Tensor = call(model, torch.tensor([list(row)]), use_cache=False).logits
    return logits.float()


def _difference(want: Tensor, have: Tensor) -> float:
    return float((want - have).abs().max() / want.abs().max().clamp(min=1.0))


def _tolerance(dtype: torch.dtype) -> float:
    """Weights that are written in half precision are rounded there, to so many digits: no merge could be closer."""
    return TOLERANCE if dtype == torch.float32 else 10 * torch.finfo(dtype).eps


def part_tied(model: Any) -> None:
    """Give a head that shares its weight with the embedding one of its own, if the adapter changes either.

    Merged into the shared weight, a change of one would be a change of both. Where the adapter touches neither, the tie is
    kept, and with it the size of the files.
    """
    base = undressed(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or not (hasattr(embedding, "base_layer") or hasattr(head, "base_layer")):
        return
    inner = getattr(head, "base_layer", head)
    if inner.weight is not getattr(embedding, "base_layer", embedding).weight:
        return
    inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
    base.config.tie_word_embeddings = False


def leave_model(
    engine: Engine, folder: Path, *, base: str, revision: str | None, merge: bool, rows: Sequence[Sequence[int]]
) -> str | None:
    """What `model/` holds when a job ends; a sentence about the merge where there is something to say.

    The adapter stays beside what was merged from it. A merge that is not right is no reason to lose the run.
    """
    engine.save_weights(folder)
    if not engine.world.is_main:
        return None
    name_base(folder, base, revision)
    if not merge or not is_adapter(engine.model):
        return None
    if getattr(undressed(engine.model), "is_quantized", False):
        return "an adapter on quantized weights is not merged; merge it into the model as it was before (peft)"
    try:
        difference = export_merged(engine, folder / MERGED, rows)
    except Unequal as error:
        return f"the merged model is not kept: {error}; the adapter is"
    return (
        f"the adapter is merged into plain weights as well (merged/); logits equal to {difference:.0e} of the largest"
    )
