"""Whole runs over environments of several turns, on the tiniest model."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.spec import ModelSpec
from training_container.engine import Completion, Engine, Example, Sampling
from training_container.engine.parallel import World
from training_container.environments.play import Stage, play
from training_container.environments.pool import Environments
from training_container.environments.transcript import Scribe
from training_container.rewards.functions import RESERVED, RESERVED_PREFIXES

Box = Callable[..., Any]
SETTINGS = {
    "type": "multi_turn", "batch_size": 16, "group_size": 4, "max_completion_tokens": 2, "max_length": 32,
    "max_train_steps": 4, "epochs": 99,
}  # fmt: skip
GAMES = """
import random, time

class Next:
    \"\"\"Say the digit after the one you are shown; `noise` draws the second one by chance.\"\"\"

    def __init__(self, noise=True):
        self.noise = noise

    def reset(self, prompt, digit):
        self.turn, self.digit = 0, digit
        return digit

    def step(self, action):
        right = float(action[:1] == "120"[int(self.digit)])
        self.turn += 1
        self.digit = random.choice("012") if self.noise else "1"
        return self.digit, right / 2, self.turn == 2, {"right": right}

class Unpaid(Next):
    def step(self, action):
        return "1", None, True

class Hangs(Next):
    def step(self, action):
        time.sleep(60)

class Degenerate:
    def __init__(self, first="'0'", then="'1'", reward="0.5", done="False"):
        self.first, self.then, self.reward, self.done = eval(first), eval(then), eval(reward), eval(done)

    def reset(self, digit):
        return self.first

    def step(self, action):
        return self.then, self.reward, self.done

class NoReset(Next):
    def reset(self, digit):
        raise KeyError("no game today")

class Shop:
    def reset(self, item, **row):
        self.bought = ""
        return f" {item}"

    def buy(self, name: str) -> str:
        \"\"\"Buy it.\"\"\"
        self.bought = name
        return "ok"

    def get_reward(self):
        return 1.0 if self.bought == "owl" else 0.0

def long_transcript(completions, completion_ids, digit, **kw):
    assert all(isinstance(completion, str) for completion in completions)
    return [0.1 * len(ids) for ids in completion_ids]
"""


def digit_rows(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    chance = random.Random(seed)
    return [{"prompt": "say ", "digit": chance.choice("012")} for _ in range(count)]


@pytest.fixture
def a_game(a_box: Box) -> Box:
    """A box that plays `game`: `a_game("Next", algorithm={...}, options={...})`."""

    def make(game: str = "Next", *, algorithm: Any = None, options: Any = None, **changes: Any) -> Any:
        asked = {"entry": f"games:{game}", "max_steps": 3, "options": options or {}} | changes.pop("environment", {})
        spec = {"environment": asked} | changes.pop("spec", {})
        rows = changes.pop("rows", None) or digit_rows(16)
        return a_box(algorithm=SETTINGS | (algorithm or {}), spec=spec, code={"games.py": GAMES}, rows=rows, **changes)

    return make


def test_a_model_learns_a_game_of_two_turns_and_both_evaluations_show_it(a_game: Box) -> None:
    learning = {"learning_rate": 3e-3, "max_train_steps": 60, "batch_size": 32, "max_completion_tokens": 1}
    box = a_game(algorithm=learning, options={"noise": False}, eval_rows=digit_rows(8, seed=1))
    assert box.work() == 0
    metrics = box.of("metrics")
    before, after = box.of("eval")
    assert metrics[0]["reward"] < 0.5
    assert after["eval_reward"] > before["eval_reward"] + 0.3
    assert (metrics[-1]["turns"], after["eval_turns"]) == (2.0, 2.0)
    assert {name for name in metrics[0] if not name.startswith(RESERVED_PREFIXES)} <= RESERVED
    assert metrics[-1]["environment_right"] == pytest.approx(2 * metrics[-1]["reward"], abs=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_stopped_at_any_step_goes_on_to_the_same_bits_the_environments_chance_included(
    a_game: Box, minibatches: int
) -> None:
    asked = {"minibatches": minibatches, "batch_size": 8, "learning_rate": 1e-3}
    whole = a_game(name="whole", algorithm=asked)
    assert whole.work() == 0
    assert len({event["reward"] for event in whole.of("metrics")}) > 1
    for step in (1, 3) if minibatches == 1 else (1, 2):
        box = a_game(name=f"stopped-{step}", algorithm=asked)
        assert box.work(stop=lambda step=step, box=box: box.steps[-1:] == [step]) == 143
        assert box.work() == 0
        assert [event["loss"] for event in box.of("metrics")] == [event["loss"] for event in whole.of("metrics")]
        assert box.weights_sha256 == whole.weights_sha256


KILLS = """

class Kills(Next):
    \"\"\"Kills the training worker, once, in the middle of its third rollout.\"\"\"

    def step(self, action):
        import os, signal
        from pathlib import Path

        mark, begun = Path(os.environ["MARK"]), Path(os.environ["MARK"] + ".begun")
        with begun.open("a") as file:
            file.write(".")
        if os.environ["KILL"] == "1" and len(begun.read_text()) > 40 and not mark.exists():
            mark.touch()
            worker = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(worker, signal.SIGKILL)
        return super().step(action)
"""


def test_a_worker_killed_in_the_middle_of_an_episode_gives_the_same_weights_to_the_bit(
    a_game: Box, tmp_path: Path
) -> None:
    calm, killed = (
        a_game("Kills", name=name, algorithm={"learning_rate": 1e-3, "batch_size": 8}) for name in ("calm", "killed")
    )
    for box, kill in ((calm, "0"), (killed, "1")):
        (box.tree.channel("code") / "games.py").write_text(GAMES + KILLS, encoding="utf-8")
        box.environment = {"MARK": str(tmp_path / f"mark-{kill}"), "KILL": kill}
    assert calm.work() == 0
    done = killed.supervise()
    assert done.returncode == 0, done.stderr
    (restart,) = killed.progress["restarts"]
    assert restart["cause"] == "killed by signal 9"
    assert killed.weights_sha256 == calm.weights_sha256


def test_two_processes_play_the_episodes_of_one_and_train_the_same(a_game: Box) -> None:
    short = {"batch_size": 8, "max_train_steps": 2}
    one, two = (a_game(name=f"of-{count}", algorithm=short, spec={"compute": {"processes": count}}) for count in (1, 2))
    assert one.work() == 0
    done = two.supervise()
    assert done.returncode == 0, done.stderr
    for alone, together in zip(one.of("metrics"), two.of("metrics"), strict=True):
        assert together["reward"] == alone["reward"]
        assert together["loss"] == pytest.approx(alone["loss"], abs=1e-5)


@pytest.fixture
def a_stage(tmp_path: Any) -> Any:
    """A stage on a model of its own: `a_stage("Next", max_steps=3)`."""
    opened: list[Environments] = []
    (tmp_path / "games.py").write_text(GAMES, encoding="utf-8")

    def make(game: str, *, max_steps: int = 3, room: int = 64, **options: Any) -> Stage:
        engine = Engine.build(
            ModelSpec(arch="Transformer"), source="", texts=["say 012"], seed=0, device=torch.device("cpu")
        )
        environments = Environments(f"games:{game}", tmp_path, options=options, time_limit_s=20)
        opened.append(environments)
        environments.open()
        return Stage(engine, Scribe(engine.tokenizer, engine.stop_tokens), environments, max_steps, room)

    yield make
    for environments in opened:
        environments.close()


ROWS = [Row(values, "train.jsonl", line) for line, values in enumerate(digit_rows(4), start=1)]


def test_every_sampled_token_has_the_trainers_log_probability_in_its_own_context(a_stage: Any) -> None:
    stage = a_stage("Next")
    transcripts = play(stage, ROWS, [1, 2, 3, 4], Sampling(3), group_size=2)
    examples = [Example(each.tokens, each.sampled) for each in transcripts]
    for trained, each in zip(stage.engine.forward(examples), transcripts, strict=True):
        assert each.turns == 2
        assert trained == pytest.approx(each.logprobs, abs=1e-5)


def test_episodes_of_a_group_meet_the_same_chance_and_other_groups_another(a_stage: Any) -> None:
    rows = [Row({"prompt": "say ", "digit": "0"}, "train.jsonl", 1)] * 12
    stage = a_stage("Next", max_steps=3)
    transcripts = play(stage, rows, list(range(12)), Sampling(1), group_size=2)
    shown = [each.tokens[6] for each in transcripts]  # after "say 0" and one sampled token
    assert shown[::2] == shown[1::2]
    assert len(set(shown)) > 1


def test_an_episode_without_room_for_the_next_turn_ends_as_truncated(a_stage: Any) -> None:
    transcripts = play(a_stage("Next", room=6), ROWS, [1, 2, 3, 4], Sampling(4))
    assert [(each.turns, each.finished) for each in transcripts] == [(1, False)] * 4
    assert all(len(each.tokens) <= 10 for each in transcripts)
    (none, *_) = play(a_stage("Next", room=4), ROWS, [1, 2, 3, 4], Sampling(4))
    assert (none.turns, none.finished, none.total) == (0, False, None)


def test_max_steps_1_makes_one_turn_of_every_episode(a_stage: Any) -> None:
    assert [each.turns for each in play(a_stage("Next", max_steps=1), ROWS, [0] * 4, Sampling(2))] == [1] * 4


HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>use <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_reach_the_template_and_a_turn_without_a_call_ends_the_episode(
    a_game: Box, a_model_dir: Callable[..., Any]
) -> None:
    chat = [{"prompt": [{"role": "user", "content": "Buy"}], "item": "owl"}] * 8
    asked = {"batch_size": 4, "group_size": 2, "max_train_steps": 2, "max_completion_tokens": 4, "max_length": 1024}
    box = a_game("Shop", algorithm=asked, rows=chat, model={"base": "tests/tiny", "rank": 4, "alpha": 8})
    a_model_dir(box.tree.channel("model"), chat_template=HERMES)
    assert box.work() == 0
    first = box.of("metrics")[0]
    assert (first["reward"], first["turns"], first["environment_tool_calls"]) == (0.0, 1.0, 0.0)


class Scripted:
    """An engine that says what it was given to say, turn by turn, and keeps the contexts it was shown."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self.tokenizer, self.turns, self.world = tokenizer, iter(turns), World()
        self.shown: list[str] = []

    def sample(self, prompts: Any, sampling: Sampling, *, group_size: int = 1) -> Any:
        ids = [*self.tokenizer(next(self.turns))["input_ids"], self.tokenizer.eos_token_id]
        self.shown += [self.tokenizer.decode(prompt) for prompt in prompts]
        return [[Completion(ids, [0.0] * len(ids), True)] for _ in prompts]


def test_an_episode_with_tools_reads_as_the_template_would_have_written_it(
    a_model_dir: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "games.py").write_text(GAMES, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(a_model_dir(chat_template=HERMES))
    call = '<tool_call>{"name": "buy", "arguments": {"name": "owl"}}</tool_call>'
    engine: Any = Scripted(tokenizer, [call, "Done."])
    environments = Environments("games:Shop", tmp_path, options={}, time_limit_s=20)
    stage = Stage(engine, Scribe(tokenizer, [tokenizer.eos_token_id]), environments, max_steps=5, room=2000)
    row = Row({"prompt": [{"role": "user", "content": "Buy"}], "item": "owl"}, "train.jsonl", 1)
    environments.open()
    try:
        (transcript,) = play(stage, [row], [0], Sampling(9))
    finally:
        environments.close()
    assert (transcript.total, transcript.turns, transcript.metrics) == (1.0, 2, {"tool_calls": 1, "tool_errors": 0})
    assert transcript.messages == [
        {"role": "user", "content": "Buy owl"},
        {"role": "assistant", "content": call},
        {"role": "tool", "name": "buy", "content": "ok"},
        {"role": "assistant", "content": "Done."},
    ]
    whole = tokenizer.apply_chat_template(transcript.messages, tools=transcript.tools, tokenize=False)
    assert tokenizer.decode(transcript.tokens) == whole
    assert engine.shown[0].endswith("<user>Buy owl<eos><assistant>")


def test_a_reward_function_scores_whole_episodes_beside_the_environment(a_game: Box) -> None:
    box = a_game(reward={"entry": "games:long_transcript"})
    assert box.work() == 0
    box_of_environment = a_game(name="alone")
    assert box_of_environment.work() == 0
    both, alone = (each.of("metrics")[0] for each in (box, box_of_environment))
    # The first rollout is the same; an episode has 2 turns of at most 2 tokens and one observation of 1 between them.
    assert both["turns"] == alone["turns"] == 2
    assert both["reward"] - alone["reward"] == pytest.approx(0.1 * (both["completion_tokens"] + 1), abs=1e-6)


def test_a_users_loss_is_taken_in_place_of_the_recipes(a_game: Box) -> None:
    source = GAMES + "\ndef mine(logprobs, inputs):\n    return logprobs.sum() * 0, {'rows': inputs.rows}\n"
    box = a_game(spec={"loss": {"entry": "games:mine"}})
    (box.tree.channel("code") / "games.py").write_text(source, encoding="utf-8")
    assert box.work() == 0
    assert {event["loss"] for event in box.of("metrics")} == {0.0}
    assert box.of("metrics")[0]["rows"] == 16


def test_the_game_of_the_docs_is_played(a_game: Box) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text("utf-8")
    (source,) = re.findall(r"```python\n# games\.py\n(.*?)```", page, re.DOTALL)
    box = a_game("Guess", rows=[{"prompt": "0123456789"}] * 8, options={"highest": 5}, algorithm={"max_length": 128})
    (box.tree.channel("code") / "games.py").write_text(source, encoding="utf-8")
    assert box.work() == 0
    assert 1 <= box.of("metrics")[0]["turns"] <= 3


MESSAGE = "[{'role': 'user', 'content': 'x'}]"


def odd(**options: str) -> dict[str, Any]:
    return {"game": "Degenerate", "options": options}


@pytest.mark.parametrize(
    ("options", "reward", "turns"),
    [
        ({"first": "None"}, 1.5, 3),  # endless: as many turns as there may be
        ({"first": "[]"}, 1.5, 3),
        ({"then": "''"}, 1.5, 3),
        ({"done": "None"}, 1.5, 3),
        ({"then": "[]", "done": "True"}, 0.5, 1),
        ({"reward": "1e300", "done": "True"}, 1e300, 1),
        ({"reward": "1e308"}, None, 3),  # no float holds their sum
        ({"reward": "float('inf')"}, None, 3),
    ],
)
def test_a_degenerate_game_is_played_to_its_end(options: Any, reward: Any, turns: int, a_game: Box) -> None:
    short = {"max_train_steps": 1, "batch_size": 4}
    box = a_game(**odd(**options), algorithm=short, rows=[{"prompt": "say ", "digit": "0"}] * 4)
    assert box.work() == 0
    (metrics,) = box.of("metrics")
    assert (metrics["reward"], metrics["turns"]) == (reward, turns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"game": "Unpaid"}, "games:Unpaid gave no reward for any turn or episode, and the spec has no reward"),
        ({"game": "Nowhere"}, "The environment games:Nowhere: games has no 'Nowhere'"),
        ({"options": {"size": 3}}, "it takes no 'size', which environment.options gives"),
        ({"algorithm": {"max_length": 9, "max_completion_tokens": 7}}, "Every prompt is longer than the 2 tokens"),
        ({"game": "NoReset"}, "The environment games:NoReset: KeyError: 'no game today'"),
        (
            odd(first="'x' * 3_000_000"),
            "No episode had room for a turn: what the model is shown first has more than the 30",
        ),
        (odd(first=MESSAGE), "is messages, while the rows are plain text; give a text"),
        (odd(then=MESSAGE), "is messages, while the rows are plain text; give a text"),
        (odd(then="[]"), "The observation of a turn after which the episode goes on is nothing; give a text"),
        (odd(then="None"), "The observation of a turn after which the episode goes on is nothing; give a text"),
        (
            odd(done="'False'"),
            "step gave a str ('False') where it says whether the episode is done; give True or False",
        ),
        (odd(done="{'info': 1}"), "step gave a dict ({'info': 1}) where it says whether the episode is done"),
        (
            {"game": "Hangs", "environment": {"time_limit_s": 0.3}},
            "No environment answered within environment.time_limit_s in 3 rollouts in a row",
        ),
    ],
)
def test_what_cannot_be_played_ends_the_run_as_the_users(a_game: Box, changes: Any, message: str) -> None:
    box = a_game(**changes)
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert message in box.failure["message"]
