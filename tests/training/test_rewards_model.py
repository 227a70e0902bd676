"""A reward model as reward: the scores of the model itself, in the completions' order, and the run's chance untouched."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from microtuning_core.domain.algorithms import RewardSpec
from microtuning_core.domain.datasets import Row
from training_container.data import render_row
from training_container.failures import UserFailure
from training_container.metrics import EventLog
from training_container.rewards import Question, Scores, open_rewards
from training_container.rewards.model import ModelReward, batches, unpacked

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def a_reward_model(tmp_path: Path) -> Callable[..., Path]:
    def make(folder: str = "reward_model_reward", *, chat_template: str | None = None) -> Path:
        from training_container.engine.presets import character_tokenizer, preset_model

        tokenizer = character_tokenizer([chr(code) for code in range(32, 127)])
        tokenizer.chat_template = chat_template
        preset_model("tiny-decoder", tokenizer, seed=5, head="score").save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
        return tmp_path / folder

    return make


def alone(folder: Path, prompt: Any, completion: Any) -> float:
    """One row through the plain model."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = render_row(Row({"prompt": prompt, "completion": completion}, "f", 1), tokenizer).tokens
    with torch.no_grad():
        return float(model(torch.tensor([tokens])).logits[0, 0])


def score(question: Question, tmp_path: Path, **spec: Any) -> Scores:
    around: dict[str, Any] = {"seed": 0, "log": EventLog(tmp_path / "log", 1), "model_channel": tmp_path.joinpath}
    with open_rewards(RewardSpec(**spec), tmp_path, **around) as rewards:
        return rewards.score(question, step=1)


def test_scores_are_the_models_own_whatever_lies_beside_a_row(a_reward_model: Any, tmp_path: Path) -> None:
    folder = a_reward_model()
    completions = ["a", "a longer one", "", "bb"]
    question = Question(["q>"] * 4, completions, [[7]] * 4, {})
    values = score(question, tmp_path, entry="model:s3://bucket/models/reward/").values
    assert values == pytest.approx([alone(folder, "q>", text) for text in completions], abs=1e-6)
    assert len(set(values)) == 4


def test_each_part_has_a_channel_of_its_own(a_reward_model: Any, tmp_path: Path) -> None:
    a_reward_model("reward_model_taste")
    parts = {"taste": {"entry": "model:s3://bucket/m/", "weight": 2.0}}
    scores = score(Question(["q"], ["a"], [[7]], {}), tmp_path, parts=parts)
    assert scores.values == [2.0 * scores.components["taste"][0]]


def test_a_chat_goes_through_the_reward_models_own_template(a_reward_model: Any, tmp_path: Path) -> None:
    folder = a_reward_model(chat_template=CHAT_TEMPLATE)
    prompt, said = [{"role": "user", "content": "2+2"}], [{"role": "assistant", "content": "4"}]
    (value,) = score(Question([prompt], [said], [[7]], {}), tmp_path, entry="model:s3://b/m/").values
    assert value == pytest.approx(alone(folder, prompt, said), abs=1e-6)


def test_scoring_draws_no_chance_and_leaves_no_gradient(a_reward_model: Any) -> None:
    reward = ModelReward(a_reward_model())
    before = torch.get_rng_state()
    (answer,) = reward.score(Question(["q"], ["a"], [[7]], {}), step=1).each
    assert isinstance(answer.value, float)
    assert torch.equal(before, torch.get_rng_state())


def test_an_adapter_scores_on_the_base_model_it_names_and_not_on_a_path_that_is_gone(
    a_reward_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    folder = a_reward_model("base")
    monkeypatch.chdir(tmp_path)
    for source, name in (("base", "adapted"), (str(folder), "lost")):
        torch.manual_seed(1)
        base = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32)
        adapted = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)).eval()
        adapted.save_pretrained(tmp_path / name, save_embedding_layers=False)
        AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / name)
    tokens = render_row(Row({"prompt": "q", "completion": "a"}, "f", 1), AutoTokenizer.from_pretrained("base")).tokens
    with torch.no_grad():
        wanted = float(adapted(torch.tensor([tokens])).logits[0, 0])
    (answer,) = ModelReward(tmp_path / "adapted").score(Question(["q"], ["a"], [[7]], {}), step=1).each
    assert answer.value == pytest.approx(wanted, abs=1e-6)
    assert wanted != pytest.approx(alone(folder, "q", "a"), abs=1e-3)
    with pytest.raises(UserFailure, match=r"its base model was a folder of the machine .*`base`.*model.merge: true"):
        ModelReward(tmp_path / "lost")
    (answer,) = ModelReward(tmp_path / "lost", base=folder).score(Question(["q"], ["a"], [[7]], {}), step=1).each
    assert answer.value == pytest.approx(wanted, abs=1e-6)


def test_an_adapter_on_a_model_in_s3_scores_on_the_folder_of_its_channel_and_says_what_is_missing(
    a_reward_model: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    from training_container.engine.export import name_base

    base, place = a_reward_model("reward_base_reward"), tmp_path / "reward_model_reward"
    torch.manual_seed(1)
    whole = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(whole, LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)).eval()
    adapted.save_pretrained(place, save_embedding_layers=False)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(place)
    name_base(place, "s3://bucket/models/base/0a1b/", None)
    tokens = render_row(Row({"prompt": "q", "completion": "a"}, "f", 1), tokenizer).tokens
    with torch.no_grad():
        wanted = float(adapted(torch.tensor([tokens])).logits[0, 0])
    question, entry = Question(["q"], ["a"], [[7]], {}), "model:s3://bucket/m/"
    found = score(question, tmp_path, entry=entry, base="s3://bucket/models/base/0a1b/")
    assert found.values == pytest.approx([wanted], abs=1e-6)
    with pytest.raises(UserFailure, match=r"its base model was s3://bucket/models/base/0a1b/.*`base`"):
        score(question, tmp_path, entry=entry)
    (base / "config.json").unlink()
    with pytest.raises(UserFailure, match=r"base model s3://bucket/models/base/0a1b/ cannot be loaded"):
        score(question, tmp_path, entry=entry, base="s3://bucket/models/base/0a1b/")


def test_an_archive_and_a_merged_model_are_found_and_an_empty_folder_is_not(
    a_reward_model: Any, tmp_path: Path
) -> None:
    folder = a_reward_model("made")
    for name in ("packed", "merged_one", "odd"):
        (tmp_path / name).mkdir()
    with tarfile.open(tmp_path / "packed" / "model.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname=".")
    folder.rename(tmp_path / "merged_one" / "merged")
    (tmp_path / "odd" / "notes.txt").write_text("no model")
    assert (unpacked(tmp_path / "packed") / "model.safetensors").is_file()
    assert unpacked(tmp_path / "merged_one").name == "merged"
    with pytest.raises(UserFailure, match=r"channel odd holds no model \(it has notes.txt\)"):
        unpacked(tmp_path / "odd")


def a_config_of_lists(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {}}')


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])


def of_two_labels(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, ignore_mismatched_sizes=True
    ).save_pretrained(folder)


def a_language_model(folder: Path) -> None:
    from training_container.engine.presets import preset_model

    preset_model("tiny-decoder", AutoTokenizer.from_pretrained(folder), seed=5).save_pretrained(folder)


def an_adapter(task: str, *, labels: int = 1, drop_head: bool = False) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from peft import LoraConfig, get_peft_model
        from safetensors.torch import load_file, save_file
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        kind = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
        options = {"num_labels": labels, "ignore_mismatched_sizes": True} if task == "SEQ_CLS" else {}
        base = folder.with_name("base")
        shutil.copytree(folder, base)
        model = get_peft_model(kind.from_pretrained(base, **options), LoraConfig(task_type=task, r=2))
        model.save_pretrained(folder, save_embedding_layers=False)
        if drop_head:
            weights = load_file(folder / "adapter_model.safetensors")
            kept = {name: each for name, each in weights.items() if "score" not in name}
            save_file(kept, folder / "adapter_model.safetensors", {"format": "pt"})

    return make


def cut_adapter(folder: Path) -> None:
    an_adapter("SEQ_CLS")(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"cut")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (a_config_of_lists, r"The .*reward model in the channel m cannot be loaded: \w+: "),
        (without_tokenizer, "The tokenizer of the reward model in the channel m cannot be loaded: ValueError: "),
        (cut_tokenizer, r"The tokenizer of the reward model in the channel m cannot be loaded: \w+: "),
        (without_weights, "The reward model in the channel m cannot be loaded: OSError: Error no file named"),
        (cut_weights, "The reward model in the channel m cannot be loaded: SafetensorError: "),
        (of_two_labels, r"The reward model gives 2 labels a row \(score.weight\), and a reward is one. Name what"),
        (a_language_model, "The reward model's weights have no score.weight, so it would score at random. Name what"),
        (an_adapter("CAUSAL_LM"), "an adapter of task type CAUSAL_LM, which scores nothing. Name what"),
        (an_adapter("SEQ_CLS", drop_head=True), "adapter has no score head, so it would score at random"),
        (an_adapter("SEQ_CLS", labels=2), r"The reward model gives 2 labels a row \(base_model.model.score.weight\)"),
        (cut_adapter, "The reward model in the channel m cannot be loaded: SafetensorError: "),
    ],
)
def test_what_cannot_score_is_the_users_and_refused_before_the_first_step(
    spoil: Callable[[Path], None], message: str, a_reward_model: Any, tmp_path: Path
) -> None:
    folder = a_reward_model("m")
    spoil(folder)
    base = tmp_path / "base"
    with pytest.raises(UserFailure, match=message):
        ModelReward(folder, base=base if base.is_dir() else None)


def test_an_archive_that_is_none_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "model.tar.gz").write_bytes(b"no archive")
    with pytest.raises(UserFailure, match=r"The model.tar.gz of the reward's channel .* cannot be loaded: ReadError"):
        unpacked(tmp_path)


def test_a_forward_takes_rows_of_like_length_up_to_its_tokens() -> None:
    assert batches([10_000, 20_000, 100, 6_000, 90]) == [[1], [0], [3, 2], [4]]
    assert batches([5, 9, 7]) == [[1, 2, 0]]
    assert batches([16_384, 20_000, 1]) == [[1], [0], [2]]
