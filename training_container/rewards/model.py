"""A reward model of the recipe `reward` as reward: `model:s3://…/`, one number for prompt and completion together.

It is asked in the trainer's own process and on its device, with the tokens that the recipe would make of such a row
(data.render_row: prompt and completion tokenized apart, an end token behind them), each row's score at its last token.

A model without a score head would get one of chance, and every completion a number that means nothing: what is loaded has
one head of one label, from its files, or it is refused.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from microtuning_core.domain.datasets import Row

from ..data import render_row, truncate
from ..engine import Example
from ..engine.export import MERGED
from ..engine.models import ADAPTER_FILE
from ..engine.scores import row_scores
from ..failures import UserFailure, loading
from .scores import Answer, Answers, Question

_PACKED, _CONFIG = "model.tar.gz", "config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Modules of score heads, as transformers and peft call them.
_HEADS = frozenset({"score", "classifier", "classification_head", "qa_outputs"})
_TRAINED = "Name what the recipe `reward` trained, or another model with one score a row."
# Of one forward: tokens, padding counted.
_TOKENS = 16_384


class ModelReward:
    """Scores without a gradient; nothing of it is trained, and it draws no chance.

    Args:
        folder: a model as the recipe `reward` leaves it, or its model.tar.gz.
        base: folder of the model that an adapter belongs to; without it the adapter's own file names one of the hub.

    Raises:
        UserFailure: the folder holds no reward model that can be loaded, or one of another kind.
    """

    def __init__(self, folder: Path, *, base: Path | None = None, device: Any = "cpu") -> None:
        place = unpacked(folder)
        self._device = torch.device(device)
        with loading(f"The tokenizer of the reward model in the channel {folder.name}"):
            self._tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)  # nosec B615 # a folder
        is_adapter = (place / ADAPTER_FILE).is_file()
        with loading(f"The reward model in the channel {folder.name}"):
            model = load_adapted(place, self._tokenizer, base) if is_adapter else load_scoring(place)
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._longest = getattr(model.config, "max_position_embeddings", None) or _TOKENS
        # Threads of torch are a thread's own setting, and sums depend on their number.
        self._torch_threads = torch.get_num_threads()

    @torch.no_grad()
    def score(self, question: Question, *, step: int) -> Answers:
        torch.set_num_threads(self._torch_threads)
        rows = [
            Row({"prompt": prompt, "completion": completion}, "completions", number)
            for number, (prompt, completion) in enumerate(zip(question.prompts, question.completions, strict=True), 1)
        ]
        examples = [truncate(render_row(row, self._tokenizer), self._longest) for row in rows]
        values = [0.0] * len(examples)
        for indices in batches([len(example.tokens) for example in examples]):
            for index, value in zip(indices, self._forward([examples[index] for index in indices]), strict=True):
                values[index] = value
        return Answers([Answer(value) for value in values])

    def _forward(self, examples: Sequence[Example]) -> list[float]:
        scores_B: list[float] = row_scores(self._model, examples, device=self._device).tolist()
        return scores_B

    def close(self) -> None:
        del self._model


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Rows of like length together, so many that with their padding they keep to the limit; at least one."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    found: list[list[int]] = []
    for index in order:
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= _TOKENS:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def load_scoring(place: Path) -> Any:
    """A whole model with the head that its files have.

    Raises:
        UserFailure: they have none, or one of several labels.
    """
    model, told = load_whole(str(place), output_loading_info=True, ignore_mismatched_sizes=True)
    refuse_other_heads({name: found for name, found, _ in told["mismatched_keys"]})
    if lacking := sorted(told["missing_keys"]):
        raise UserFailure(f"The reward model's weights have no {lacking[0]}, so it would score at random. {_TRAINED}")
    return model


def refuse_other_heads(mismatched: Mapping[str, Sequence[int]]) -> None:
    """mismatched: by name, shapes of weights that are not those of a model with one label."""
    for name, shape in mismatched.items():
        if _HEADS & set(name.split(".")):
            raise UserFailure(
                f"The reward model gives {shape[0]} labels a row ({name}), and a reward is one. {_TRAINED}"
            )
        raise UserFailure(f"The reward model's {name} has shape {list(shape)}, which is not what its config.json says.")


def refuse_adapters_without_score(place: Path, config: Mapping[str, Any]) -> None:
    """Whether the adapter brings the head: the base model has none, and would get one of chance.

    Raises:
        UserFailure: it does not, or its head has several labels.
    """
    if (kind := config.get("task_type")) != "SEQ_CLS":
        raise UserFailure(f"The reward model is an adapter of task type {kind}, which scores nothing. {_TRAINED}")
    if not (place / _ADAPTER_WEIGHTS).is_file():
        return  # of another format, which peft reads
    with safe_open(place / _ADAPTER_WEIGHTS, framework="pt") as file:
        heads = {name: file.get_slice(name).get_shape() for name in file.keys() if _HEADS & set(name.split("."))}  # noqa: SIM118
    if not heads:
        raise UserFailure(f"The reward model's adapter has no score head, so it would score at random. {_TRAINED}")
    if not any(shape[0] == 1 for shape in heads.values()):
        refuse_other_heads(heads)


def load_whole(source: str, **options: Any) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(  # nosec B615 # a folder, or the revision is an option
        source, dtype=torch.float32, num_labels=1, trust_remote_code=False, **options
    )


def load_adapted(place: Path, tokenizer: Any, base: Path | None) -> Any:
    """An adapter with its score head on its base model: the given folder, or the model of the hub that its file names.

    Raises:
        UserFailure: the base model is not given, and its name is none of the hub's; or it cannot be loaded; or the adapter
            has no score head.
    """
    config = json.loads((place / ADAPTER_FILE).read_text("utf-8"))
    refuse_adapters_without_score(place, config)
    named = str(config["base_model_name_or_path"])
    if base is None and (Path(named).is_absolute() or named.startswith("s3://")):
        where = named if named.startswith("s3://") else "a folder of the machine that trained it"
        raise UserFailure(
            f"The reward model is an adapter, and its base model was {where}. Name that model's folder in S3 as `base` "
            "beside the reward's entry, or train with model.merge: true and name the model.tar.gz."
        )
    options: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id}
    if base is None:
        options["revision"] = config.get("revision") or "main"
    try:
        whole = load_whole(str(base or named), **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserFailure(f"The reward model's base model {named} cannot be loaded: {reason}") from error
    return PeftModel.from_pretrained(whole, place)


def unpacked(folder: Path) -> Path:
    """Where the weights are: the folder itself, what was merged in it, or what its archive holds.

    Raises:
        UserFailure: there is no model.
    """
    if (folder / _PACKED).is_file() and not (folder / _CONFIG).is_file():
        place = folder / "unpacked"
        with loading(f"The {_PACKED} of the reward's channel {folder.name}"), tarfile.open(folder / _PACKED) as archive:
            archive.extractall(place, filter="data")
        return unpacked(place)
    for place in (folder / MERGED, folder):
        if (place / _CONFIG).is_file() or (place / ADAPTER_FILE).is_file():
            return place
    held = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "nothing"
    raise UserFailure(
        f"The reward's channel {folder.name} holds no model (it has {held}). Name the folder of a reward model, or its "
        "model.tar.gz."
    )
