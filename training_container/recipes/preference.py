"""What dpo, kto, orpo and reward share: a reference to be held to, a step, and what is said of the data."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from ..data import Marked, Pair, Pairs, render_pairs
from ..defaults import rates_for
from ..engine import Engine, Example, LossFn, Metrics, Totals
from ..engine.batch import micro_batch
from ..engine.models import is_adapter, load_frozen
from ..engine.presets import preset_model
from ..reference import Frozen, Reference, base_source
from ..run import Run

# --- the data --------------------------------------------------------------------------------------------------------


def pairs_of(engine: Engine, run: Run) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and held-out ones, which may be none."""
    tokenizer, max_length = engine.tokenizer, run.settings.max_length
    found = render_pairs(run.rows["train"], tokenizer, max_length)
    say_what_was_lost(run, found)
    if found.ties:
        run.log.emit(
            "notice", message=f"{found.ties} pairs prefer nothing: chosen and rejected are the same within max_length"
        )
    held_out = render_pairs(run.rows["eval"], tokenizer, max_length).pairs if run.rows.get("eval") else []
    return found.pairs, held_out


def say_what_was_lost(run: Run, found: Pairs | Marked) -> None:
    longest = run.settings.max_length
    if found.dropped:
        run.log.emit(
            "notice", message=f"{found.dropped} answers or pairs have no room after their prompt and are left out"
        )
    if found.cut:
        run.log.emit("notice", message=f"{found.cut} answers are cut to max_length {longest}, prompt included")


def examples_of(pairs: Sequence[Pair], indices: Sequence[int] | None = None) -> list[Example]:
    """Chosen, rejected, chosen, rejected, … of these pairs, or of all."""
    chosen = pairs if indices is None else [pairs[index] for index in indices]
    return [example for pair in chosen for example in pair.examples]


# --- the reference ---------------------------------------------------------------------------------------------------


def start_model(engine: Engine, run: Run) -> Reference:
    """Log-probabilities under the model as it was before any training of this run, the same to the bit after a restart.

    With an adapter that is the model with the adapter switched off. Without one the starting model is loaded once more (a
    preset: drawn once more), at the start and after a restart; whoever has no more need of it lets it go.
    """
    if is_adapter(engine.model):
        return partial(engine.forward, reference=True)
    arch = run.spec.model.arch
    if arch is None:
        return Frozen(load_frozen(base_source(run), run.spec.model.revision, engine.device), engine).forward
    with torch.random.fork_rng(devices=[]):
        model = preset_model(arch, engine.tokenizer, run.spec.seed)
    return Frozen(model.to(engine.device), engine).forward  # type: ignore[arg-type]  # transformers' types


def asked_each_step(engine: Engine, run: Run) -> bool:
    """Whether the reference is asked about each batch; otherwise once, about all rows, before the first step."""
    return is_adapter(engine.model) and run.settings.reference != "precomputed"


def compared(examples: Sequence[Example], reference: Reference) -> list[Example]:
    """The examples with the reference's log-probabilities."""
    return [
        replace(example, reference_logprobs=array("f", logprobs))
        for example, logprobs in zip(examples, reference(examples), strict=True)
    ]


def compared_pairs(pairs: Sequence[Pair], reference: Reference) -> list[Pair]:
    examples = compared(examples_of(pairs), reference)
    return [Pair(*both) for both in zip(examples[0::2], examples[1::2], strict=True)]


# --- the step --------------------------------------------------------------------------------------------------------


def preference_step(
    engine: Engine, run: Run, examples: Sequence[Example], loss: LossFn, *, whole_groups: bool
) -> dict[str, float]:
    """One optimizer step on these rows."""
    settings, rates = run.settings, rates_for(run.settings.type, run.spec.model)
    rate = run.learning_rate(rates.learning_rate)
    with run.meter.phase("update"):
        metrics = engine.forward_backward(examples, loss, whole_groups=whole_groups)
        max_grad_norm = settings.max_grad_norm or rates.max_grad_norm
        taken = engine.optim_step(rate, max_grad_norm, weight_decay=settings.weight_decay)
    run.meter.count(trained=Totals.of(examples).tokens)
    run.count_skipped(taken.applied, f"the gradient of the {settings.type} loss")
    return metrics | {"grad_norm": taken.grad_norm, "learning_rate": rate}


# --- evaluation ------------------------------------------------------------------------------------------------------


def value_of(loss: LossFn, outputs: Sequence[Sequence[float]], examples: Sequence[Example]) -> tuple[float, Metrics]:
    """A loss and its metrics of given log-probabilities (or scores), as `forward` has them."""
    flat = torch.tensor(list(chain.from_iterable(outputs)))
    found, metrics = loss(flat, micro_batch(examples, Totals.of(examples), torch.device("cpu")))
    return float(found), metrics


def share_right(margins: Sequence[float]) -> float:
    """Of answers told apart; one half for those that are not, as a coin would have it."""
    return math.fsum(0.5 if margin == 0 else float(margin > 0) for margin in margins) / len(margins)


def evaluate_pairs(
    engine: Engine,
    run: Run,
    pairs: Sequence[Pair],
    loss: LossFn,
    reward: Callable[[Example, Sequence[float]], float],
) -> dict[str, float]:
    """The recipe's loss on held-out pairs, and the share of them in which `reward` prefers the chosen.

    Args:
        reward: of an example and what the model gives it: log-probabilities of its trained tokens, or its score.
    """
    examples = examples_of(pairs)
    with run.meter.phase("update"):
        outputs = engine.forward(examples)
    rewards = [reward(example, output) for example, output in zip(examples, outputs, strict=True)]
    margins = [chosen - rejected for chosen, rejected in zip(rewards[0::2], rewards[1::2], strict=True)]
    return {"eval_loss": value_of(loss, outputs, examples)[0], "eval_accuracy": share_right(margins)}


def log_ratio(example: Example, logprobs: Sequence[float]) -> float:
    """Of policy to reference, for the whole answer, in nats."""
    return math.fsum(logprobs) - math.fsum(example.reference_logprobs)
