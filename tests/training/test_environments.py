"""Environments of every form in processes of their own, and episodes as token ids."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from microtuning_core.domain.datasets import Row
from training_container.engine import Completion
from training_container.environments.pool import Environments, episode_seed
from training_container.environments.protocol import Action, Turn
from training_container.environments.tools import schema_of
from training_container.environments.transcript import Scribe, Transcript
from training_container.failures import UserFailure

CASES = Path(__file__).parents[1] / "cases"

SOURCE = '''
import os, random, sys, time

class Guess:
    """Between 1 and `highest`; told higher or lower."""

    def __init__(self, highest=9):
        self.highest = highest

    def reset(self, prompt):
        self.secret = random.randint(1, self.highest)
        return f"{prompt} 1 to {self.highest}?"

    def step(self, action):
        if action == "what":
            return str(self.secret), 0.0, False
        guess = int(action)
        right = guess == self.secret
        return "higher" if guess < self.secret else "lower", float(right), right, {"guesses": 1, "note": "text"}

class Gymnasium(Guess):
    def reset(self):
        return "go", {"info": 1}

    def step(self, action):
        return "on", 0.5, action == "end", action == "cut", {}

class Slow:
    def reset(self, **row):
        return "wait"

    def step(self, action):
        time.sleep(60 if action == "hang" else 0)
        return "on", 1.0, False

class Broken:
    def reset(self):
        return "x"

    def step(self, action):
        raise ValueError("it broke")

class Wrong:
    def reset(self):
        return "x"

    def step(self, action):
        return {"reward": 1}

class Nothing:
    pass

class Shop:
    def reset(self, item, **row):
        self.item, self.bought = item, False
        return f" Buy {item}."

    def buy(self, name: str, count: int = 1) -> str:
        """Buy something.

        Args:
            name: What to buy.
            count: How many.
        """
        self.bought = name == self.item
        return f"bought {count} {name}"

    async def get_reward(self):
        return 1.0 if self.bought else 0.0

class Odd:
    """Says, at one place, what JSON cannot hold, or not exactly."""

    def __init__(self, what):
        holds_itself = {}
        holds_itself["me"] = holds_itself
        deep = []
        for _ in range(5_000):
            deep = [deep]
        class Unshown:
            def __repr__(self):
                raise RuntimeError("no")
        if what in ("float32", "array", "tensor"):
            self.value = self.of_numpy_or_torch(what)
        else:
            self.value = {"set": {1}, "bytes": b"x", "nan": float("nan"), "infinity": float("inf"), "key": {(1, 2): "x"},
                          "number as key": {1: "x"}, "cycle": holds_itself, "deep": deep, "object": Unshown(),
                          "huge": 10 ** 5_000}[what]

    def of_numpy_or_torch(self, what):
        import numpy
        if what == "tensor":
            import torch
            return torch.ones(2)
        return numpy.float32(0.5) if what == "float32" else numpy.arange(3)

    def reset(self, at):
        return self.said() if at == "reset" else "go"

    def step(self, action):
        return self.said(), 1.0, False

    def said(self):
        return [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "of": self.value}]}]

class OddTool(Odd):
    step = None

    def look(self):
        return self.value

class OddEnum(Shop):
    def buy(self, name: __import__("typing").Literal[b"owl"]):
        return "x"

class OddInfo(Odd):
    def step(self, action):
        return "on", 1.0, False, {"what": self.value, "fine": 2}

class OddIds(Odd):
    def step(self, action):
        return [1, self.value], 1.0, False

class Forks:
    def reset(self, how):
        self.how = how
        return str(fork(how))

    def step(self, action):
        return str(fork(self.how)), 1.0, False

def fork(how):
    if (pid := os.fork()) == 0:
        if how == "raise":
            raise ValueError("the child")
        if how == "exit":
            sys.exit(3)
        return 9
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

class Result:
    def __init__(self, reward, episode_done, next_observation):
        self.reward, self.episode_done, self.next_observation = reward, episode_done, next_observation
        self.metrics = {"k": 2}

class Cookbook:
    def __init__(self, start):
        self.ids = list(start)

    async def initial_observation(self):
        return self.ids, "a stop condition"

    async def step(self, action):
        self.ids = self.ids + list(action) + [7]
        return Result(0.25, len(self.ids) > 6, self.ids)
'''


@pytest.fixture
def environments(tmp_path: Path) -> Iterator[Callable[..., Environments]]:
    """Starts one: `environments("Guess", highest=5)`."""
    (tmp_path / "games.py").write_text(SOURCE, encoding="utf-8")
    started: list[Environments] = []

    def start(name: str, *, time_limit_s: float = 20, **options: Any) -> Environments:
        pool = Environments(f"games:{name}", tmp_path, options=options, time_limit_s=time_limit_s)
        started.append(pool)
        pool.open()
        return pool

    yield start
    for pool in started:
        pool.close()


def said(text: str, ids: list[int] | None = None) -> Action:
    return Action(text=text, raw=text, ids=ids or [])


def test_an_episode_of_the_plain_form(environments: Callable[..., Environments]) -> None:
    pool = environments("Guess", highest=5)
    assert pool.begin([{"prompt": "Guess", "other": 1}], [3])[0].observation == "Guess 1 to 5?"
    secret = pool.act({0: said("what")})[0].observation
    wrong = "5" if secret == "1" else "1"
    turn = pool.act({0: said(wrong)})[0]
    assert (turn.observation, turn.reward, turn.done) == ("lower" if secret == "1" else "higher", 0.0, False)
    turn = pool.act({0: said(str(secret))})[0]
    assert (turn.observation, turn.reward, turn.done, turn.metrics) == (None, 1.0, True, {"guesses": 1})
    assert pool.grade([0]) == {0: None}


def test_chance_follows_from_the_seed_of_the_episode_alone(environments: Callable[..., Environments]) -> None:
    def secrets(pool: Environments, seeds: list[int]) -> list[Any]:
        pool.begin([{"prompt": ""}] * len(seeds), seeds)
        answers = pool.act({index: said("what") for index in range(len(seeds))})
        return [answers[index].observation for index in range(len(seeds))]

    first, again = environments("Guess", highest=10**6), environments("Guess", highest=10**6)
    alone = secrets(first, [5, 6, 5])
    assert alone[0] == alone[2] != alone[1]
    secrets(again, [1, 2])
    assert secrets(again, [6, 5]) == [alone[1], alone[0]]
    assert episode_seed(0, "3/1") != episode_seed(0, "3/2") != episode_seed(1, "3/2")


def test_gymnasiums_five_are_taken(environments: Callable[..., Environments]) -> None:
    pool = environments("Gymnasium")
    assert pool.begin([{}, {}], [0, 0])[1].observation == "go"
    turns = pool.act({0: said("go on"), 1: said("cut")})
    assert [(turns[index].reward, turns[index].done) for index in (0, 1)] == [(0.5, False), (0.5, True)]


def test_one_that_hangs_is_killed_and_the_others_go_on(environments: Callable[..., Environments]) -> None:
    pool = environments("Slow", time_limit_s=1.0)
    pool.begin([{}, {}, {}], [0, 0, 0])
    began_s = time.monotonic()
    turns = pool.act({0: said("go"), 1: said("hang"), 2: said("go")})
    assert sorted(turns) == [0, 2]
    assert time.monotonic() - began_s < 5
    assert sorted(pool.begin([{}, {}, {}], [0, 0, 0])) == [0, 1, 2]  # its place is taken by a new one


def test_no_process_is_left_behind(environments: Callable[..., Environments]) -> None:
    pool = environments("Slow")
    pool.begin([{}] * 3, [0] * 3)
    pids = [seat.pid for seat in pool._seats.values()]
    pool.close()
    ends_at_s = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < ends_at_s:
        time.sleep(0.01)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("how", "status"), [("return", "0"), ("raise", "1"), ("exit", "3")])
def test_a_child_that_comes_out_of_an_environment_answers_nothing(
    how: str, status: str, environments: Callable[..., Environments]
) -> None:
    pool = environments("Forks")
    assert pool.begin([{"how": how}], [0])[0].observation == status
    assert [pool.act({0: said("x")})[0].observation for _ in range(3)] == [status] * 3


@pytest.mark.parametrize(
    ("name", "message", "has_line"),
    [
        ("Broken", "The environment games:Broken: ValueError: it broke", True),
        ("Wrong", r"The environment games:Wrong: step gave a dict \(.*\); give observation, reward, done", False),
        ("Nothing", "a Nothing is no environment: it needs reset and step", False),
    ],
)
def test_what_goes_wrong_in_one_is_the_users(
    environments: Callable[..., Environments], name: str, message: str, has_line: bool
) -> None:
    pool = environments(name)
    with pytest.raises(UserFailure, match=message) as caught:
        pool.begin([{}], [0])
        pool.act({0: said("x")})
    assert (caught.value.line == 1 + SOURCE[: SOURCE.index('raise ValueError("it')].count("\n")) == has_line


ODD = {
    "float32": r"a float32 \(np.float32\(0.5\)\)", "array": r"a ndarray \(array\(\[0, 1, 2\]\)\)", "tensor": "a Tensor",
    "set": r"a set \(\{1\}\)", "bytes": "a bytes", "nan": r"a float \(nan\)", "infinity": r"a float \(inf\)",
    "key": r"a tuple \(\(1, 2\)\) as a key", "number as key": r"a int \(1\) as a key",
    "cycle": "more than 64 lists and dicts within each other", "deep": "more than 64 lists and dicts within each other",
    "object": r"a Unshown \(its repr raised RuntimeError\)", "huge": r"a int \(",
}  # fmt: skip


@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize("what", ODD)
def test_messages_that_json_does_not_hold_as_they_are_are_refused_by_their_place(
    what: str, at: str, environments: Callable[..., Environments]
) -> None:
    pool = environments("Odd", what=what)
    with pytest.raises(UserFailure, match=f"The environment games:Odd: {at} gave messages with {ODD[what]}") as caught:
        pool.begin([{"at": at}], [0])
        pool.act({0: said("x")})
    assert what in ("cycle", "deep") or " at [1]['content'][0]['of']" in str(caught.value)


@pytest.mark.parametrize("what", ["key", "cycle", "deep", "huge"])
def test_a_tool_whose_answer_cannot_be_written_out_is_named(
    what: str, environments: Callable[..., Environments]
) -> None:
    pool = environments("OddTool", what=what)
    pool.begin([{"at": ""}], [0])
    with pytest.raises(
        UserFailure, match=r"The environment games:OddTool: the tool look gave a \w+ that cannot be written"
    ):
        pool.act({0: said('<tool_call>{"name": "look", "arguments": {}}</tool_call>')})


def test_the_type_of_a_tools_argument_that_no_schema_can_say_is_refused(
    environments: Callable[..., Environments],
) -> None:
    with pytest.raises(UserFailure, match=r"the tools' types hold a bytes \(b'owl'\) at \[0\]\['function'\]"):
        environments("OddEnum").begin([{"item": "owl"}], [0])


@pytest.mark.parametrize("what", ODD)
def test_an_info_dict_may_hold_anything_and_its_numbers_are_metrics(
    what: str, environments: Callable[..., Environments]
) -> None:
    pool = environments("OddInfo", what=what)
    pool.begin([{"at": ""}], [0])
    assert pool.act({0: said("x")})[0].metrics == {"fine": 2.0}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_token_id_is_refused(what: str, environments: Callable[..., Environments]) -> None:
    pool = environments("OddIds", what=what)
    pool.begin([{"at": ""}], [0])
    with pytest.raises(UserFailure, match="The environment games:OddIds: step gave"):
        pool.act({0: said("x")})


def test_an_option_it_does_not_take_and_a_column_that_is_missing_are_named(
    environments: Callable[..., Environments],
) -> None:
    with pytest.raises(UserFailure, match=r"it takes no 'size', which environment.options gives"):
        environments("Guess", size=3).begin([{"prompt": ""}], [0])
    with pytest.raises(UserFailure, match="it asks for 'item', and the rows have thing"):
        environments("Shop").begin([{"thing": 1}], [0])


def test_tools_are_called_as_the_model_wrote_it_and_the_whole_is_graded(
    environments: Callable[..., Environments],
) -> None:
    pool = environments("Shop")
    first = pool.begin([{"item": "owl"}], [0])[0]
    assert first.observation == " Buy owl."
    (tool,) = first.tools
    assert tool["function"] == {
        "name": "buy", "description": "Buy something.",
        "parameters": {
            "type": "object", "required": ["name"],
            "properties": {
                "name": {"type": "string", "description": "What to buy."},
                "count": {"type": "integer", "description": "How many."},
            },
        },
    }  # fmt: skip
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    texts = call % ("sell", "{}") + call % ("buy", '{"name": "owl", "count": 2}')
    turn = pool.act({0: said(texts)})[0]
    assert turn.observation == [
        {
            "role": "tool",
            "name": "sell",
            "content": '{"error": "LookupError: there is no tool \'sell\'; there are buy"}',
        },
        {"role": "tool", "name": "buy", "content": "bought 2 owl"},
    ]
    assert (turn.reward, turn.done, turn.metrics) == (None, False, {"tool_calls": 2, "tool_errors": 1})
    assert pool.act({0: said("Done.")})[0].done
    assert pool.grade([0]) == {0: 1.0}


def test_types_of_arguments_become_json_types() -> None:
    def tool(a: list[int], b: float | None = None, c: bool = True, d: dict[str, int] | None = None) -> None:
        """Nothing."""

    properties = schema_of("tool", tool)["function"]["parameters"]["properties"]
    assert properties == {
        "a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "number"}, "c": {"type": "boolean"},
        "d": {"type": "object"},
    }  # fmt: skip


def test_the_cookbooks_form_gives_whole_contexts_and_takes_ids(environments: Callable[..., Environments]) -> None:
    pool = environments("Cookbook")
    first = pool.begin([{"start": [1, 2]}], [0])[0]
    assert (first.observation, first.whole) == ([1, 2], True)
    turn = pool.act({0: said("", [5])})[0]
    assert (turn.observation, turn.reward, turn.done, turn.metrics) == ([1, 2, 5, 7], 0.25, False, {"k": 2})
    assert pool.act({0: said("", [5, 6])})[0].done


# --- transcripts -----------------------------------------------------------------------------------------------------

CASE = json.loads((CASES / "c28_multiturn.json").read_text("utf-8"))
# Drops the thoughts of every turn but the last, as many templates do.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}<sys>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] }}<end>\n"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}<end>\n"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def toy() -> Any:
    """A tokenizer of whole words, as the case has them."""
    words = dict.fromkeys([word for _, word in CASE["tokens"]])
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join(sorted((w.replace(".", r"\.").replace("?", r"\?") for w in words), key=len, reverse=True))
    from tokenizers import Regex, decoders

    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def a_completion(tokenizer: Any, words: list[str], *, finished: bool = True) -> Completion:
    ids = tokenizer.convert_tokens_to_ids(words)
    return Completion(ids, [-0.5] * len(ids), finished)


PROMPT = [{"role": "system", "content": "You play."}, {"role": "user", "content": "move?"}]
WALL = Turn([{"role": "tool", "content": "wall"}])


def begun(tokenizer: Any, prompt: Any = PROMPT, observation: Any = None) -> tuple[Scribe, Transcript]:
    scribe = Scribe(tokenizer, [tokenizer.eos_token_id])
    return scribe, scribe.begin(Row({"prompt": prompt}, "train.jsonl", 1), Turn(observation))


def test_the_mask_is_1_exactly_on_what_was_sampled(toy: Any) -> None:
    scribe, transcript = begun(toy)
    transcript.say(a_completion(toy, ["<think>", "left", "</think>", "L", "<end>"]), "L")
    scribe.observe(transcript, WALL, room=99)
    transcript.say(a_completion(toy, ["R", "<end>"]), "L")
    assert toy.convert_ids_to_tokens(transcript.tokens) == [word for _, word in CASE["tokens"]]
    assert [int(flag) for flag in transcript.sampled] == CASE["want_mask"]
    assert (transcript.sampled_tokens, len(transcript.logprobs)) == (7, 7)


def test_sampled_ids_stay_although_their_text_would_give_others(toy: Any) -> None:
    # "You play." split into two ids that the tokenizer itself never gives: decoded and read again it would be one.
    scribe, transcript = begun(toy)
    odd = [toy.unk_token_id, toy.convert_tokens_to_ids("L"), toy.eos_token_id]
    transcript.say(Completion(odd, [-1.0] * 3, True), "?")
    scribe.observe(transcript, WALL, room=99)
    assert transcript.tokens[transcript.prompt_tokens :][:3] == odd


def test_a_turn_that_hit_the_token_limit_gets_no_end_that_it_did_not_say(toy: Any) -> None:
    _, transcript = begun(toy)
    transcript.say(a_completion(toy, ["<think>", "left"], finished=False), "L")
    assert toy.convert_ids_to_tokens(transcript.tokens)[-2:] == ["<think>", "left"]
    assert not transcript.finished


def test_after_a_cut_turn_the_templates_own_end_stands_untrained_in_the_context(toy: Any) -> None:
    scribe, transcript = begun(toy)
    transcript.say(a_completion(toy, ["L"], finished=False), "L")
    scribe.observe(transcript, WALL, room=99)
    after = toy.convert_ids_to_tokens(transcript.tokens)[transcript.prompt_tokens :]
    assert after == ["L", "<end>", "\n", "<tool>", "wall", "<end>", "\n", "<assistant>"]
    assert transcript.sampled[transcript.prompt_tokens :] == [True] + [False] * 7


def test_the_first_observation_ends_the_users_message_and_a_later_one_is_a_message(toy: Any) -> None:
    scribe, transcript = begun(toy, observation="wall")
    transcript.say(a_completion(toy, ["L", "<end>"]), "L")
    scribe.observe(transcript, Turn("wall"), room=99)
    assert toy.convert_ids_to_tokens(transcript.tokens) == [
        "<sys>", "You play.", "<user>", "move?", "wall", "<assistant>", "L", "<end>", "\n", "<user>", "wall", "<assistant>",
    ]  # fmt: skip


def test_plain_rows_go_on_with_the_observation_alone(toy: Any) -> None:
    scribe, transcript = begun(toy, prompt="move?", observation="wall")
    transcript.say(a_completion(toy, ["L", "<end>"]), "L")
    scribe.observe(transcript, Turn("wall"), room=99)
    assert toy.convert_ids_to_tokens(transcript.tokens) == ["move?", "wall", "L", "<end>", "wall"]


def test_an_observation_that_leaves_no_room_ends_the_episode_as_truncated(toy: Any) -> None:
    scribe, transcript = begun(toy)
    transcript.say(a_completion(toy, ["L", "<end>"]), "L")
    before = list(transcript.tokens)
    scribe.observe(transcript, WALL, room=len(before) + 5)
    assert (transcript.tokens, transcript.done, transcript.finished) == (before, True, False)


def test_an_environment_that_rewrites_earlier_turns_is_refused(toy: Any) -> None:
    scribe = Scribe(toy, [toy.eos_token_id])
    transcript = scribe.begin(Row({}, "train.jsonl", 1), Turn([3, 4], whole=True))
    transcript.say(Completion([5, 6], [-1.0, -1.0], True), "")
    scribe.observe(transcript, Turn([3, 4, 5, 6, 7], whole=True), room=99)
    assert transcript.tokens == [3, 4, 5, 6, 7]
    transcript.say(Completion([8], [-1.0], True), "")
    with pytest.raises(UserFailure, match="does not begin with the 6 tokens of the episode so far"):
        scribe.observe(transcript, Turn([3, 4, 7, 8, 9], whole=True), room=99)


def test_tools_for_a_template_of_another_form_are_refused(toy: Any) -> None:
    with pytest.raises(UserFailure, match="does not write calls in <tool_call> tags"):
        Scribe(toy, [0]).begin(Row({"prompt": PROMPT}, "train.jsonl", 1), Turn(None, tools=[{"type": "function"}]))


def test_a_row_without_prompt_whose_reset_gives_nothing_is_named(toy: Any) -> None:
    toy.chat_template = None
    with pytest.raises(UserFailure, match=r"train\.jsonl, line 4 has no prompt, and reset gave no observation"):
        Scribe(toy, [0]).begin(Row({"level": 1}, "train.jsonl", 4), Turn(None))


@pytest.mark.parametrize("token", [999_999, -2])
def test_a_token_that_the_model_does_not_have_is_the_users(token: int, a_model_dir: Any) -> None:
    from transformers import AutoTokenizer

    from microtuning_core.domain.datasets import Row
    from training_container.environments.protocol import Turn
    from training_container.environments.transcript import Scribe
    from training_container.failures import UserFailure

    scribe = Scribe(AutoTokenizer.from_pretrained(a_model_dir()), stop_tokens=[0])
    with pytest.raises(UserFailure, match=f"holds the token {token}, and the model's tokenizer has the tokens 0 to"):
        scribe.begin(Row({"prompt": None}, "train.jsonl", 1), Turn(observation=[5, token]))


def test_a_first_observation_of_megabytes_ends_the_episode_without_being_read(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe, row = Scribe(toy, [toy.eos_token_id]), Row({"prompt": PROMPT}, "train.jsonl", 1)
    monkeypatch.setattr(Scribe, "_tokens", lambda *_: pytest.fail("it was read"))
    begun = scribe.begin(row, Turn("x" * 3_000_000), room=64)
    assert (begun.done, begun.finished, begun.tokens, begun.total) == (True, False, [], None)


def test_an_observation_of_megabytes_ends_the_episode_without_being_read(a_model_dir: Any) -> None:
    from transformers import AutoTokenizer

    from microtuning_core.domain.datasets import Row
    from training_container.environments.protocol import Turn
    from training_container.environments.transcript import Scribe

    tokenizer = AutoTokenizer.from_pretrained(a_model_dir())
    scribe = Scribe(tokenizer, stop_tokens=[0])
    transcript = scribe.begin(Row({"prompt": "1>"}, "train.jsonl", 1), Turn(observation=None))
    scribe.observe(transcript, Turn(observation="b" * 30_000_000), room=100)
    assert (transcript.done, transcript.finished) == (True, False)
