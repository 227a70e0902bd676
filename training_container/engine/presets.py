"""Models made from nothing: a preset's architecture with random weights, and a character tokenizer made from the data.

To add a preset: its row in `PRESETS`, its name in microtuning_core.domain.spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    max_positions: int


TINY_DECODER = Shape(hidden=64, intermediate=192, layers=3, heads=4, max_positions=2048)
PRESETS = {"Transformer": TINY_DECODER, "tiny-decoder": TINY_DECODER}


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token a character that occurs in `texts`, in code-point order; any other character reads as <unk>."""
    characters = sorted(set().union(*texts))
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # nosec B106 # a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # nosec B106 # a token of text
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def preset_model(
    name: str, tokenizer: PreTrainedTokenizerFast, seed: int, *, head: Literal["policy", "score"] = "policy"
) -> PreTrainedModel:
    """The preset with weights drawn from `seed`; leaves torch's own generator seeded with it. head="score": one label."""
    shape = PRESETS[name]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.max_positions,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=head == "policy",
    )
    if head == "policy":
        return LlamaForCausalLM(config)
    config.num_labels = 1
    return LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]
