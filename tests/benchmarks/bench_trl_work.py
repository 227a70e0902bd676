"""What both sides of bench_trl do: rows in the order they are trained on, and a model on disk to begin from."""

from __future__ import annotations

import itertools
import random
import string
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from microtuning_core.domain.datasets import Row, check_rows
from microtuning_core.domain.spec import ModelSpec
from training_container.data import epoch_order, render_supervised
from training_container.engine import Engine
from training_container.engine.models import build_policy
from training_container.engine.presets import character_tokenizer, preset_model
from training_container.losses import cross_entropy

Kind = Literal["grpo", "sft", "dpo"]

ALPHABET = "0123456789+-*=" + string.ascii_lowercase + " :,>?\n"  # with the three special tokens: 49
SEED, TEMPERATURE, NEW_TOKENS, GROUP = 0, 1.0, 10, 16
LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY = 1e-4, 0.3, 0.0


@dataclass(frozen=True)
class Work:
    """One row of the table.

    batch: prompts of a grpo step; rows or pairs of the others. warm_steps: supervised steps before anything is measured, so
    that completions end, at lengths of their own.
    """

    name: str
    title: str
    kind: Kind = "grpo"
    batch: int = 16
    steps: int = 5
    prompt_tokens: int = 7
    vocabulary: int = 49
    adapter: Literal["lora", "none"] = "none"
    reward: str = "scattered"
    learning_rate: float = LEARNING_RATE
    warm_steps: int = 40
    warm_batch: int = 64

    @property
    def model(self) -> ModelSpec:
        return ModelSpec(base="bench/model", adapter=self.adapter, rank=8, alpha=16, dtype="float32")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- rows ----------------------------------------------------------------------------------------------------------------


def rows_of(work: Work, *, seed: int = SEED) -> list[dict[str, str]]:
    """As our side gets them; it takes them in the order of `in_order`."""
    chance = random.Random(seed)
    make = {"grpo": partial(_sorting, work.prompt_tokens), "sft": _supervised, "dpo": _pair}[work.kind]
    return [make(chance) for _ in range(work.batch * work.steps)]


def in_order(rows: list[dict[str, str]], *, seed: int = SEED) -> list[dict[str, str]]:
    """As the other side gets them, which takes them one after the other."""
    return [rows[index] for index in epoch_order(seed, 0, len(rows))]


def _sorting(prompt_tokens: int, chance: random.Random) -> dict[str, str]:
    """Six digits to sort, behind as much text as makes the prompt `prompt_tokens` characters long."""
    digits = "".join(chance.choice(string.digits) for _ in range(6))
    before = ("sort the digits in order " * 9)[: prompt_tokens - 7]
    answer = "".join(sorted(digits))
    return {"prompt": f"{before}{digits}>", "answer": answer, "completion": answer}


def _digits(chance: random.Random, count: int) -> str:
    return "".join(chance.choice(string.digits) for _ in range(count))


def _length(chance: random.Random) -> int:
    """Log-normal: median 24, cut to 4 … 120; a prompt is half as long as its completion."""
    return min(120, max(4, int(chance.lognormvariate(3.2, 0.8))))


def _supervised(chance: random.Random) -> dict[str, str]:
    length = _length(chance)
    return {"prompt": _digits(chance, length // 2 + 1) + ">", "completion": _digits(chance, length)}


def _pair(chance: random.Random) -> dict[str, str]:
    length = _length(chance)
    prompt = _digits(chance, length // 2 + 1) + ">"
    return {"prompt": prompt, "chosen": _digits(chance, length), "rejected": _digits(chance, length)}


def as_rows(rows: list[dict[str, str]], kind: Kind) -> list[Row]:
    """Rows of the product, refused as a submit would refuse them."""
    found = [Row(dict(values), "bench.jsonl", line) for line, values in enumerate(rows, start=1)]
    check_rows(found, kind, "train", has_chat_template=False)
    return found


# --- models --------------------------------------------------------------------------------------------------------------


def keep_model(work: Work, folder: Path) -> None:
    """A Llama of 3 layers and 64 dimensions, warm-started where the work draws completions, in save_pretrained's form."""
    further = itertools.chain(range(0x4E00, 0x9FA6), range(0xAC00, 0xD7A4))  # letters enough for 32,000 tokens
    tokenizer = character_tokenizer([ALPHABET, *map(chr, itertools.islice(further, work.vocabulary - 49))])
    model = preset_model("tiny-decoder", tokenizer, SEED)
    if work.kind == "grpo":
        warm(Engine(model, tokenizer, spec=work.model, source="", seed=SEED), work)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm(engine: Engine, work: Work) -> None:
    chance = random.Random(SEED + 1)
    for step in range(work.warm_steps):
        rows = [_sorting(work.prompt_tokens, chance) for _ in range(work.warm_batch)]
        examples = render_supervised(as_rows(rows, "sft"), engine.tokenizer, 1024).examples
        engine.forward_backward(examples, cross_entropy)
        engine.optim_step(3e-3 * min(1.0, (step + 1) / 20), 1.0)


def policy(work: Work, folder: Path) -> tuple[Any, Any]:
    """The model both sides begin from, and its tokenizer."""
    model, tokenizer = build_policy(work.model, source=str(folder), texts=(), seed=SEED, device=device())
    stir(model)
    return model, tokenizer


def stir(model: Any) -> None:
    """As if an adapter had been trained a little: a fresh one's second matrix is 0, and so the gradient of its first."""
    chance = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.02 * torch.randn(weight.shape, generator=chance))
