"""Drawing completions: prompts are read once, their cache is forked to a group, and finished rows are dropped.

Axes as in losses.py: P prompts, G completions of a prompt, R = P * G rows (group by group), K the rows still being drawn,
V the vocabulary. The model's own forward does the work, whatever its architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .forward import cache_of, call

# Rows are dropped from the cache when this share or less is left: copying the cache for every single row costs more.
DROP_AT = 0.75


@dataclass(frozen=True)
class Sampling:
    """How to draw. `greedy` takes the likeliest token and draws no random number."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False


@dataclass(frozen=True)
class Completion:
    """A drawn completion: ids with the stop token where it has one, and the log-probability each was drawn with."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    group_size: int,
    stop_tokens: Sequence[int],
    uniforms_P_G_T: Tensor,
) -> list[list[Completion]]:
    """`group_size` completions of each prompt.

    Args:
        model: a transformers causal LM (or peft around one), in evaluation mode.
        prompts: token ids, none empty, of any lengths.
        stop_tokens: any of them ends a completion, and is its last token.
        uniforms_P_G_T: from `draw_uniforms`, the only source of chance: a completion depends on its own numbers alone,
            not on which others are drawn with it.
    """
    if not prompts:
        return []
    device = next(model.parameters()).device
    uniforms_R_T = uniforms_P_G_T.flatten(0, 1).to(device)
    prompt_P_L, mask_P_L = pad_left(prompts)
    ragged = not bool(mask_P_L.all())
    output = call(
        model,
        prompt_P_L.to(device),
        attention_mask=mask_P_L.long().to(device) if ragged else None,
        position_ids=positions(mask_P_L).to(device),
        use_cache=True,
        logits_to_keep=1,
    )
    cache = cache_of(output)
    if group_size > 1:
        fork(cache, torch.arange(len(prompts)).repeat_interleave(group_size).to(device))
    rows = _Rows(len(prompts) * group_size, sampling.max_new_tokens, device)
    logits_K_V = output.logits[:, -1].repeat_interleave(group_size, 0)
    mask_K_L = mask_P_L.repeat_interleave(group_size, 0).to(device)
    position_K = mask_P_L.sum(1).repeat_interleave(group_size).to(device)
    stops = torch.tensor(list(stop_tokens), device=device)

    for step in range(sampling.max_new_tokens):
        uniform_K = uniforms_R_T[rows.row_K, step] if uniforms_R_T.numel() else None
        token_K, logprob_K = draw(logits_K_V, sampling, uniform_K)
        rows.record(step, token_K, logprob_K, ends_K=torch.isin(token_K, stops))
        kept_K = rows.rows_to_keep()
        if step == sampling.max_new_tokens - 1 or rows.all_ended:
            break
        if kept_K is not None:
            fork(cache, kept_K)
            token_K, mask_K_L, position_K = token_K[kept_K], mask_K_L[kept_K], position_K[kept_K]
        mask_K_L = torch.cat([mask_K_L, mask_K_L.new_ones(len(mask_K_L), 1)], 1)
        logits_K_V = call(
            model,
            token_K[:, None],
            attention_mask=mask_K_L.long() if ragged else None,
            position_ids=position_K[:, None],
            cache=cache,
            use_cache=True,
        ).logits[:, -1]
        position_K = position_K + 1
    drawn = rows.completions()
    return [drawn[start : start + group_size] for start in range(0, len(drawn), group_size)]


class _Rows:
    """The rows of one call of `sample`: what was drawn so far, and which of them are still in the cache."""

    def __init__(self, count: int, max_new_tokens: int, device: torch.device) -> None:
        self._tokens_R_T = torch.zeros(count, max_new_tokens, dtype=torch.long, device=device)
        self._logprobs_R_T = torch.zeros(count, max_new_tokens, device=device)
        self._length_R = torch.full((count,), max_new_tokens, device=device)
        self.row_K = torch.arange(count, device=device)
        self._live_K = torch.ones(count, dtype=torch.bool, device=device)
        self._ended_R = torch.zeros(count, dtype=torch.bool, device=device)

    def record(self, step: int, token_K: Tensor, logprob_K: Tensor, *, ends_K: Tensor) -> None:
        self._tokens_R_T[self.row_K, step] = token_K
        self._logprobs_R_T[self.row_K, step] = logprob_K.float()
        ending_R = self.row_K[ends_K & self._live_K]
        self._length_R[ending_R] = step + 1
        self._ended_R[ending_R] = True
        self._live_K = self._live_K & ~ends_K

    @property
    def all_ended(self) -> bool:
        return len(self.row_K) == 0 or not bool(self._live_K.any())

    def rows_to_keep(self) -> Tensor | None:
        """Indices into the present rows when it is worth dropping the others, and forget those; else None."""
        live = int(self._live_K.sum())
        if live > DROP_AT * len(self.row_K) or live == 0:
            return None
        kept_K = self._live_K.nonzero().squeeze(1)
        self.row_K, self._live_K = self.row_K[kept_K], self._live_K[kept_K]
        return kept_K

    def completions(self) -> list[Completion]:
        columns = (self._tokens_R_T, self._logprobs_R_T, self._length_R, self._ended_R)
        return [
            Completion(tokens[:length], logprobs[:length], ended)
            for tokens, logprobs, length, ended in zip(*(column.tolist() for column in columns), strict=True)
        ]


def draw_uniforms(prompts: int, group_size: int, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """A number in [0, 1) for each token that may be drawn, shape [P, G, T]; T is 0 for greedy sampling."""
    length = 0 if sampling.greedy else sampling.max_new_tokens
    return torch.rand(prompts, group_size, length, generator=generator)


def draw(logits_K_V: Tensor, sampling: Sampling, uniform_K: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token a row, and its log-probability under the distribution it was drawn from. Both of shape [K].

    By inverse cumulative distribution: torch.multinomial on a CPU takes ten times as long at a vocabulary of 32,000.
    """
    logprobs_K_V = sampling_distribution(logits_K_V, sampling)
    if uniform_K is None:
        logprob_K, token_K = logprobs_K_V.max(-1)
        return token_K, logprob_K
    cumulative_K_V = logprobs_K_V.exp().cumsum(-1)
    total_K_1 = cumulative_K_V[:, -1:]
    # Rounding may put the draw on the total itself, which is past the last token with any mass.
    threshold_K_1 = torch.minimum(
        uniform_K[:, None] * total_K_1, torch.nextafter(total_K_1, torch.zeros_like(total_K_1))
    )
    token_K_1 = torch.searchsorted(cumulative_K_V, threshold_K_1, right=True)
    return token_K_1.squeeze(1), logprobs_K_V.gather(1, token_K_1).squeeze(1)


def sampling_distribution(logits_K_V: Tensor, sampling: Sampling) -> Tensor:
    """log softmax(logits / temperature), cut to the smallest set of tokens with `top_p` of the mass. Shape [K, V]."""
    scaled_K_V = logits_K_V.float()
    if sampling.temperature != 1.0:
        scaled_K_V = scaled_K_V / sampling.temperature
    if sampling.top_p < 1.0:
        sorted_K_V, order_K_V = scaled_K_V.sort(-1, descending=True)
        mass_K_V = sorted_K_V.softmax(-1)
        beyond_K_V = mass_K_V.cumsum(-1) - mass_K_V >= sampling.top_p
        scaled_K_V = scaled_K_V.masked_fill(beyond_K_V.gather(-1, order_K_V.argsort(-1)), -torch.inf)
    return scaled_K_V.log_softmax(-1)


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids [P, L] with the last token of every prompt in the last column, and which of them are real."""
    longest = max(map(len, prompts))
    ids_P_L = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask_P_L = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_P_L[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask_P_L[row, longest - len(prompt) :] = True
    return ids_P_L, mask_P_L


def positions(mask_P_L: Tensor) -> Tensor:
    """Positions that begin at a row's first real token: learned positions would otherwise depend on the padding."""
    return (mask_P_L.long().cumsum(1) - 1).clamp(min=0)


def fork(cache: Any, rows: Tensor) -> None:
    """Make the cache hold these of its rows (one may be taken several times, or not at all)."""
    cache.reorder_cache(rows)
