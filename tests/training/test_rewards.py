"""Asking the user's reward function in its own process."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from microtuning_core.domain.algorithms import RewardSpec
from training_container.failures import UserFailure, classify
from training_container.metrics import EventLog
from training_container.rewards import Question, Rewards, Scores, open_rewards
from training_container.rewards.functions import as_answers, score_batch
from training_container.user_code import Refusal, accepted

CASES = Path(__file__).parents[1] / "cases"


def asked(*completions: str, **columns: list[Any]) -> Question:
    return Question(["q"] * len(completions), list(completions), [[7]] * len(completions), columns)


def opened(entry: str, code: Path, *, time_limit_s: float) -> Rewards:
    spec = RewardSpec(entry=entry, time_limit_s=time_limit_s)
    return open_rewards(spec, code, seed=0, log=EventLog(code / "log.jsonl", 1), model_channel=code.joinpath)


Ask = Callable[..., Scores]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """Scores of completions by `entry` of this source, in a real reward process."""
    every: list[Rewards] = []

    def score(
        source: str, question: Question, *, entry: str = "user:score", limit_s: float = 20, step: int = 1
    ) -> Scores:
        (tmp_path / "user.py").write_text(source, encoding="utf-8")
        every.append(opened(entry, tmp_path, time_limit_s=limit_s))
        return every[-1].score(question, step=step)

    yield score
    for reward in every:
        reward.close()


def read_case(name: str) -> str:
    return (CASES / name).read_text("utf-8")


# --- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "counts"),
    [
        ("some_none", [1.0, None, 0.0, None], {"reward_abstained": 2}),
        ("all_none", [None] * 4, {"reward_abstained": 4}),
        ("has_nan", [1.0, None, 0.0, 0.5], {"reward_not_finite": 1}),
        ("has_inf", [None, 0.0, None, 1.0], {"reward_not_finite": 2}),
        ("ints_bools", [1.0, 1.0, 0.0, 0.0], {}),
        ("np_scalars", [1.0, 0.0, 1.0, 1.0], {}),
        ("np_array", [0.0, 1.0, 2.0, 3.0], {}),
        ("generator", [1.0, 2.0, 3.0, 4.0], {}),
    ],
)
def test_every_odd_return_of_the_zoo_is_a_number_or_counted(
    name: str, values: Any, counts: dict[str, int], ask: Ask
) -> None:
    scores = ask(read_case("c15_reward_zoo.py"), asked("a", "bb", "ccc", "dddd"), entry=f"user:{name}")
    assert [None if math.isnan(value) else value for value in scores.values] == values
    assert scores.counts() == counts
    json.dumps({"reward": scores.values}, allow_nan=True)


def test_a_text_among_the_rewards_is_refused_by_its_index(ask: Ask) -> None:
    with pytest.raises(UserFailure, match=r"user:exotic: reward 2 is a str \('0.5'\), not a number"):
        ask(read_case("c15_reward_zoo.py"), asked("a", "b", "c", "d"), entry="user:exotic")


def values_of(result: Any) -> list[float | None]:
    return [each.value for each in as_answers(result, len(result))]


def test_decimals_fractions_and_scalar_arrays_count_as_numbers_and_lists_do_not() -> None:
    from decimal import Decimal
    from fractions import Fraction

    import numpy as np
    import torch

    assert values_of([Decimal("0.5"), Fraction(1, 4), np.array(2.0), torch.tensor(3)]) == [0.5, 0.25, 2.0, 3.0]
    assert values_of(torch.tensor([1.0, 2.0])) == [1.0, 2.0]
    for odd in ([1.0], np.array([1.0]), 1j, b"1", {}, object()):
        with pytest.raises(Refusal, match="reward 1 is a"):
            as_answers([0.0, odd], 2)


@pytest.mark.parametrize("returned", [3.0, None, "1234", {"a": 1}, {1.0}])
def test_what_is_no_list_is_refused_and_never_spread_over_all_completions(returned: Any) -> None:
    with pytest.raises(Refusal, match="return one number"):
        as_answers(returned, 4)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_wrong_number_of_rewards_is_refused_with_both_numbers(count: int) -> None:
    with pytest.raises(Refusal, match=f"returned {count} rewards for 4 completions"):
        as_answers([0.0] * count, 4)


# --- how it is called ------------------------------------------------------------------------------------------------


def test_a_function_gets_only_the_arguments_its_signature_takes() -> None:
    given = {"prompts": ["q"], "completions": ["c"], "completion_ids": [[1]], "answer": ["a"]}
    assert accepted(lambda completions, answer: 0, given) == ([], {"completions": ["c"], "answer": ["a"]})
    assert accepted(lambda **columns: 0, given) == ([], given)
    assert accepted(functools.partial(lambda completions, bonus: 0, bonus=1), given) == ([], {"completions": ["c"]})


def test_what_a_signature_takes_by_position_only_is_given_by_position() -> None:
    given = {"prompts": ["q"], "completions": ["c"], "completion_ids": [[1]], "answer": ["a"]}
    others = {"prompts": ["q"], "completion_ids": [[1]], "answer": ["a"]}
    assert accepted(lambda completions, /, **_: 0, given) == ([["c"]], others)
    assert accepted(lambda answer, completions, /: 0, given) == ([["a"], ["c"]], {})
    assert accepted(lambda prompts, /, completions, *, answer: 0, given) == (
        [["q"]], {"completions": ["c"], "answer": ["a"]},
    )  # fmt: skip
    assert accepted(lambda other=7, completions=(), /: 0, given) == ([7, ["c"]], {})
    assert accepted(functools.partial(lambda bonus, completions, /: 0, 1), given) == ([["c"]], {})
    with pytest.raises(Refusal, match="asks for 'texts', and the rows have answer"):
        accepted(lambda texts, /: 0, given)


def test_a_reward_with_position_only_parameters_scores(ask: Ask) -> None:
    source = "def score(completions, answer, /, **_):\n    return [c == a for c, a in zip(completions, answer)]\n"
    assert ask(source, asked("4", "5", answer=["4", "4"])).values == [1.0, 0.0]


def test_a_function_that_asks_for_a_column_the_rows_lack_is_told_which_they_have() -> None:
    with pytest.raises(Refusal, match="asks for 'solution', and the rows have answer, completions"):
        accepted(lambda completions, solution: 0, {"completions": [], "answer": []})


def test_an_async_function_is_awaited() -> None:
    async def score(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    answers, _ = score_batch(score, {"completions": ["a", "bb"]}, seed=0, step=1)
    assert [each.value for each in answers] == [1.0, 2.0]


def test_columns_and_ids_reach_the_function_one_entry_a_completion(ask: Ask) -> None:
    source = (
        "def score(prompts, completions, completion_ids, answer):\n"
        "    return [float(c == a) + i[0] for c, a, i in zip(completions, answer, completion_ids)]\n"
    )
    assert ask(source, asked("4", "5", answer=["4", "4"])).values == [8.0, 7.0]


def test_a_reward_with_chance_in_it_gives_the_same_numbers_for_the_same_step(ask: Ask) -> None:
    source = "import random\ndef score(completions, **kw):\n    return [random.random() for _ in completions]\n"
    first, again, other = (ask(source, asked("a", "b"), step=step).values for step in (3, 3, 4))
    assert first == again != other


def test_what_the_function_prints_disturbs_nothing(ask: Ask, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask("def score(completions, **kw):\n    print('hello')\n    return [1.0]\n", asked("a")).values == [1.0]


@pytest.mark.parametrize(
    "start",
    [
        "p = subprocess.Popen(['sleep', '60'], start_new_session=True).pid",
        "p = os.fork() or time.sleep(60)",
        "with ThreadPoolExecutor() as pool: p = pool.submit(lambda: os.fork() or time.sleep(60)).result()",
        "p = context.Process(target=time.sleep, args=(60,)); p.start(); p = p.pid",
    ],
)
def test_what_a_reward_starts_can_be_stopped_and_the_reward_itself_stays(start: str, ask: Ask) -> None:
    source = (
        "import os, signal, subprocess, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "import multiprocessing\ncontext = multiprocessing.get_context('fork')\n"
        f"def score(completions):\n    {start}\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(p, signal.SIGTERM)\n    return [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1])]\n"
    )
    assert ask(source, asked("a")).values == [-signal.SIGTERM]


def test_a_call_that_is_killed_takes_what_it_started_with_it(ask: Ask, tmp_path: Path) -> None:
    source = (
        "import subprocess, time\nfrom pathlib import Path\ndef score(completions):\n"
        "    p = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"    with open({str(tmp_path / 'pids')!r}, 'a') as file:\n        file.write(f'{{p.pid}}\\n')\n"
        "    time.sleep(60)\n"
    )
    assert ask(source, asked("a"), limit_s=2).timed_out == 1
    pids = [int(line) for line in (tmp_path / "pids").read_text().splitlines()]
    assert len(pids) == 2
    ends_at_s = time.monotonic() + 2
    while [pid for pid in pids if is_running(pid)] and time.monotonic() < ends_at_s:
        time.sleep(0.01)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


# --- limits ----------------------------------------------------------------------------------------------------------


FORKS = (
    "import os, sys\n"
    "def fork(how):\n"
    "    if (pid := os.fork()) == 0:\n"
    "        if how == 'raise': raise ValueError('the child')\n"
    "        if how == 'exit': sys.exit(3)\n"
    "        return 0\n"
    "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
)


@pytest.mark.parametrize(("how", "status"), [("return", 0), ("raise", 1), ("exit", 3)])
@pytest.mark.parametrize(
    "source",
    [
        "def score(completions): return [10 + fork(HOW) + len(c) for c in completions]",
        "def score(completion): return 10 + fork(HOW) + len(completion)",
        "async def score(completion): return 10 + fork(HOW) + len(completion)",
        "loaded = fork(HOW)\ndef score(completion): return 10 + loaded + len(completion)",
    ],
)
def test_a_child_that_comes_out_of_the_reward_answers_nothing_and_ends_as_a_script_does(
    source: str, how: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "user.py").write_text(FORKS + source.replace("HOW", repr(how)), encoding="utf-8")
    with opened("user:score", tmp_path, time_limit_s=20) as rewards:
        for step in (1, 2, 3):
            texts = ["x" * step, "x" * (step + 1)]
            assert rewards.score(asked(*texts), step=step).values == [10 + status + len(text) for text in texts]


def test_a_stray_message_is_never_taken_for_the_next_answer(tmp_path: Path) -> None:
    source = (
        "import socket, sys\n"
        "from training_container.user_code import send\n"
        "def stray(*to):\n"
        "    with socket.socket(fileno=int(sys.argv[1])) as channel:\n"
        "        send(channel, {'answers': [9.0], 'to': list(to)}); send(channel, {'answers': [9.0]}); channel.detach()\n"
        "def score(completion):\n"
        "    stray(1, 0)\n"
        "    return len(completion)\n"
    )
    (tmp_path / "user.py").write_text(source, encoding="utf-8")
    with opened("user:score", tmp_path, time_limit_s=20) as rewards:
        rewards.score(asked("a"), step=1)
        assert rewards.score(asked("ab", "abc"), step=2).values == [2.0, 3.0]


def test_a_function_with_a_sigalrm_limit_of_its_own_scores_as_when_called_directly(ask: Ask) -> None:
    assert ask(read_case("c17_reward_alarm.py"), asked("4", "4", "5", "4")).values == [1.0, 1.0, 0.0, 1.0]


def test_the_one_completion_that_hangs_is_found_counted_and_the_others_keep_their_scores(ask: Ask) -> None:
    began_s = time.monotonic()
    scores = ask(read_case("c18_reward_hang.py"), asked("aaa", "b", "a" * 40 + "!", "aa"), limit_s=2)
    assert time.monotonic() - began_s < 6
    assert [None if math.isnan(value) else value for value in scores.values] == [1.0, 0.0, None, 1.0]
    assert scores.counts() == {"reward_timed_out": 1}


def test_a_function_that_hangs_on_everything_ends_the_run_at_the_third_step(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("import time\ndef score(**kw):\n    time.sleep(60)\n", encoding="utf-8")
    began_s = time.monotonic()
    with opened("user:score", tmp_path, time_limit_s=0.4) as reward:
        assert reward.score(asked("a", "b"), step=1).timed_out == 2
        assert reward.score(asked("a", "b"), step=2).timed_out == 2
        with pytest.raises(
            UserFailure, match=r"user:score gave no score within reward.time_limit_s = 0.4 s in 3 steps"
        ):
            reward.score(asked("a", "b"), step=3)
    assert time.monotonic() - began_s < 15


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_an_exception_ends_with_the_users_file_and_line_and_its_traceback_on_stderr(
    ask: Ask, tmp_path: Path, capfd: Any
) -> None:
    lines = [
        "def helper(text):",
        "    return int(text)",
        "def score(completions, **kw):",
        "    return [*map(helper, completions)]",
    ]
    source = "\n".join(lines)
    with pytest.raises(UserFailure, match="ValueError: invalid literal for int") as failure:
        ask(source, asked("x"))
    assert (failure.value.file, failure.value.line) == (str(tmp_path / "user.py"), 2)
    assert "return int(text)" in capfd.readouterr().err


# Exceptions that are hard to tell about.
SAYS_HALF_A_CHARACTER = "raise ValueError('half \\ud800 of a pair')"
TELLS_NOTHING = """
class Mute(Exception):
    def __str__(self):
        raise {raised}
    __repr__ = __str__
raise Mute
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SAYS_HALF_A_CHARACTER, r"ValueError: half \ud800 of a pair"),
        ("raise type('\\u00c4rger', (Exception,), {})('\\udfff')", r"Ärger: \udfff"),
        (TELLS_NOTHING.format(raised="RuntimeError"), "Mute: (its text cannot be had: __str__ raised RuntimeError)"),
        (TELLS_NOTHING.format(raised="SystemExit"), "Mute: (its text cannot be had: __str__ raised SystemExit)"),
        ("raise type('E', (Exception,), {'__str__': lambda self: 3})", "E: (its text cannot be had: __str__ raised"),
        ("raise SyntaxError('odd', ('file', 1, 1, 5))", "SyntaxError: odd"),
        ("raise SyntaxError('odd', (__file__, object(), 1, 'x'))", "SyntaxError: odd"),
        ("raise SyntaxError('odd', (__file__, 10 ** 5000, 1, 'x'))", "SyntaxError: odd"),
        ("raise SyntaxError('odd', (3, 1, 1, 'x'))", "SyntaxError: odd"),
        ("raise SyntaxError('odd', (b'user.py', 1, 1, 'x'))", "SyntaxError: odd"),
        ("raise BaseExceptionGroup('\\ud800', [KeyboardInterrupt('\\ud800')])", r"BaseExceptionGroup: \ud800"),
    ],
)
@pytest.mark.parametrize("when", ["loading", "scoring"])
def test_an_exception_that_is_hard_to_tell_about_is_the_users_with_file_and_line(
    source: str, message: str, when: str, ask: Ask, tmp_path: Path
) -> None:
    scores = "def score(**kw):\n" + "".join(f"    {line}\n" for line in source.strip().splitlines())
    with pytest.raises(UserFailure) as caught:
        ask(source if when == "loading" else scores, asked("a"))
    assert message in caught.value.message
    raised_at = len(source.strip().splitlines()) + (1 if when == "scoring" else source.startswith("\n"))
    failure = json.loads(classify(caught.value).as_line().encode("utf-8"))
    assert (failure["class"], failure["file"], failure["line"]) == ("user", str(tmp_path / "user.py"), raised_at)
    assert failure["message"] == caught.value.message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(:\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def other(): pass\n", "user has no 'score'"),
        ("score = 4\n", "it is a int, not a function"),
        ("def score(**kw):\n    raise SystemExit(3)\n", "SystemExit: 3"),
        ("import os\ndef score(**kw):\n    os._exit(3)\n", r"ended by itself \(exit status 3\)"),
        ("import os\ndef score(**kw):\n    os.abort()\n", r"ended by itself \(signal 6\)"),
    ],
)
def test_code_that_cannot_score_ends_as_the_users_failure(source: str, message: str, ask: Ask) -> None:
    with pytest.raises(UserFailure, match=message):
        ask(source, asked("a"))


# --- pickles ---------------------------------------------------------------------------------------------------------


def closures() -> Any:
    spec = importlib.util.spec_from_file_location("c19_reward_closures", CASES / "c19_reward_closures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


@pytest.mark.parametrize("name", ["make", "by_lambda", "by_partial", "by_object"])
def test_a_pickled_closure_lambda_partial_or_object_scores_as_it_does_here(name: str, tmp_path: Path) -> None:
    module = closures()
    function = module.make(0.5) if name == "make" else getattr(module, name)
    (tmp_path / "reward.pkl").write_bytes(cloudpickle.dumps(function))
    (tmp_path / "code.json").write_text(json.dumps({"python": f"{sys.version_info.major}.{sys.version_info.minor}"}))
    with opened("pickle:reward.pkl", tmp_path, time_limit_s=20) as reward:
        assert reward.score(asked("a", "bb"), step=1).values == [
            float(value) for value in function(completions=["a", "bb"])
        ]


def test_a_pickle_of_another_python_is_refused_and_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "reward.pkl").write_bytes(b"this would fail to load")
    (tmp_path / "code.json").write_text('{"python": "3.9.1"}', encoding="utf-8")
    with pytest.raises(UserFailure, match=r"pickled by Python 3\.9\.1 and the job runs Python 3\.1"):
        opened("pickle:reward.pkl", tmp_path, time_limit_s=20)
