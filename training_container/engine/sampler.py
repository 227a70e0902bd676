"""Drawing completions: a prompt is read once for its whole group, and finished rows are dropped.

Axes: P prompts, G completions of a prompt, R = P * G rows (group by group), K the rows still being drawn, F the prompts and
Q the queries a prompt of those, L what was read before, V the vocabulary. The model's own forward does the work, whatever
its architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .cache import fork, is_whole
from .forward import cache_of, call, head_at, undressed
from .layouts.families import pad, positions
from .layouts.packed import additive

# Rows are dropped from the cache when this share or less is left: copying the cache for every single row costs more.
DROP_AT = 0.75
# How many times as dear it is to attend to a key that one query alone reads: memory is slower than multiplication.
_LONE_KEY = 8.0
# Entries of the vocabulary whose mass is added up before it is searched.
_BLOCK = 256
_NOBODY, _EVERYONE = -1, -2  # owners of keys that are no row's


@dataclass(frozen=True)
class Sampling:
    """How to draw. `greedy` takes the likeliest token and draws no random number.

    Raises:
        ValueError: a number is none that can be drawn by.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        if not isinstance(most, Integral) or isinstance(most, bool) or most < 1:
            raise ValueError(f"Sampling: max_new_tokens is {most!r}; give a whole number of at least 1")
        if not 0 < self.temperature < math.inf:
            hint = ", or greedy=True for the likeliest token" if self.temperature == 0 else ""
            raise ValueError(f"Sampling: temperature is {self.temperature!r}; give a number above 0{hint}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p is {self.top_p!r}; give a share above 0 and up to 1")


@dataclass(frozen=True)
class Completion:
    """A drawn completion: ids with the stop token where it has one, and the log-probability each was drawn with."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


def check_prompts(prompts: Sequence[Sequence[int]], group_size: int) -> None:
    """Whether there is something to go on from, and to draw.

    Raises:
        ValueError: there is not; it names the prompt.
    """
    if (empty := next((index for index, prompt in enumerate(prompts) if not len(prompt)), None)) is not None:
        raise ValueError(f"sample: prompts[{empty}] is empty; give at least one token (a BOS, say) to go on from")
    if group_size < 1:
        raise ValueError(f"sample: group_size is {group_size}; give at least 1")


@dataclass(frozen=True)
class Ways:
    """Which ways of drawing are right for a model (probe.py).

    padded: prompts of unequal lengths can be read together; else only those of the same length are.
    queries: the rows of a prompt can be queries over one copy of its cache.
    """

    padded: bool = True
    queries: bool = False


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    group_size: int,
    stop_tokens: Sequence[int],
    uniforms_P_G_T: Tensor,
    ways: Ways = Ways(),
    beat: Callable[[], None] = lambda: None,
) -> list[list[Completion]]:
    """`group_size` completions of each prompt.

    Args:
        model: a transformers causal LM (or peft around one), in evaluation mode.
        prompts: token ids, none empty, of any lengths.
        stop_tokens: any of them ends a completion, and is its last token.
        uniforms_P_G_T: from `draw_uniforms`, the only source of chance: a completion depends on its own numbers alone,
            not on which others are drawn with it.
        ways: what this model allows.
        beat: called for each token.
    """
    if not prompts:
        return []
    if not ways.padded and len({len(prompt) for prompt in prompts}) > 1:
        return _by_length(model, prompts, sampling, group_size, stop_tokens, uniforms_P_G_T, ways, beat)
    device = next(model.parameters()).device
    uniforms_R_T = uniforms_P_G_T.flatten(0, 1).to(device)
    stops = torch.tensor(list(stop_tokens), device=device)
    decoder, logits_K_V = _read(model, prompts, sampling, group_size, ways, device)
    rows = _Rows(len(prompts) * group_size, sampling.max_new_tokens, device)

    for step in range(sampling.max_new_tokens):
        beat()
        uniform_K = uniforms_R_T[rows.row_K, step] if uniforms_R_T.numel() else None
        token_K, logprob_K = draw(logits_K_V, sampling, uniform_K)
        rows.record(step, token_K, logprob_K, ends_K=torch.isin(token_K, stops))
        if step == sampling.max_new_tokens - 1 or not rows.live:
            break
        kept_K = rows.rows_to_keep()
        if kept_K is not None:
            decoder.keep(kept_K)
            token_K = token_K[kept_K]
        logits_K_V = decoder.step(token_K)
    drawn = rows.completions(stops)
    return [drawn[start : start + group_size] for start in range(0, len(drawn), group_size)]


def _by_length(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    group_size: int,
    stop_tokens: Sequence[int],
    uniforms_P_G_T: Tensor,
    ways: Ways,
    beat: Callable[[], None],
) -> list[list[Completion]]:
    """Prompts of one length at a time, for a model that padding would change."""
    found: dict[int, list[Completion]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        alike = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        drawn = sample(
            model,
            [prompts[index] for index in alike],
            sampling,
            group_size=group_size,
            stop_tokens=stop_tokens,
            uniforms_P_G_T=uniforms_P_G_T[alike],
            ways=replace(ways, padded=True),
            beat=beat,
        )
        found |= dict(zip(alike, drawn, strict=True))
    return [found[index] for index in range(len(prompts))]


def _read(
    model: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int, ways: Ways, device: torch.device
) -> tuple[_Forked | _Queries, Tensor]:
    """Read the prompts; gives who goes on from there, and the logits of every row's first token, [R, V]."""
    ids_P_L, real_P_L = (each.to(device) for each in pad(prompts, left=True))
    output = call(
        model,
        ids_P_L,
        attention_mask=None if bool(real_P_L.all()) else real_P_L.long(),
        position_ids=positions(real_P_L),
        use_cache=True,
        logits_to_keep=1,
    )
    cache, room = cache_of(output), sampling.max_new_tokens
    decoder = _Queries if ways.queries and is_whole(cache) and _queries_pay(ids_P_L, group_size, room) else _Forked
    return decoder(model, cache, real_P_L, group_size, room), output.logits[:, -1].repeat_interleave(group_size, 0)


def _queries_pay(ids_P_L: Tensor, group_size: int, new_tokens: int) -> bool:
    """Whether it costs less that a row passes over the others' keys than that each has its own copy of the prompt's."""
    length, half = ids_P_L.shape[1], new_tokens / 2
    return group_size > 1 and length + group_size * half < _LONE_KEY * (length + half)


class _Forked:
    """Each row has its own copy of its prompt's cache. Masks are of two dimensions: for every attention."""

    def __init__(self, model: Any, cache: Any, real_P_L: Tensor, group_size: int, room: int) -> None:
        self._model, self._cache = model, cache
        prompt_K = torch.arange(len(real_P_L), device=real_P_L.device).repeat_interleave(group_size)
        fork(cache, prompt_K, room=room)
        self._ragged = not bool(real_P_L.all())
        self._mask_K_L = real_P_L[prompt_K].long()
        self._position_K = real_P_L.sum(1)[prompt_K]

    def keep(self, kept_K: Tensor) -> None:
        fork(self._cache, kept_K)
        self._mask_K_L, self._position_K = self._mask_K_L[kept_K], self._position_K[kept_K]

    def step(self, token_K: Tensor) -> Tensor:
        """The next logits [K, V]."""
        if self._ragged:
            self._mask_K_L = torch.cat([self._mask_K_L, self._mask_K_L.new_ones(len(token_K), 1)], 1)
        logits_K_V: Tensor = call(
            self._model,
            token_K[:, None],
            attention_mask=self._mask_K_L if self._ragged else None,
            position_ids=self._position_K[:, None],
            cache=self._cache,
            use_cache=True,
        ).logits[:, -1]
        self._position_K = self._position_K + 1
        return logits_K_V


class _Queries:
    """The rows of a prompt are queries over one cache of it, to which each step adds a key a row.

    Keys have an owner, a row, and a query sees its own and everyone's. So a long prompt is neither copied for each row nor
    read from memory once for each.
    """

    def __init__(self, model: Any, cache: Any, real_P_L: Tensor, group_size: int, room: int) -> None:
        self._model, self._cache = model, cache
        everyone = torch.arange(len(real_P_L), device=real_P_L.device)
        fork(cache, everyone, room=room * group_size)
        self._owner_F_L = torch.where(real_P_L, _EVERYONE, _NOBODY)
        self._prompt_K = everyone.repeat_interleave(group_size)
        self._row_K = torch.arange(len(self._prompt_K), device=real_P_L.device)
        self._position_K = real_P_L.sum(1)[self._prompt_K]
        self._place()

    def _place(self) -> None:
        """Give every row a query of its prompt."""
        count_F = torch.bincount(self._prompt_K)
        first_F = count_F.cumsum(0) - count_F
        self._at = self._prompt_K, torch.arange(len(self._prompt_K), device=first_F.device) - first_F[self._prompt_K]
        self._shape = len(count_F), int(count_F.max())
        self._row_F_Q = self._spread(self._row_K, _NOBODY)

    def _spread(self, value_K: Tensor, otherwise: int = 0) -> Tensor:
        return value_K.new_full(self._shape, otherwise).index_put_(self._at, value_K)

    def keep(self, kept_K: Tensor) -> None:
        self._row_K, self._position_K = self._row_K[kept_K], self._position_K[kept_K]
        prompt_F, self._prompt_K = torch.unique(self._prompt_K[kept_K], return_inverse=True)
        if len(prompt_F) < self._shape[0]:
            fork(self._cache, prompt_F)
            self._owner_F_L = self._owner_F_L[prompt_F]
        self._place()

    def step(self, token_K: Tensor) -> Tensor:
        """The next logits [K, V]."""
        self._owner_F_L = torch.cat([self._owner_F_L, self._row_F_Q], 1)
        owner_F_1_L = self._owner_F_L[:, None, :]
        seen_F_Q_L = (owner_F_1_L == self._row_F_Q[:, :, None]) | (owner_F_1_L == _EVERYONE)
        with head_at(self._model, self._at[0] * self._shape[1] + self._at[1]):
            logits_K_V: Tensor = call(
                self._model,
                self._spread(token_K),
                attention_mask=additive(seen_F_Q_L, undressed(self._model).dtype)[:, None],
                position_ids=self._spread(self._position_K),
                cache=self._cache,
                use_cache=True,
            ).logits.squeeze(0)
        self._position_K = self._position_K + 1
        return logits_K_V


class _Rows:
    """The rows of one call of `sample`: what was drawn so far, and which of them are still being drawn."""

    def __init__(self, count: int, max_new_tokens: int, device: torch.device) -> None:
        self._tokens_R_T = torch.zeros(count, max_new_tokens, dtype=torch.long, device=device)
        self._logprobs_R_T = torch.zeros(count, max_new_tokens, device=device)
        self.row_K = torch.arange(count, device=device)
        self._live_K = torch.ones(count, dtype=torch.bool, device=device)
        self.live = count

    def record(self, step: int, token_K: Tensor, logprob_K: Tensor, *, ends_K: Tensor) -> None:
        self._tokens_R_T[self.row_K, step] = token_K
        self._logprobs_R_T[self.row_K, step] = logprob_K
        self._live_K = self._live_K & ~ends_K
        self.live = int(self._live_K.sum())

    def rows_to_keep(self) -> Tensor | None:
        """Indices into the present rows when it is worth dropping the others, and forget those; else None."""
        if self.live > DROP_AT * len(self.row_K):
            return None
        kept_K = self._live_K.nonzero().squeeze(1)
        self.row_K, self._live_K = self.row_K[kept_K], self._live_K[kept_K]
        return kept_K

    def completions(self, stops: Tensor) -> list[Completion]:
        """Every row up to its first stop token; what was drawn behind it, waiting to be dropped, is not part of it."""
        ends_R_T = torch.isin(self._tokens_R_T, stops)
        ended_R = ends_R_T.any(1)
        length_R = torch.where(ended_R, ends_R_T.int().argmax(1) + 1, self._tokens_R_T.shape[1])
        columns = (self._tokens_R_T, self._logprobs_R_T, length_R, ended_R)
        return [
            Completion(tokens[:length], logprobs[:length], ended)
            for tokens, logprobs, length, ended in zip(*(column.tolist() for column in columns), strict=True)
        ]


def draw_uniforms(prompts: int, group_size: int, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """A number in [0, 1) for each token that may be drawn, shape [P, G, T]; T is 0 for greedy sampling."""
    length = 0 if sampling.greedy else sampling.max_new_tokens
    return torch.rand(prompts, group_size, length, generator=generator)


def draw(logits_K_V: Tensor, sampling: Sampling, uniform_K: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token a row, and its log-probability under the distribution it was drawn from, float32. Both of shape [K].

    By inverse cumulative distribution, with one array beside the logits: torch.multinomial on a CPU takes ten times as long
    at a vocabulary of 32,000.
    """
    mass_K_V = sampling_logits(logits_K_V, sampling).softmax(-1)
    token_K = mass_K_V.argmax(-1) if uniform_K is None else invert(mass_K_V, uniform_K)
    return token_K, mass_K_V.gather(1, token_K[:, None]).squeeze(1).log()


def invert(mass_K_V: Tensor, uniform_K: Tensor) -> Tensor:
    """The entry of each row at which the running sum of its mass passes `uniform` of the whole, shape [K].

    First which block of entries, then which of these: a running sum over all takes longer than anything else in drawing.
    Never one without mass, whatever rounding does.
    """
    vocabulary = mass_K_V.shape[1]
    width = min(_BLOCK, vocabulary)
    whole = vocabulary // width * width
    block_K_B = mass_K_V[:, :whole].unfold(1, width, width).sum(-1)
    if whole < vocabulary:
        block_K_B = torch.cat([block_K_B, mass_K_V[:, whole:].sum(-1, keepdim=True)], 1)
    end_K_B = block_K_B.cumsum(1)
    goal_K_1 = _below(uniform_K[:, None] * end_K_B[:, -1:], end_K_B[:, -1:])
    at_K_1 = torch.searchsorted(end_K_B, goal_K_1, right=True)
    column_K_W = at_K_1 * width + torch.arange(width, device=at_K_1.device)
    inside_K_W = mass_K_V.gather(1, column_K_W.clamp(max=vocabulary - 1)) * (column_K_W < vocabulary)
    sum_K_W = inside_K_W.cumsum(1)
    rest_K_1 = (goal_K_1 - (end_K_B - block_K_B).gather(1, at_K_1)).clamp(min=0.0)
    return (at_K_1 * width + torch.searchsorted(sum_K_W, _below(rest_K_1, sum_K_W[:, -1:]), right=True)).squeeze(1)


def _below(value: Tensor, bound: Tensor) -> Tensor:
    """The value, or what is next below the bound: on the bound itself a search would end behind the last entry."""
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))


def sampling_logits(logits_K_V: Tensor, sampling: Sampling) -> Tensor:
    """Logits / temperature, cut to the smallest set of tokens with `top_p` of the mass. Shape [K, V], float32.

    log softmax of them is the distribution that is drawn from.
    """
    scaled_K_V = logits_K_V.float()
    if sampling.temperature != 1.0:
        scaled_K_V = scaled_K_V / sampling.temperature
    if sampling.top_p < 1.0:
        sorted_K_V, order_K_V = scaled_K_V.sort(-1, descending=True)
        mass_K_V = sorted_K_V.softmax(-1)
        beyond_K_V = mass_K_V.cumsum(-1) - mass_K_V >= sampling.top_p
        scaled_K_V = scaled_K_V.masked_fill(
            torch.empty_like(beyond_K_V).scatter_(-1, order_K_V, beyond_K_V), -torch.inf
        )
    return scaled_K_V
