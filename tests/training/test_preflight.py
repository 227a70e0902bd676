"""fit() and `microtuning check SPEC` before a run, on a tiny model whose own saved tokenizer and template are asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from microtuning_core.domain.errors import RunWouldFail, SubmitRefused
from microtuning_core.domain.names import StackNames
from microtuning_sdk import RLTrainer, SFTTrainer, Stage, _fit, _preflight, cli
from microtuning_sdk.cli import _run
from training_container.preflight import __main__ as looked_at

TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ '\\n' }}{% endfor %}"
ASKING = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = TURNS + ASKING
# As some reasoning models do: what was thought is shown of the last message alone.
FORGETTING = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last %}[hm]{% endif %}{{ m['content'] }}{{ '\\n' }}{% endfor %}"
    + ASKING
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}" + ASKING
)
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
SAID = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(8)]
CODE = """
def right(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def blind(completions):
    return [0.5] * len(completions)

def broken(completions, answer):
    table = {}
    return [table[a] for a in answer]
"""


def a_chat(turns: int) -> dict[str, Any]:
    messages = [{"role": role, "content": f"{turn}"} for turn in range(turns) for role in ("user", "assistant")]
    return {"messages": messages}


@dataclass(frozen=True)
class Found:
    """One finding of `microtuning check --json`, and the rest of what it said."""

    status: int
    findings: list[dict[str, str]]
    said: str

    def of(self, about: str) -> list[tuple[str, str]]:
        return [(each["level"], each["found"]) for each in self.findings if each["about"] == about]

    def one(self, about: str, words: str) -> dict[str, str]:
        (finding,) = [each for each in self.findings if each["about"] == about and words in each["found"]]
        return finding


@pytest.fixture
def stage() -> Stage:
    """A stage that is nowhere: whatever would ask it fails."""
    return Stage(StackNames("local", "000000000000", "us-east-1"), boto3.Session(region_name="us-east-1"))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's part in this process, where torch is loaded already."""

    def asked(folder: Path) -> str:
        looked_at.main([str(folder)])
        return ""

    monkeypatch.setattr(_preflight, "_asked", asked)


@pytest.fixture
def a_check(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Found]:
    """`microtuning check` of a spec on the model in ./base; `a_check(rows, type="sft", max_length=8, reward={…})`."""

    def check(rows: list[Any], *, reward: dict[str, Any] | None = None, **algorithm: Any) -> Found:
        monkeypatch.setattr(_run, "connect", lambda _: stage)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "rewards.py").write_text(CODE)
        document = {
            "name": "checked", "model": {"base": "./base"}, "data": {"train": "rows.jsonl"},
            "algorithm": {"type": "sft", "batch_size": 4} | algorithm,
        }  # fmt: skip
        spec = tmp_path / "spec.json"
        spec.write_text(json.dumps(document | ({"reward": reward} if reward else {})))
        status = cli.main(["check", str(spec), "--json", "--stage", "local"])
        printed = capsys.readouterr()
        return Found(status, json.loads(printed.out)["findings"], printed.err)

    return check


def saved(folder: Path, change: Callable[[Any], None]) -> None:
    """The folder's tokenizer, changed and saved again."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    change(tokenizer)
    tokenizer.save_pretrained(folder)


def with_a_start_token(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )


# --- the tokenizer and its template ----------------------------------------------------------------------------------


def test_rows_are_counted_by_the_models_own_tokenizer(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir()
    found = a_check([*SAID, {"prompt": "10+1=", "completion": "11"}])
    # A token a character and one for the end: "1+1=" and "2", "10+1=" and "11".
    assert found.of("data.train") == [("ok", "9 rows: rows of 6 tokens (median), 8 at most; exact")]
    assert found.one("stage", "could not be asked for prices and past runs")["level"] == "warning"
    assert found.status == 0


@pytest.mark.usefixtures("at_once")
def test_messages_without_a_chat_template_would_end_the_run(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir()
    found = a_check([a_chat(1)])
    assert found.of("data.train") == [
        ("error", "the rows are messages, and the model's tokenizer has no chat template")
    ]
    assert found.status == 2
    assert "Give prompt and completion as text, or a model with a chat template" in found.said


@pytest.mark.usefixtures("at_once")
def test_a_template_without_generation_marks_is_named_and_its_turns_are_all_learned(
    a_check: Any, a_model_dir: Any
) -> None:
    a_model_dir(chat_template=PLAIN)
    finding = a_check([a_chat(1), a_chat(2), a_chat(3)]).one("data.train", "{% generation %}")
    assert finding["level"] == "note"
    assert finding["found"].startswith("2 rows have several assistant turns")


@pytest.mark.usefixtures("at_once")
def test_a_template_that_hides_where_the_labels_are_would_end_the_run(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir(chat_template=FORGETTING)
    found = a_check([a_chat(1), a_chat(2)])
    finding = found.one("data.train", "labels cannot be placed")
    assert finding["level"] == "error"
    assert "line 2: the chat template renders earlier messages differently" in finding["found"]
    assert finding["advice"] == "Give a chat template with {% generation %} marks, or a row an answer."
    assert found.status == 2


@pytest.mark.usefixtures("at_once")
def test_a_template_with_generation_marks_needs_no_word(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir(chat_template=MARKED)
    (only,) = a_check([a_chat(2), a_chat(3)]).of("data.train")
    assert only[0] == "ok"


@pytest.mark.usefixtures("at_once")
def test_padding_with_the_end_token_is_told_and_would_end_a_reward_model(a_check: Any, a_model_dir: Any) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.pad_token, tokenizer.unk_token = tokenizer.eos_token, None

    saved(a_model_dir(), change)
    found = a_check(SAID)
    assert found.one("data.train", "pads with its end token")["level"] == "note"
    assert found.status == 0
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    found = a_check(pairs, type="reward")
    assert found.one("model", "no token to pad with but the one that ends a text")["level"] == "error"
    assert found.status == 2


@pytest.mark.usefixtures("at_once")
def test_a_start_token_that_would_come_twice_is_told_by_line(a_check: Any, a_model_dir: Any) -> None:
    saved(a_model_dir(), with_a_start_token)
    found = a_check([*SAID, {"prompt": "<s>9+1=", "completion": "10"}])
    finding = found.one("data.train", "begin with '<s>', which the tokenizer adds as well")
    assert (finding["level"], finding["found"].partition(" rows")[0]) == ("note", "1")
    assert "rows.jsonl, line 9)" in finding["found"]
    # One start token in every row: 7 tokens, and 8 of the row with a longer answer.
    assert ("ok", "9 rows: rows of 7 tokens (median), 8 at most; exact") in found.of("data.train")


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_rows_over_the_limit_are_counted_with_the_share_of_labels_that_goes(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir()
    found = a_check([*SAID[:3], {"prompt": "12345=", "completion": "123456789"}], max_length=8)
    finding = found.one("data.train", "longer than max_length 8")
    # Labels: 3 x 2 and 10, of which 8 - 6 = 2 stay.
    assert finding["level"] == "warning"
    assert "1 rows (25.0%)" in finding["found"]
    assert "50.0% of what is to be learned" in finding["found"]
    assert "line 4, 16 tokens" in finding["found"]
    assert found.status == 0


@pytest.mark.usefixtures("at_once")
def test_labels_that_are_all_cut_away_would_end_the_run(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir()
    found = a_check([{"prompt": f"100000{number}+1=", "completion": "?"} for number in range(8)], max_length=8)
    finding = found.one("data.train", "keep nothing to learn")
    assert finding["level"] == "error"
    assert "8 rows (100.0%)" in finding["found"]
    assert found.status == 2


@pytest.mark.usefixtures("at_once")
def test_prompts_that_leave_no_room_for_a_completion_are_counted_in_the_models_tokens(
    a_check: Any, a_model_dir: Any
) -> None:
    a_model_dir()
    rows = [*PROMPTS, {"prompt": "123456789=", "answer": "?"}]
    found = a_check(
        rows, type="grpo", group_size=4, max_completion_tokens=4, max_length=12, reward={"entry": "rewards:right"}
    )
    finding = found.one("data.train", "leave no room for a completion")
    assert finding["level"] == "warning"
    assert "1 rows (11.1%)" in finding["found"]
    assert "a prompt may have 8 tokens" in finding["advice"]


# --- the reward ------------------------------------------------------------------------------------------------------


def graded(a_check: Any, entry: str) -> Found:
    found: Found = a_check(PROMPTS, type="grpo", group_size=4, max_completion_tokens=4, reward={"entry": entry})
    return found


@pytest.mark.usefixtures("at_once")
def test_check_ends_with_2_for_a_reward_that_raises_and_names_its_line(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir()
    found = graded(a_check, "rewards:broken")
    ((level, words),) = found.of("reward")
    assert (level, found.status) == ("error", 2)
    assert words == "fails on rows of the data (rewards.py, line 10): The reward rewards:broken: KeyError: '1'"
    assert "The run would fail: reward fails on rows of the data (rewards.py, line 10)" in found.said


@pytest.mark.usefixtures("at_once")
def test_check_warns_of_a_reward_that_says_the_same_for_everything(a_check: Any, a_model_dir: Any) -> None:
    a_model_dir()
    found = graded(a_check, "rewards:blind")
    assert found.of("reward") == [("warning", "gave 0.5 to right and wrong answers alike (8 tries)")]
    assert found.status == 0


@pytest.mark.usefixtures("at_once")
def test_rows_without_answers_are_tried_with_other_texts_and_nothing_is_said_of_right_and_wrong(
    a_check: Any, a_model_dir: Any
) -> None:
    a_model_dir()
    bare = [{"prompt": row["prompt"]} for row in PROMPTS]
    found = a_check(bare, type="grpo", group_size=4, max_completion_tokens=4, reward={"entry": "rewards:blind"})
    words = "gave 0.50 to 0.50 for 8 texts of ours: the rows hold no answer to try"
    assert found.of("reward") == [("ok", words)]


# --- fit() -----------------------------------------------------------------------------------------------------------


def test_fit_says_what_it_found_before_it_uploads_anything(
    stage: Stage, a_model_dir: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object) -> Any:
        raise SubmitRefused([])

    monkeypatch.setattr(_fit, "submit", refuses)
    trainer = SFTTrainer(model=a_model_dir(), stage=stage, max_length=8)
    with pytest.raises(SubmitRefused):
        trainer.fit([{"prompt": "1+1=", "completion": "two"}, {"prompt": "1+1=", "completion": "a pair"}])
    assert "! data.train  1 rows (50.0%) are longer than max_length 8 and are cut" in capsys.readouterr().err


@pytest.mark.usefixtures("at_once")
def test_fit_of_a_run_that_would_fail_never_reaches_the_upload(
    stage: Stage, a_model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(completions: list[str]) -> list[float]:
        raise ValueError("no score for you")

    monkeypatch.setattr(_fit, "submit", lambda *_: pytest.fail("it was uploaded"))
    with pytest.raises(RunWouldFail, match="no score for you"):
        RLTrainer(model=a_model_dir(), reward_func=broken, stage=stage).fit(PROMPTS)
