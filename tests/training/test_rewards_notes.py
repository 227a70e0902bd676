"""What a reward shows beside its scores: anything, for it is read by a person and trains nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from microtuning_core.domain.algorithms import RewardSpec
from training_container.metrics import EventLog, json_safe
from training_container.rewards import Question, Scores, open_rewards
from training_container.rewards.functions import as_answer
from training_container.rewards.plain import in_words, plain


class Colour(IntEnum):
    RED = 3


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Lazy(dict[str, Any]):
    def items(self) -> Any:
        raise LookupError("not loaded yet")


def nested(depth: int) -> Any:
    value: Any = "end"
    for _ in range(depth):
        value = [value]
    return value


def holding_itself() -> Any:
    value: dict[str, Any] = {"a": 1}
    value["me"] = [value]
    return value


SHOWN = [
    (None, None),
    (True, True),
    ("text", "text"),
    (np.str_("text"), "text"),
    (3, 3),
    (Colour.RED, 3),
    (10**30, "1000000000000000000000000000000"),
    (1.5, 1.5),
    (math.nan, "nan"),
    (-math.inf, "-inf"),
    (Decimal("1.5"), 1.5),
    (Decimal("sNaN"), "Decimal('sNaN')"),
    (Fraction(1, 4), 0.25),
    (Fraction(10**400), "Fraction(1" + "0" * 190 + "…"),
    (np.float32(0.5), 0.5),
    (np.int64(7), 7),
    (np.bool_(True), True),
    (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    (np.array([1.0, math.nan]), [1.0, "nan"]),
    (np.array(["a", None], dtype=object), ["a", None]),
    (torch.tensor(2), 2),
    (torch.ones(2, requires_grad=True), [1.0, 1.0]),
    (torch.tensor([1 + 2j]), ["(1+2j)"]),
    ([np.float32(0.5), {"x": np.int8(1)}], [0.5, {"x": 1}]),
    ((1, 2), [1, 2]),
    ({"one"}, ["one"]),
    ({(1, 2): "x", 3: "y", None: "z"}, {"(1, 2)": "x", "3": "y", "None": "z"}),
    (b"bytes", "b'bytes'"),
    (1 + 2j, "(1+2j)"),
    (Unshown(), "a Unshown (its repr raised RuntimeError)"),
    ([Unshown()], ["a Unshown (its repr raised RuntimeError)"]),
    ({Unshown: 1}, {repr(Unshown): 1}),
    (holding_itself(), {"a": 1, "me": ["…"]}),
    (nested(3), [[["end"]]]),
]


@pytest.mark.parametrize(("value", "expected"), SHOWN, ids=[in_words(value, 30) for value, _ in SHOWN])
def test_a_note_is_told_as_json_can_hold_it(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected


@pytest.mark.parametrize("value", [nested(10_000), Lazy(), torch.empty(2, device="meta"), np.zeros(10**6), object()])
def test_what_cannot_be_told_whole_is_told_in_few_words(value: Any) -> None:
    assert len(json.dumps(plain(value))) < 300


def test_one_thing_in_two_places_is_told_in_both() -> None:
    one = [1]
    assert plain([one, one, {"x": one}]) == [[1], [1], {"x": [1]}]


@pytest.mark.parametrize("value", [value for value, _ in SHOWN])
def test_an_answer_with_anything_beside_its_score_goes_over_the_wire_and_into_the_log(value: Any) -> None:
    answer = as_answer({"reward": 1, "beside": value}, 0)
    assert answer.value == 1.0
    json.dumps(json_safe({**answer.components, **answer.notes}), allow_nan=False)
    json.dumps(answer.as_json())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_no_float_holds_is_infinite_as_score_and_beside_it(sign: int) -> None:
    answer = as_answer({"reward": sign * 10**5_000, "beside": sign * 10**5_000}, 0)
    assert (answer.value, answer.components) == (sign * math.inf, {"beside": sign * math.inf})


# --- in a process ------------------------------------------------------------------------------------------------------

Score = Callable[[str], Scores]


@pytest.fixture
def scored(tmp_path: Path) -> Iterator[Score]:
    """What `score` of a source, in a process of its own, says of two completions."""
    opened = []

    def score(source: str) -> Scores:
        (tmp_path / "user.py").write_text(source, encoding="utf-8")
        log = EventLog(tmp_path / "log.jsonl", 1)
        spec = RewardSpec(entry="user:score")
        opened.append(open_rewards(spec, tmp_path, seed=0, log=log, model_channel=tmp_path.joinpath))
        return opened[-1].score(Question(["q", "q"], ["a", "b"], [[1], [2]], {}), step=1)

    yield score
    for rewards in opened:
        rewards.close()


VALUES = "[np.float32(0.5)], {1}, {(1, 2): 3}, float('nan'), torch.ones(2), object, 10 ** 5000, Unshown()"
ODD = f"""
import numpy as np, torch
class Unshown:
    def __repr__(self): raise RuntimeError("no")
MANY = {{f"x{{i}}": value for i, value in enumerate([{VALUES}])}}
"""


@pytest.mark.parametrize(
    "source",
    [
        "def score(completions): return [{'reward': 1, **MANY}, {'reward': 1, 'all': MANY}]",
        "def score(completion): return {'reward': 1, **MANY}",
        "async def score(completion): return {'reward': 1, 'all': MANY}",
        "def score(completions, log_extra):\n    log_extra('all', [MANY, MANY])\n    return [1, 1]",
        "def score(completions, log_extra):\n    log_extra('all', torch.ones(2))\n    return [1, 1]",
        "def score(completions, log_metric):\n    log_metric('x', 1e308); log_metric('x', 1e308)\n    return [1, 1]",
        "def score(completions, log_metric):\n    for v in ('inf', '-inf'): log_metric('x', v)\n    return [1, 1]",
    ],
)
def test_whatever_stands_beside_a_score_the_process_lives_and_the_score_counts(source: str, scored: Score) -> None:
    assert scored(ODD + source).values == [1.0, 1.0]
