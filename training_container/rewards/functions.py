"""Calling a user's reward function, in whichever of the known forms it is written. Imports nothing heavy.

    def f(prompts, completions, completion_ids, **columns) -> list          all completions at once (TRL's form)
    def f(completion, answer) -> number                                     one completion and columns of its row
    def compute_score(data_source, solution_str, ground_truth, extra_info)  the same, in verl's words

Each sync or async. A score is a number, None to abstain, or a dict with "reward" or "score" and other things to show.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ..user_code import Refusal, accepted, seed_python_and_numpy, settled
from .plain import in_words, plain
from .scores import TIMED_OUT, Answer

Function = Callable[..., Any]
# Names of the one completion that a function is asked about.
_ONE = ("completion", "solution_str")
_SCORE = ("reward", "score")
# Names under which a batch function is given more than lists, where its signature asks for them.
_EXTRAS = ("log_metric", "log_extra", "trainer_state")


def scores_one(function: Function) -> bool:
    """Whether it is asked about one completion at a time."""
    names = _names(function)
    return "completions" not in names and any(name in names for name in _ONE)


def is_async(function: Function) -> bool:
    plain = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def _names(function: Function) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()  # a built-in without a signature


# What a step's metrics hold already, from whichever recipe; a test holds this to what recipes report.
RESERVED = frozenset({
    "event", "time", "attempt", "step", "total_steps", "epoch", "loss", "grad_norm", "learning_rate",
    "tokens_per_s", "bytes_sent", "warm_loss", "reward", "accuracy", "groups", "trainable_groups",
    "frac_zero_variance_groups", "length_penalty", "sampling_rounds", "empty_rounds", "completion_tokens",
    "frac_truncated", "frac_duplicate_completions", "entropy", "length_drift", "entropy_drift", "turns",
    "reward_heldout_gap", "reward_heldout_drift", "reward_abstained", "reward_not_finite", "reward_timed_out",
    "episodes_timed_out", "ratio", "clipped", "sampler_gap", "kl", "reverse_kl",
})  # fmt: skip
RESERVED_PREFIXES = ("reward/", "environment_", "eval_")


# --- all at once -------------------------------------------------------------------------------------------------------


@dataclass
class Logged:
    """What a batch function hands over beside its scores: means a metric, lists of one entry a completion."""

    values: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Count a number in the mean of a metric.

        Raises:
            ValueError: the run reports a metric of that name itself, whose place it would take.
        """
        name = str(name)
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise ValueError(
                f"log_metric({name!r}): the run itself reports {name!r}; name it otherwise, as {'my_' + name!r}"
            )
        self.values.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: list[Any]) -> None:
        self.columns.setdefault(str(column), []).extend(map(plain, values))

    @property
    def metrics(self) -> dict[str, float]:
        """Means. Not by fsum, which raises where a sum of finite numbers, or of both infinities, is none."""
        return {name: sum(values) / len(values) for name, values in self.values.items()}


def score_batch(
    function: Function, arguments: Mapping[str, Any], *, seed: int, step: int
) -> tuple[list[Answer], dict[str, float]]:
    """One answer a completion, and the means of what was logged."""
    seed_python_and_numpy(seed)
    # The function may change its lists in place, and there is one answer to what it was asked, not to what it left.
    count, own = len(arguments["completions"]), {name: list(values) for name, values in arguments.items()}
    logged = Logged()
    extras = {"log_metric": logged.log_metric, "log_extra": logged.log_extra,
              "trainer_state": SimpleNamespace(global_step=step - 1)}  # fmt: skip
    asked = {name: extras[name] for name in _EXTRAS if name in _names(function)}
    by_position, by_name = accepted(function, {**own, **asked})
    answers = as_answers(settled(function(*by_position, **by_name)), count)
    return _with_notes(answers, logged.columns), logged.metrics


def _with_notes(answers: list[Answer], columns: Mapping[str, list[Any]]) -> list[Answer]:
    for name, values in columns.items():
        if len(values) != len(answers):
            raise Refusal(f"it gave log_extra {len(values)} values of {name!r} for {len(answers)} completions")
    rows = [{name: values[index] for name, values in columns.items()} for index in range(len(answers))]
    return [Answer(each.value, each.components, {**each.notes, **row}) for each, row in zip(answers, rows, strict=True)]


def as_answers(result: Any, count: int) -> list[Answer]:
    """A list, tuple, generator or one-dimensional array of scores, checked: one too few would shift all others."""
    if isinstance(result, str | bytes | dict | set | frozenset) or not hasattr(result, "__iter__"):
        raise Refusal(f"it returned a {type(result).__name__}; return one number (or None) a completion, in a list")
    values = list(_iterated(result))
    if len(values) != count:
        raise Refusal(f"it returned {len(values)} rewards for {count} completions")
    return [as_answer(value, index) for index, value in enumerate(values)]


def _iterated(result: Any) -> Iterator[Any]:
    try:
        return iter(result)
    except TypeError as error:  # an array without dimensions has __iter__ and refuses to use it
        raise Refusal("it returned a single number; return one a completion, in a list") from error


# --- one at a time -----------------------------------------------------------------------------------------------------


def arguments_of_one(arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What a function of one completion can ask for: its row's columns, and the completion in several words."""
    row = {name: values[index] for name, values in arguments.items()}
    prompt, completion, ids = (row.pop(name) for name in ("prompts", "completions", "completion_ids"))
    verls = {"data_source": None, "ground_truth": _ground_truth(row), "extra_info": dict(row)}
    own = {"prompt": prompt, "completion": completion, "completion_ids": ids, "solution_str": text_of_last(completion)}
    return {**verls, **row, **own}


def _ground_truth(row: Mapping[str, Any]) -> Any:
    """verl's data keep it in `reward_model`; elsewhere it is the answer."""
    kept = row.get("reward_model")
    return kept["ground_truth"] if isinstance(kept, Mapping) and "ground_truth" in kept else row.get("answer")


def text_of_last(completion: Any) -> str:
    """The text of a completion, which in a chat is a list of messages."""
    return str(completion[-1].get("content") or "") if isinstance(completion, list) and completion else str(completion)


def score_one(function: Function, arguments: Mapping[str, Any], index: int, *, seed: int) -> Answer:
    """seed: of this completion alone, so that its score depends on no other's."""
    seed_python_and_numpy(seed)
    by_position, by_name = _arguments_for(function, arguments, index)
    return as_answer(settled(function(*by_position, **by_name)), index)


def score_together(function: Function, arguments: Mapping[str, Any], *, seed: int, limit_s: float) -> list[Answer]:
    """All completions at once in an async function of one; each has the time limit for itself."""

    async def one(index: int) -> Answer:
        by_position, by_name = _arguments_for(function, arguments, index)
        try:
            return as_answer(await asyncio.wait_for(function(*by_position, **by_name), limit_s), index)
        except TimeoutError:
            return TIMED_OUT

    async def every() -> list[Answer]:
        return list(await asyncio.gather(*map(one, range(len(arguments["completions"])))))

    seed_python_and_numpy(seed)
    return asyncio.run(every())


def _arguments_for(function: Function, arguments: Mapping[str, Any], index: int) -> tuple[list[Any], dict[str, Any]]:
    given = arguments_of_one(arguments, index)
    names = _names(function)
    # `**row` is the row: what only other words say goes to those who ask for it by name.
    by_right = {"prompt", "completion", *arguments} - {"completion_ids"}
    wanted = {name: value for name, value in given.items() if name in names or name in by_right}
    return accepted(function, wanted)


# --- what is a score ---------------------------------------------------------------------------------------------------


def as_answer(value: Any, index: int) -> Answer:
    """A number or None, or a dict with "reward" or "score"; its other numbers are components, the rest is for the log."""
    if not isinstance(value, Mapping):
        return Answer(as_number(value, index))
    key = next((name for name in _SCORE if name in value), None)
    if key is None:
        raise Refusal(f'reward {index} is a dict without "reward" or "score" (it has {", ".join(map(str, value))})')
    others = {str(name): each for name, each in value.items() if name != key}
    numbers = {name: number_of(each) for name, each in others.items() if is_number(each)}
    notes = {name: plain(each) for name, each in others.items() if name not in numbers}
    return Answer(as_number(value[key], index), numbers, notes)


def as_number(value: Any, index: int | str) -> float | None:
    """None abstains; Python, numpy and torch numbers, bool, Decimal and Fraction count as floats; nothing else does."""
    if value is None:
        return None
    if is_number(value):
        return number_of(value)
    raise Refusal(f"reward {index} is a {type(value).__name__} ({in_words(value, 40)}), not a number")


def number_of(value: Any) -> float:
    """Of what `is_number` calls one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_number(value: Any) -> bool:
    if isinstance(value, str | bytes | complex) or (hasattr(value, "__len__") and getattr(value, "ndim", None) != 0):
        return False
    try:
        float(value)
    except OverflowError:
        return True
    except Exception:  # it may be any object's own code
        return False
    return True
