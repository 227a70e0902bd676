"""What a job leaves: adapters that name their model, and merged weights that give the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from microtuning_core.domain.spec import ModelSpec
from training_container.engine import Engine, Example
from training_container.engine.export import Unequal, export_merged, leave_model
from training_container.engine.presets import character_tokenizer
from training_container.losses import cross_entropy

CASES = Path(__file__).parents[1] / "cases"
CPU = torch.device("cpu")
ROWS = [[5, 6, 7, 8, 9, 10], [40, 41, 42]]


@pytest.fixture
def tied_dir(tmp_path: Path) -> Path:
    """The tied model of the case, with random weights."""
    settings = json.loads((CASES / "c43_tied_config.json").read_text("utf-8"))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(tmp_path / "tied")
    character_tokenizer([chr(code) for code in range(10, 127)]).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def trained(source: Path, **spec: Any) -> Engine:
    """An engine after three real steps: an adapter begins as no change at all."""
    engine = Engine.build(
        ModelSpec(base="tests/tied", rank=4, alpha=8, **spec), source=str(source), texts=(), seed=0, device=CPU
    )
    for _ in range(3):
        engine.forward_backward([Example(row, [False] + [True] * (len(row) - 1)) for row in ROWS], cross_entropy)
        engine.optim_step(1e-2, 1.0)
    return engine


@torch.no_grad()
def logits(model: Any) -> list[torch.Tensor]:
    model.eval()
    return [model(input_ids=torch.tensor([row])).logits for row in ROWS]


def assert_equal(have: Any, want: Any, tolerance: float = 1e-6) -> None:
    for one, other in zip(have, want, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_tied_embeddings_survive_saving_twice_resuming_and_merging(
    tied_dir: Path, tmp_path: Path, adapter: Any
) -> None:
    engine = trained(tied_dir, adapter=adapter)
    want = logits(engine.model)
    engine.save_state(tmp_path / "one")
    again = Engine.restore(engine._spec, tmp_path / "one", source=str(tied_dir), device=CPU)
    again.save_state(tmp_path / "two")
    once_more = Engine.restore(engine._spec, tmp_path / "two", source=str(tied_dir), device=CPU)
    assert_equal(logits(once_more.model), want)
    leave_model(once_more, tmp_path / "model", base="tests/tied", revision=None, merge=True, rows=ROWS)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model" / ("merged" if adapter == "lora" else ""))
    assert_equal(logits(plain), want)
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert plain.config.tie_word_embeddings


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens", "q_proj")])
def test_an_adapter_on_a_tied_head_or_embedding_merges_into_two_weights(
    tied_dir: Path, tmp_path: Path, modules: tuple[str, ...]
) -> None:
    engine = trained(tied_dir, target_modules=modules)
    export_merged(engine, tmp_path / "merged", ROWS)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_equal(logits(plain), logits(engine.model), 1e-5)
    assert not plain.config.tie_word_embeddings


def test_merging_leaves_the_engine_as_it_was(tied_dir: Path, tmp_path: Path) -> None:
    engine = trained(tied_dir)
    before = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    assert export_merged(engine, tmp_path / "merged", ROWS) < 1e-6
    assert all(torch.equal(weight, before[name]) for name, weight in engine.model.state_dict().items())


def test_a_score_head_is_merged_with_its_adapter(tied_dir: Path, tmp_path: Path) -> None:
    spec = ModelSpec(base="tests/tied", rank=4, alpha=8)
    engine = Engine.build(spec, source=str(tied_dir), texts=(), seed=0, device=CPU, head="score")
    for name, weight in engine.trainable.items():
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    export_merged(engine, tmp_path / "merged", ROWS)
    assert_equal(logits(AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")), logits(engine.model))


def test_a_forward_that_was_wrapped_is_not_the_copys(tied_dir: Path, tmp_path: Path) -> None:
    engine = trained(tied_dir)
    calls: list[int] = []
    unwrapped = engine.model.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return unwrapped(*args, **kwargs)

    engine.model.forward = wrapped
    assert export_merged(engine, tmp_path / "merged", ROWS) < 1e-6
    assert calls == []


def test_an_adapter_loads_in_peft_and_names_its_model_and_not_a_path_of_the_machine(
    tied_dir: Path, tmp_path: Path
) -> None:
    engine = trained(tied_dir)
    leave_model(engine, tmp_path / "model", base="someone/tied", revision="abc", merge=False, rows=ROWS)
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text("utf-8"))
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/tied", "abc")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tied_dir), tmp_path / "model")
    assert_equal(logits(loaded), logits(engine.model))
    assert not (tmp_path / "model" / "merged").exists()


def test_a_merge_with_other_logits_is_not_kept_and_the_adapter_is(
    tied_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trained(tied_dir)
    monkeypatch.setattr("training_container.engine.export.TOLERANCE", -1.0)
    with pytest.raises(Unequal, match="its logits differ from the adapter's by"):
        export_merged(engine, tmp_path / "merged", ROWS)
    said = leave_model(engine, tmp_path / "model", base="a/b", revision=None, merge=True, rows=ROWS)
    assert said is not None
    assert said.startswith("the merged model is not kept: its logits differ")
    assert not (tmp_path / "merged").exists()
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {"adapter_config.json"}
    assert not (tmp_path / "model" / "merged").exists()


def test_a_run_that_asks_for_it_leaves_a_merged_model_that_answers(
    a_lora_box: Callable[..., Any], rows: Callable[..., Any]
) -> None:
    box = a_lora_box(
        algorithm={"type": "sft", "batch_size": 8},
        rows=rows(16),
        model={"base": "tests/tiny", "rank": 4, "alpha": 8, "merge": True},
    )
    assert box.work() == 0
    merged = box.tree.model / "merged"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    assert model.generate(**tokenizer("12>", return_tensors="pt"), max_new_tokens=3).shape[1] <= 6
    assert any("merged into plain weights" in event["message"] for event in box.of("notice"))
    config = json.loads((box.tree.model / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == "tests/tiny"
