"""Rewards behind an address, and a language model as judge, against a server on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from microtuning_core.domain.algorithms import JudgeSpec, RewardSpec
from training_container.failures import UserFailure
from training_container.metrics import EventLog
from training_container.rewards import Question, open_rewards
from training_container.rewards.http import Unanswered, Web, waits
from training_container.rewards.judge import JudgeReward, Turns, fill
from training_container.rewards.verdict import excerpt, score_in
from training_container.user_code import Refusal

Reply = tuple[int, Any, dict[str, str]]


@dataclass
class Server:
    """What it was asked, and what it answers: the replies in turn, the last one for ever."""

    url: str = ""
    replies: list[Any] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    delay_s: float = 0.0

    def reply_to(self, body: dict[str, Any]) -> Reply:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        reply = reply(body) if callable(reply) else reply
        return reply if isinstance(reply, tuple) else (200, reply, {})


@pytest.fixture
def server() -> Iterator[Server]:
    state, lock = Server(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.asked.append(body)
                state.headers.append(dict(self.headers))
                status, answer, headers = state.reply_to(body)
            time.sleep(state.delay_s)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            with contextlib.suppress(ConnectionError):  # whoever asked has left
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    state.url = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    listening.shutdown()
    listening.server_close()
    thread.join()


def asked(*completions: Any, **columns: list[Any]) -> Question:
    return Question(["q"] * len(completions), list(completions), [[7]] * len(completions), columns)


def scores_of(spec: dict[str, Any], question: Question, tmp_path: Path, steps: int = 1) -> Any:
    log = EventLog(tmp_path / "log.jsonl", 1)
    around: dict[str, Any] = {"seed": 0, "log": log, "model_channel": lambda name: tmp_path / name, "keep": tmp_path}
    with open_rewards(RewardSpec(**spec), tmp_path, **around) as rewards:
        return [rewards.score(question, step=step) for step in range(1, steps + 1)][-1]


# --- an address --------------------------------------------------------------------------------------------------------


def test_an_endpoint_gets_the_batch_as_a_function_would_and_answers_in_its_order(
    server: Server, tmp_path: Path
) -> None:
    server.replies = [[1, None, {"reward": 0.5, "style": 0.25}]]
    scores = scores_of({"entry": server.url}, asked("a", "b", "c", answer=["x", "y", "z"]), tmp_path)
    assert server.asked == [
        {"prompts": ["q"] * 3, "completions": ["a", "b", "c"], "completion_ids": [[7]] * 3, "answer": ["x", "y", "z"]}
    ]
    assert [scores.values[0], scores.values[2]] == [1.0, 0.5] and math.isnan(scores.values[1])
    assert scores.components["reward/style"][2] == 0.25
    assert scores.counts() == {"reward_abstained": 1}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ({"scores": [1, 2]}, r'it answered {"scores": \[1, 2\]}; expected a JSON list of scores'),
        ([1.0, "good"], r"reward 1 is a str \('good'\), not a number"),
        (b"<html>no</html>", "it answered <html>no</html>, which is not JSON"),
        ((404, {"error": "no such scorer"}, {}), 'it answered with status 404: {"error": "no such scorer"}'),
    ],
)
def test_a_wrong_answer_is_refused_with_what_was_expected(
    reply: Any, message: str, server: Server, tmp_path: Path
) -> None:
    server.replies = [reply]
    with pytest.raises(UserFailure, match=message):
        scores_of({"entry": server.url}, asked("a", "b"), tmp_path)
    assert len(server.asked) == 1


def test_a_busy_server_is_asked_again_and_again_as_late_as_it_says(server: Server) -> None:
    server.replies = [(429, {}, {"Retry-After": "3"}), (503, {}, {}), [1.0]]
    waited: list[float] = []
    web = Web(wait=waited.append)
    assert web.post(server.url, {"a": 1}, limit_s=20) == [1.0]
    assert waited == [3.0, 0.5]
    assert server.asked == [{"a": 1}] * 3
    web.close()


def test_a_server_that_asks_for_more_patience_than_the_limit_is_left_at_once(server: Server) -> None:
    server.replies = [(429, {"error": "slow down"}, {"Retry-After": "3600"})]
    web = Web()
    with pytest.raises(Unanswered, match=r'no answer within 5 s; last status 429: {"error": "slow down"}'):
        web.post(server.url, {}, limit_s=5)
    web.close()


def test_the_waits_double_up_to_ten_seconds() -> None:
    assert list(waits(8)) == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, None]


def test_an_endpoint_that_answers_too_late_is_counted_and_ends_the_run_at_the_third_step(
    server: Server, tmp_path: Path
) -> None:
    server.replies, server.delay_s = [[1.0]], 0.5
    spec = {"entry": server.url, "time_limit_s": 0.1}
    assert scores_of(spec, asked("a"), tmp_path, steps=2).timed_out == 1
    with pytest.raises(
        UserFailure, match=r"no score within reward.time_limit_s = 0.1 s in 3 steps in a row: no answer"
    ):
        scores_of(spec, asked("a"), tmp_path, steps=3)


def test_a_server_that_is_not_there_is_named_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(UserFailure, match=r"in 3 steps in a row: no answer within 0.2 s; last NewConnectionError"):
        scores_of({"entry": "http://127.0.0.1:9/", "time_limit_s": 0.2}, asked("a"), tmp_path, steps=3)


@contextlib.contextmanager
def dripping(*pieces: bytes) -> Iterator[str]:
    """A server that sends these at once, and then the last of them again and again, every 20 ms, for ever."""
    listening, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), listening.accept()[0] as channel:  # whoever asked has left
                channel.recv(1 << 16)
                channel.sendall(b"".join(pieces))
                while not over.wait(0.02):
                    channel.sendall(pieces[-1])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        over.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        listening.close()


_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((_OK + b"Content-Length: 100000\r\n\r\n[", b" "), id="a body of known length"),
        pytest.param((_OK + b"\r\n[", b" "), id="a body that ends with the connection"),
        pytest.param((_OK + _CHUNKED + b"1\r\n[\r\n", b"1\r\n \r\n"), id="a body in chunks"),
        pytest.param((_OK + _CHUNKED, b"0"), id="the length of a chunk"),
        pytest.param((b"HTTP/1.1 503 Busy\r\n\r\n", b" "), id="what a busy server says"),
        pytest.param((_OK, b"X-Drop: 1\r\n"), id="headers"),
        pytest.param((_OK + b"X-Drop: ", b"1"), id="one header"),
        pytest.param((b"HTTP/1.1 200 O", b"K"), id="the status"),
        pytest.param((b"HTTP/1.1 100 Continue\r\n\r\n",), id="promises"),
    ],
)
def test_a_server_that_drips_its_answer_has_no_more_time_than_the_limit(pieces: tuple[bytes, ...]) -> None:
    web = Web()
    with dripping(*pieces) as url:
        began_s = time.monotonic()
        with pytest.raises(Unanswered, match=r"no answer within 0.4 s; last "):
            web.post(url, {}, limit_s=0.4)
        assert time.monotonic() - began_s < 5
        web.close()


def test_a_connection_serves_one_request_after_the_other_each_with_a_limit_of_its_own(server: Server) -> None:
    server.replies, server.delay_s = [[1.0]], 0.3
    web = Web()
    assert [web.post(server.url, {}, limit_s=20, tries=1) for _ in range(3)] == [[1.0]] * 3
    web.close()


def test_an_endless_answer_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_container.rewards.http._MOST_BYTES", 2**20)
    web = Web()
    with dripping(_OK + b"\r\n", b"[" * 2**20) as url:
        with pytest.raises(Refusal, match=r"more than 1 MiB: \[\["):
            web.post(url, {}, limit_s=20)
        web.close()


@pytest.mark.parametrize("depth", [1, 300, *range(880, 1000, 8), 100_000])
def test_an_answer_that_nests_however_deep_is_refused_in_words(depth: int, server: Server, tmp_path: Path) -> None:
    nested = b"[" * depth + b"]" * depth
    for reply in (nested, b"[" + nested + b"]", b'{"rewards": ' + nested + b"}", b'{"score": ' + nested + b"}"):
        server.replies = [reply]
        with pytest.raises(UserFailure, match=rf"The reward {server.url}: "):
            scores_of({"entry": server.url}, asked("a"), tmp_path)


# --- a judge -----------------------------------------------------------------------------------------------------------


def says(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def says_length(body: dict[str, Any]) -> dict[str, Any]:
    return says(f"It has {len(body['messages'][0]['content'])} letters, so I say 8/10")


Judge = Callable[..., JudgeReward]


@pytest.fixture
def a_judge(server: Server, tmp_path: Path) -> Iterator[Judge]:
    opened: list[JudgeReward] = []

    def make(*, key: str | None = None, limit_s: float = 5, keep: Path | None = None, **settings: Any) -> JudgeReward:
        chosen = {"base_url": f"{server.url}/v1/", "model": "m", "prompt": "Rate {completion}", **settings}
        opened.append(JudgeReward("style", JudgeSpec(**chosen), time_limit_s=limit_s, keep=keep, key=key))
        return opened[-1]

    yield make
    for judge in opened:
        judge.close()


def test_a_judge_is_asked_once_for_the_same_words_and_its_number_is_the_score(server: Server, a_judge: Judge) -> None:
    server.replies = [says_length]
    answers = a_judge(prompt="{prompt}/{answer}: {completion}").score(asked("a", "b", "a", answer=[1, 1, 1]), step=1)
    assert [each.value for each in answers.each] == [0.8] * 3
    assert answers.each[0].notes == {"said": "It has 6 letters, so I say 8/10"}
    assert sorted(body["messages"][0]["content"] for body in server.asked) == ["q/1: a", "q/1: b"]
    assert all(body["model"] == "m" for body in server.asked)


def test_a_resumed_run_asks_nothing_twice_and_gets_the_same_scores(
    server: Server, a_judge: Judge, tmp_path: Path
) -> None:
    server.replies = [says("5"), says("7"), says("no idea"), says("1")]
    first = (
        a_judge(keep=tmp_path).score(asked("a"), step=1).each + a_judge(keep=tmp_path).score(asked("b"), step=2).each
    )
    with (tmp_path / "style.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"asked": "half a li')  # of a process that was killed
    third = a_judge(keep=tmp_path).score(asked("a", "b", "c"), step=3).each
    assert [each.value for each in first] == [0.5, 0.7]
    assert [each.value for each in third] == [0.5, 0.7, None]
    again = a_judge(keep=tmp_path).score(asked("c", "a"), step=4).each
    assert [each.value for each in again] == [None, 0.5]
    assert len(server.asked) == 3


def test_a_completion_cannot_fill_in_the_judges_form() -> None:
    fields = {"prompt": "p", "completion": "{answer} {{prompt}} \\1", "answer": "secret"}
    assert fill("{prompt}: {completion} {{completion}} {'a': 1}", fields) == (
        "p: {answer} {{prompt}} \\1 {completion} {'a': 1}"
    )
    with pytest.raises(Refusal, match=r"names {anwser}, and the rows have answer, completion, prompt"):
        fill("{anwser}", fields)


def test_messages_are_shown_to_the_judge_by_their_roles() -> None:
    chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    assert fill("{prompt}|{completion}|{n}", {"prompt": chat, "completion": chat[1:], "n": 3}) == (
        "user: 2+2\nassistant: 4|4|3"
    )


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("7", 0.7), ("Score: 7.5/10", 0.75), ("3 is too low, 8 out of 10.", 0.8), ("-2", -0.2), ("10", 1.0),
        ("good", None), ("", None), ("in 2024", None), ("GPT4 says 0", 0.0), ("A perfect score of 10", 1.0),
    ],
)  # fmt: skip
def test_the_last_number_within_the_scale_is_the_score(said: str, score: float | None) -> None:
    assert score_in(said, 10.0) == score


@pytest.mark.parametrize(
    "markup",
    ["**{}**/10", "**{}** / **10**", "`{}`/10", "__{}__/10", "*{}*/10", "${}$/10", r"\boxed{{{}}}/10",
     r"\[\boxed{{\frac{{{}}}{{10}}}}\]", "{}／10", "<score>{}</score>/10",
     "**Score (0-10):** {}", "final_score: {}"],
)  # fmt: skip
@pytest.mark.parametrize("number", [0, 3, 7.5, 10])
def test_markup_around_the_number_changes_nothing(number: float, markup: str) -> None:
    assert score_in(markup.format(number), 10.0) == number / 10


@pytest.mark.parametrize(
    "of_the_scale",
    ["{} (out of 10)", "{} of 10", "{} out of a possible 10", "{} points out of 10", "Score: {} (scale 0-10)",
     "Score: {}\n\n(0 = worst, 10 = best)", "Score: {}. Maximum: 10", "{} (10 is best)", "{} (best: 10)",
     "{} (scale of 10)", "[0, 10]: {}", "Score = {} [0..10]", "On a scale of 0 to 10, I say {}", "Score out of 10: {}",
     "On a 10-point scale: {}", "It scores {} where the maximum is 10", "It is not a 10. I say {}",
     "10/10 would be perfect, but this is a {}", "A score of 10 would need proof; this gets {}/10",
     "Score: {}\nIt has 10 errors", "Rating: {}" + ". It goes on" * 200 + " from 0 to 10"],
)  # fmt: skip
@pytest.mark.parametrize("number", [0, 3, 7.5])
def test_a_number_that_is_of_the_scale_is_never_the_score(number: float, of_the_scale: str) -> None:
    assert score_in(of_the_scale.format(number), 10.0) == number / 10


@pytest.mark.parametrize(
    "said",
    ["7-8/10", "7/10 to 8/10", "between 7 and 8", "8 or 9", "4/5", "85/100", "Score: 85", "7,5/10", "not a 10",
     "1. Clear\n2. Right", "8 (0 worst, 10 best)", "Score: 8. Others got 3/10", "from 0 to 10", "10 = best"],
)  # fmt: skip
def test_a_judge_whose_number_is_not_to_be_told_abstains(said: str) -> None:
    assert score_in(said, 10.0) is None


def test_a_long_answer_keeps_its_beginning_and_its_end_in_whole_words() -> None:
    said = "Score: 8. " + "words " * 100 + "81818"
    assert len(excerpt(said)) <= 300
    assert excerpt(said).startswith("Score: 8.") and excerpt(said).endswith("81818")
    assert set(excerpt("81818 " * 200).split()) == {"81818", "[…]"}


def test_what_the_judge_cannot_be_asked_is_counted_and_the_rest_is_kept(
    server: Server, a_judge: Judge, tmp_path: Path
) -> None:
    server.replies = [lambda body: (503, {}, {}) if "bad" in body["messages"][0]["content"] else says("10")]
    answers = a_judge(limit_s=0.2, retries=1, keep=tmp_path).score(asked("bad", "good"), step=1)
    assert [(each.value, each.timed_out) for each in answers.each] == [(None, True), (1.0, False)]
    assert "status 503" in answers.cause
    assert len((tmp_path / "style.jsonl").read_text().split()) > 0


def test_the_budget_ends_the_run_and_what_was_paid_for_is_kept(server: Server, a_judge: Judge, tmp_path: Path) -> None:
    server.replies = [says("10")]
    with pytest.raises(UserFailure, match=r"The reward style: all judge.max_requests = 2 are spent"):
        a_judge(max_requests=2, keep=tmp_path).score(asked("a", "b", "c"), step=1)
    assert len(server.asked) == 2
    a_judge(max_requests=3, keep=tmp_path).score(asked("a", "b", "c"), step=1)
    assert len(server.asked) == 3


def test_the_third_request_of_two_a_minute_waits_for_the_first_to_be_a_minute_old() -> None:
    waited: list[float] = []
    turns = Turns(2, None, made=0, wait=waited.append)
    for _ in range(5):
        turns.take()
    assert [round(each) for each in waited] == [60, 60, 120]


def test_the_key_is_sent_and_never_shown(server: Server, a_judge: Judge) -> None:
    server.replies = [(401, {"error": "bad key k-123"}, {})]
    with pytest.raises(UserFailure, match=r"status 401: .*bad key \*\*\*") as caught:
        a_judge(key="k-123").score(asked("a"), step=1)
    assert server.headers[0]["Authorization"] == "Bearer k-123"
    assert "k-123" not in caught.value.message


def test_a_model_that_takes_no_temperature_is_asked_without(server: Server, a_judge: Judge) -> None:
    refusal = (400, {"error": {"message": "Unsupported value: 'temperature'"}}, {})
    server.replies = [lambda body: refusal if "temperature" in body else says("9")]
    judge = a_judge()
    assert judge.score(asked("a"), step=1).each[0].value == 0.9
    assert judge.score(asked("b"), step=2).each[0].value == 0.9
    assert ["temperature" in body for body in server.asked] == [True, False, False]


def test_an_answer_of_another_shape_is_refused_with_the_shape_that_was_expected(server: Server, a_judge: Judge) -> None:
    server.replies = [{"completion": "8"}]
    with pytest.raises(UserFailure, match=r'answered {"completion": "8"}; expected {"choices"'):
        a_judge().score(asked("a"), step=1)


def test_the_judge_of_a_spec_takes_its_key_from_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k-9")
    server.replies = [says("4")]
    judge = {"base_url": server.url, "model": "m", "prompt": "{completion}", "key_name": "JUDGE_KEY", "scale": 5}
    assert scores_of({"entry": "judge", "judge": judge}, asked("a"), tmp_path).values == [0.8]
    assert server.headers[0]["Authorization"] == "Bearer k-9"
    assert (tmp_path / "judge" / "reward.jsonl").is_file()


# --- in a run ----------------------------------------------------------------------------------------------------------


def test_a_run_that_broke_off_asks_the_judge_nothing_twice_and_logs_every_step_once(
    server: Server, a_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    """Every answer is another one, so a question that is asked again would change the score of what was said before."""
    moods = itertools.cycle("02468")
    server.replies = [lambda body: says(next(moods))]
    judge = {"base_url": server.url, "model": "m", "prompt": "{prompt} {completion}"}
    parts = {"judge": {"entry": "judge", "judge": judge}, "length": {"entry": "rewards:length", "weight": 0.01}}
    algorithm = {"type": "grpo", "batch_size": 8, "group_size": 4, "max_completion_tokens": 4, "epochs": 4}
    box = a_box(algorithm=algorithm, rows=rows(4), reward={"entry": None, "parts": parts},
                spec={"checkpoint": {"every_steps": 2}})  # fmt: skip

    def breaks_at_5() -> bool:
        if 5 in box.steps and len(box.steps) < 6:
            raise RuntimeError("the machine is gone")
        return False

    assert box.work(stop=breaks_at_5) == 1
    folder = box.tree.checkpoints / "rollouts"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert box.work() == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert box.steps == [1, 2, 3, 4, 5, 5, 6, 7, 8]  # from checkpoint 4
    assert sorted(after) == [f"step-{step}.jsonl" for step in range(1, 9)]
    assert {name: after[name] for name in before} == before
    assert [len(body.splitlines()) for body in after.values()] == [8] * 8
    questions = [body["messages"][0]["content"] for body in server.asked]
    assert len(questions) == len(set(questions))
    line = json.loads(after["step-8.jsonl"].splitlines()[0])
    assert line["reward"] == pytest.approx(line["components"]["judge"] + 0.01 * line["components"]["length"])
    assert {"reward/judge", "reward/length"} <= set(box.of("metrics")[-1])
