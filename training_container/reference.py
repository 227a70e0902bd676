"""The reference that a policy is held to, and the teacher it learns from: models that only answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .engine import Engine, Example
from .engine.layouts import plain
from .engine.models import is_adapter, load_frozen, load_tokenizer
from .failures import UserFailure
from .run import Run

# As the engine's own: one [N, V] array of float32 logits stays below 1 GiB.
_MAX_LOGITS, _MAX_TOKENS = 2**28, 16_384

Reference = Callable[[Sequence[Example]], list[list[float]]]


def reference_of(engine: Engine, run: Run) -> Reference | None:
    """Log-probabilities under the model as it was before any training of this run; None where nothing is held to it.

    With an adapter that is the model with the adapter switched off; without, a second copy of the base model, loaded again
    after every restart, so it is the same to the bit. A warm start is part of the run: the reference has not seen it.

    Raises:
        UserFailure: a preset, which begins from random weights that nothing should be held to.
    """
    settings = run.settings
    if settings.kl_coef == 0:
        return None
    if is_adapter(engine.model):
        return partial(engine.forward, temperature=settings.temperature, reference=True)
    if run.spec.model.arch:
        raise UserFailure(
            f"algorithm.kl_coef {settings.kl_coef:g} holds the model to what it was before the run, and the preset "
            f"{run.spec.model.arch} begins from random weights. Leave kl_coef at 0, or start from a model (model.base)."
        )
    model = load_frozen(base_source(run), run.spec.model.revision, engine.device)
    return partial(Frozen(model, engine).forward, temperature=settings.temperature)


def base_source(run: Run) -> str:
    """Directory or hub id of the model the run started from."""
    channel = run.job.tree.channel("model")
    return str(channel) if channel.is_dir() else run.job.base_model


def load_teacher(engine: Engine, run: Run) -> Frozen:
    """The teacher of the settings, from the channel `teacher` or the hub.

    Raises:
        UserFailure: it cannot be loaded, or its tokens are not the student's.
    """
    teacher, channel = run.settings.teacher, run.job.tree.channel("teacher")
    source = str(channel) if channel.is_dir() else teacher.base
    refuse_other_tokens(teacher.base, load_tokenizer(source, teacher.revision), engine.tokenizer)
    frozen = Frozen(load_frozen(source, teacher.revision, engine.device), engine)
    refuse_tokens_from(frozen.vocabulary, max(engine.tokenizer.get_vocab().values()), "the tokenizer has")
    return frozen


def refuse_other_tokens(name: str, teacher: Any, student: Any) -> None:
    """Raises:
    UserFailure: a token means one thing to the teacher and another to the student, who may know some it does not.
    """
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    other = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if not other:
        return
    token = other[0]
    there = f"number {theirs[token]}" if token in theirs else "unknown"
    raise UserFailure(
        f"The teacher {name!r} and the student have different vocabularies: {len(other)} of {len(ours)} tokens are not the "
        f"same ({token!r} is number {ours[token]} for the student, {there} for the teacher). Token by token, only models "
        "of one tokenizer can be compared: take a teacher of the student's family."
    )


def refuse_tokens_from(vocabulary: int, highest: int, how: str) -> None:
    """A model has no number for a token that its head has no row for; a look-up would end the process on a GPU.

    Raises:
        UserFailure: `highest` is such a token.
    """
    if highest >= vocabulary:
        raise UserFailure(
            f"The model that is compared with has {vocabulary} tokens, and {how} the token {highest}. Take one whose "
            "vocabulary is at least as large as that of the model that is trained."
        )


class Frozen:
    """A model in evaluation mode whose weights never change; each process of the engine's world asks it about its share."""

    def __init__(self, model: Any, engine: Engine) -> None:
        self.model, self._engine = model.eval().requires_grad_(False), engine

    @property
    def vocabulary(self) -> int:
        """Rows of its head: the tokens it can say, with whatever padding its makers gave it."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @torch.no_grad()
    def forward(self, examples: Sequence[Example], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-probability of every trained token, one list an example.

        Raises:
            UserFailure: an example holds a token that the model does not have, as one that a student's head is padded with.
        """
        highest = max((max(example.tokens, default=0) for example in examples), default=0)
        refuse_tokens_from(self.vocabulary, highest, "the trained model drew")
        world = self._engine.world
        mine = world.share([len(example.tokens) for example in examples])
        found: dict[int, list[float]] = {}
        for part in self._cut(examples, mine):
            taken = [examples[index] for index in part]
            flat = plain.logprobs(self.model, taken, device=self._engine.device, temperature=temperature).tolist()
            for index, example in zip(part, taken, strict=True):
                found[index], flat = flat[: example.trained_tokens], flat[example.trained_tokens :]
            self._engine.beat()
        everyones = {index: values for part in world.gather(found) for index, values in part.items()}
        return [everyones[index] for index in range(len(examples))]

    def _cut(self, examples: Sequence[Example], indices: Sequence[int]) -> Iterator[list[int]]:
        """Rows of like length together, as many as have room, padding included."""
        room = max(1, min(_MAX_TOKENS, _MAX_LOGITS // self.vocabulary))
        taken: list[int] = []
        for index in sorted(indices, key=lambda index: -len(examples[index].tokens)):
            if taken and (len(taken) + 1) * len(examples[taken[0]].tokens) > room:
                yield taken
                taken = []
            taken = [*taken, index]
        if taken:
            yield taken
