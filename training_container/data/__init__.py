"""Rows: reading them from a channel, their order in each epoch, and turning them into tokens.

What a row may look like, and what is refused, is decided in microtuning_core.domain.datasets, for all of Microtuning alike.

To add a shape of row: its name there, then how it reads in tokens here: supervised.py, prompts.py or preferences.py.
"""

from .order import Cursor, epoch_order
from .preferences import Marked, Pair, Pairs, Rated, render_marked, render_pairs
from .prompts import Prompt, prompt_tokens, render_prompts
from .reading import read_channel, texts_of
from .supervised import Rendered, render_row, render_supervised, truncate
from .tokens import answered, chat_text, encode

__all__ = [
    "Cursor",
    "Marked",
    "Pair",
    "Pairs",
    "Prompt",
    "Rated",
    "Rendered",
    "answered",
    "chat_text",
    "encode",
    "epoch_order",
    "prompt_tokens",
    "read_channel",
    "render_marked",
    "render_pairs",
    "render_prompts",
    "render_row",
    "render_supervised",
    "texts_of",
    "truncate",
]
