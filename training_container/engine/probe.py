"""Whether a layout that shares beginnings is right for a model: tried on that model, and compared with plain rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .batch import Example
from .forward import undressed
from .layouts import BY_NAME
from .rows import Costs
from .sampler import Sampling, Ways, sample

log = logging.getLogger(__name__)

# How far a value (nats) and a gradient (relative to its norm) may be from the plain layout's. A wrong mask or position is
# off by 1e-2 and more even in a model with random weights; the second pair is for weights of 16 bits.
_TOLERANCE, _TOLERANCE_16 = (1e-4, 1e-3), (5e-2, 5e-2)
# Gradients are compared on so many numbers at most, of the smallest weights: a look at the layout, not at all weights.
_GRADIENT_NUMBERS = 2**24


def sharing_layouts(model: Any, device: torch.device) -> tuple[str, ...]:
    """Names of the layouts whose log-probabilities and gradients equal those of plain rows, on this very model.

    Draws no random number from torch's own generator, and leaves the model's mode and gradients as they were.
    """
    if _learns_a_prompt(model):
        return ()
    examples = _examples(_vocabulary(model))
    with _evaluating(model):
        expected = _value_and_gradient(model, "plain", examples, device)
        return tuple(name for name in ("packed", "fork") if _agrees(model, name, examples, device, expected))


def sampling_ways(model: Any, device: torch.device) -> Ways:
    """Ways of drawing whose log-probabilities equal those of plain rows, on this very model in evaluation mode."""
    with _evaluating(model):
        # A group so large that queries are taken for it, and prompts of unequal lengths.
        queries = not _learns_a_prompt(model) and _draws_rightly(model, Ways(queries=True), device)
        return Ways(padded=queries or _draws_rightly(model, Ways(), device), queries=queries)


def _draws_rightly(model: Any, ways: Ways, device: torch.device) -> bool:
    prompts = [list(example.tokens[: example.first_trained]) for example in _examples(_vocabulary(model))[::3]]
    uniforms_P_G_T = torch.rand(len(prompts), 4, 5, generator=torch.Generator().manual_seed(0))
    try:
        drawn = sample(
            model, prompts, Sampling(5), group_size=4, stop_tokens=(), uniforms_P_G_T=uniforms_P_G_T, ways=ways
        )
        rows = [
            (Example(prompt + each.tokens, [False] * len(prompt) + [True] * len(each.tokens)), each.logprobs)
            for prompt, group in zip(prompts, drawn, strict=True)
            for each in group
        ]
        with torch.no_grad():
            expected_N = BY_NAME["plain"](model, [example for example, _ in rows], device=device)
    # As above: a way that raises is not for this model.
    except Exception as error:
        log.info("%s is not used: %s: %s", ways, type(error).__name__, error)
        return False
    found_N = torch.tensor([value for _, logprobs in rows for value in logprobs], device=device)
    distance = float((found_N - expected_N).abs().max())
    log.info("%s: off by %.1e nats", ways, distance)
    return distance < _tolerance(model)[0]


def usable(model: Any, trusted: Sequence[str]) -> tuple[str, ...]:
    """Of the trusted layouts those that are right in the model's present mode.

    With dropout a beginning computed once is dropped out once, not anew for each row: another distribution of gradients.
    With gradient checkpointing a forward in training mode gives no cache.
    """
    if not model.training:
        return tuple(trusted)
    if drops_out(model):
        return ()
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return tuple(name for name in trusted if name != "fork" or not recomputes)


def drops_out(model: Any) -> bool:
    """Whether any dropout is above 0, be it a module or an attention's own."""
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config = undressed(model).config.get_text_config().to_dict()
    return any(
        isinstance(value, int | float) and value > 0
        for name, value in config.items()
        if name in ("attention_dropout", "attn_pdrop", "dropout", "activation_dropout")
    )


def costs_of(model: Any) -> Costs:
    """From the weights that every token passes (all but embeddings) and from the attention's shape.

    Of a mixture of experts every expert counts, which only makes sharing look a little better than it is.
    """
    bare = undressed(model)
    embeddings = {id(each.weight) for each in (bare.get_input_embeddings(), bare.get_output_embeddings()) if each}
    weights = sum(weight.numel() for weight in model.parameters() if id(weight) not in embeddings)
    config = bare.config.get_text_config()
    layers, hidden = getattr(config, "num_hidden_layers", 1), getattr(config, "hidden_size", 0)
    return Costs(token=float(weights), pair=2.0 * layers * hidden, layers=layers)


def _learns_a_prompt(model: Any) -> bool:
    """Whether an adapter puts something of its own before the tokens: positions and caches are then not ours to lay out."""
    return any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values())


def _vocabulary(model: Any) -> int:
    return int(undressed(model).get_input_embeddings().weight.shape[0])


def _tolerance(model: Any) -> tuple[float, float]:
    return _TOLERANCE_16 if undressed(model).dtype in (torch.float16, torch.bfloat16) else _TOLERANCE


def _examples(vocabulary: int) -> list[Example]:
    """Three groups with prompts of unequal lengths, completions of 1 to 6 tokens, and a row without a group."""
    chance = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=chance).tolist()

    def rows(group: int | None, prompt: list[int], lengths: Sequence[int]) -> list[Example]:
        return [
            Example(prompt + tokens(length), [False] * len(prompt) + [True] * length, group=group) for length in lengths
        ]

    groups = ((0, 9, (6, 2, 1)), (1, 5, (3, 6, 4)), (2, 7, (1, 5)), (None, 3, (4,)))
    return [row for group, prompt, lengths in groups for row in rows(group, tokens(prompt), lengths)]


def _value_and_gradient(
    model: Any, name: str, examples: Sequence[Example], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N], and the gradient of a fixed combination of them."""
    with torch.enable_grad():
        logprobs_N = BY_NAME[name](model, examples, device=device)
        pull_N = torch.linspace(-1.0, 1.0, len(logprobs_N), device=device)
        weights = list(_some_weights(model))
        if not weights:
            return logprobs_N.detach(), logprobs_N.new_zeros(1)
        found = torch.autograd.grad((logprobs_N * pull_N).sum(), weights, allow_unused=True)
    return logprobs_N.detach(), torch.cat([each.flatten().float() for each in found if each is not None])


def _some_weights(model: Any) -> Iterator[Tensor]:
    room = _GRADIENT_NUMBERS
    for weight in sorted((each for each in model.parameters() if each.requires_grad), key=torch.Tensor.numel):
        room -= weight.numel()
        if room < 0:
            return
        yield weight


def _agrees(
    model: Any, name: str, examples: Sequence[Example], device: torch.device, expected: tuple[Tensor, Tensor]
) -> bool:
    value_limit, gradient_limit = _tolerance(model)
    try:
        value, gradient = _value_and_gradient(model, name, examples, device)
    # Whatever a model's code raises for input that it was not made for, this layout is not for it; plain rows are.
    except Exception as error:
        log.info("layout %s is not used: %s: %s", name, type(error).__name__, error)
        return False
    if gradient.shape != expected[1].shape:
        return False
    distance = float((value - expected[0]).abs().max())
    turned = float((gradient - expected[1]).norm() / expected[1].norm().clamp(min=1e-12))
    if distance < value_limit and turned < gradient_limit:
        return True
    log.info("layout %s is not used: off by %.1e nats, gradient by %.1e", name, distance, turned)
    return False


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
