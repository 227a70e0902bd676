"""Where models come from, in which numbers they are kept, and that they come back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from microtuning_core.domain.spec import ModelSpec
from training_container.engine import Engine, Example
from training_container.engine import models as engine_models
from training_container.engine.forward import undressed
from training_container.engine.models import (
    four_bits,
    load_base,
    load_frozen,
    padding_apart,
    refuse_qlora_without_its_needs,
)
from training_container.engine.precision import BFLOAT16, FLOAT32, choose_precision
from training_container.failures import UserFailure
from training_container.losses import cross_entropy

CPU = torch.device("cpu")
CASES = Path(__file__).parents[1] / "cases"
ROWS = [Example([3 + (5 * row + place) % 11 for place in range(4 + 3 * row)], [False, *[True] * (3 + 3 * row)])
        for row in range(4)]  # fmt: skip


def an_engine(folder: Path | None = None, *, head: str = "policy", **changes: Any) -> Engine:
    spec = (
        ModelSpec(base="tests/tiny", rank=4, alpha=8, **changes) if folder else ModelSpec(arch="Transformer", **changes)
    )
    return Engine.build(spec, source=str(folder), texts=["0123456789>"], seed=3, device=CPU, head=head)  # type: ignore[arg-type]


def gradient_of(engine: Engine) -> tuple[float, Tensor]:
    loss = engine.forward_backward(ROWS, cross_entropy)["loss"]
    gradient = torch.cat([weight.grad.flatten() for weight in engine.trainable.values() if weight.grad is not None])
    return loss, gradient


# --- the numbers they are kept and computed in ------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "notices"), [("bfloat16", 1), ("auto", 0)])
def test_c36_bfloat16_on_a_cpu_trains_in_float32_and_says_so_once(
    dtype: str, notices: int, a_lora_box: Callable[..., Any]
) -> None:
    case = json.loads((CASES / "c36_spec_cpu.json").read_text("utf-8"))
    box = a_lora_box(
        algorithm={"type": case["algorithm"], "batch_size": 4, "max_train_steps": 2},
        model={"base": "tests/tiny", "rank": 4, "dtype": dtype},
        plan={"instance_type": case["instance_type"]},
    )
    assert box.work() == 0
    said = [event["message"] for event in box.of("notice") if "bfloat16" in event["message"]]
    assert len(said) == notices
    assert {tensor.dtype for tensor in load_file(box.tree.model / "adapter_model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("gpu", "changes", "expected"),
    [
        (True, {"base": "a/b"}, BFLOAT16),
        (True, {"base": "a/b", "dtype": "float32"}, FLOAT32),
        (True, {"arch": "Transformer"}, FLOAT32),
        (True, {"arch": "Transformer", "dtype": "bfloat16"}, BFLOAT16),
        (False, {"base": "a/b"}, FLOAT32),
    ],
)
def test_a_gpu_with_bfloat16_computes_in_it_but_for_presets(
    gpu: bool, changes: dict[str, Any], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu)
    assert choose_precision(ModelSpec(**changes), torch.device("cuda")) == expected


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_under_bfloat16_what_is_trained_stays_float32_and_the_loss_is_within_a_fiftieth(
    adapter: str, a_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_model_dir()
    expected, _ = gradient_of(an_engine(folder, adapter=adapter))
    monkeypatch.setattr(engine_models, "choose_precision", lambda *_: BFLOAT16)
    engine = an_engine(folder, adapter=adapter)
    loss, gradient = gradient_of(engine)
    assert {weight.dtype for weight in engine.trainable.values()} == {torch.float32}
    frozen = {weight.dtype for weight in engine.model.parameters() if not weight.requires_grad}
    assert frozen == ({torch.bfloat16} if adapter == "lora" else set())
    assert gradient.dtype == torch.float32
    assert loss == pytest.approx(expected, rel=0.02)
    assert loss != expected
    assert engine.optim_step(1e-3, 1.0).applied


# --- adapters --------------------------------------------------------------------------------------------------------


def test_qlora_without_a_gpu_ends_the_job_as_the_users_and_says_what_to_do(a_lora_box: Callable[..., Any]) -> None:
    box = a_lora_box(model={"base": "tests/tiny", "adapter": "qlora"})
    assert box.work() == 1
    assert box.failure["class"] == "user"
    assert "model.adapter is qlora, which needs a GPU" in box.failure["message"]
    assert "adapter: lora" in box.failure["message"]


def test_qlora_without_bitsandbytes_is_refused_and_with_it_has_4_bits_and_double_quantization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserFailure, match="needs bitsandbytes"):
        refuse_qlora_without_its_needs(torch.device("cuda"))
    wanted = four_bits(BFLOAT16).to_dict()
    assert (wanted["load_in_4bit"], wanted["bnb_4bit_quant_type"], wanted["bnb_4bit_use_double_quant"]) == (
        True, "nf4", True,
    )  # fmt: skip
    assert four_bits(BFLOAT16).bnb_4bit_compute_dtype == torch.bfloat16


def test_dropout_acts_in_training_alone_and_a_resumed_step_drops_the_same(
    a_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    engine = an_engine(a_model_dir(), dropout=0.5)
    for _ in range(2):  # B begins at zero, where nothing dropped would show
        engine.forward_backward(ROWS, cross_entropy)
        engine.optim_step(1e-1, 1.0)
    assert engine.forward(ROWS) == engine.forward(ROWS)
    (tmp_path / "state").mkdir()
    engine.save_state(tmp_path / "state")
    losses = [engine.forward_backward(ROWS, cross_entropy)["loss"] for _ in range(3)]
    assert len(set(losses)) == 3
    engine.load_state(tmp_path / "state")
    assert [engine.forward_backward(ROWS, cross_entropy)["loss"] for _ in range(3)] == losses


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_recomputed_activations_give_the_same_loss_and_gradient(adapter: str, a_model_dir: Callable[..., Path]) -> None:
    folder = a_model_dir()
    expected_loss, expected = gradient_of(an_engine(folder, adapter=adapter))
    engine = an_engine(folder, adapter=adapter, gradient_checkpointing=True)
    loss, gradient = gradient_of(engine)
    assert any(getattr(module, "gradient_checkpointing", False) for module in undressed(engine.model).modules())
    assert loss == expected_loss
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-5)


def test_a_checkpoint_of_an_adapter_is_refused_where_all_weights_are_wanted(
    a_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    engine = an_engine(a_model_dir())
    engine.save_weights(tmp_path / "state" / "model")
    spec = ModelSpec(base="tests/tiny", adapter="none")
    with pytest.raises(UserFailure, match=r"model\.adapter is none, but the checkpoint holds an adapter"):
        Engine.restore(spec, tmp_path / "state", source="", device=CPU)


# --- score models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [None, "lora", "none"], ids=["preset", "lora", "full"])
def test_a_score_model_gives_a_number_a_row_and_comes_back_with_its_head(
    adapter: str | None, a_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"adapter": adapter} if adapter else {}
    engine = an_engine(a_model_dir() if adapter else None, head="score", **changes)
    engine.forward_backward(ROWS, lambda scores_B, batch: (scores_B.sum() / batch.totals.rows, {}))
    assert engine.optim_step(1e-1, 1.0).applied
    scores = engine.forward(ROWS)
    assert [len(row) for row in scores] == [1] * len(ROWS)
    alone = [engine.forward([row])[0] for row in ROWS]
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(alone), atol=1e-6, rtol=0)
    (tmp_path / "state").mkdir()
    engine.save_state(tmp_path / "state")
    source = str(tmp_path / "base")
    back = Engine.restore(engine._spec, tmp_path / "state", source=source, device=CPU, head="score")
    assert back.forward(ROWS) == scores
    names = load_file(next((tmp_path / "state" / "model").glob("*.safetensors"))).keys()
    assert any("score" in name for name in names)


def test_padding_is_never_the_token_that_ends_a_text() -> None:
    from training_container.engine.presets import character_tokenizer

    tokenizer = character_tokenizer(["abc"])
    assert padding_apart(tokenizer) == tokenizer.convert_tokens_to_ids("<pad>")
    tokenizer.pad_token = "<eos>"
    assert padding_apart(tokenizer) == tokenizer.convert_tokens_to_ids("<unk>") == tokenizer.pad_token_id
    tokenizer.pad_token, tokenizer.unk_token = "<eos>", None
    with pytest.raises(UserFailure, match="pad_token"):
        padding_apart(tokenizer)


# --- teachers, and tied weights ----------------------------------------------------------------------------------------


def test_a_teacher_is_loaded_to_be_asked_and_cannot_be_trained(a_model_dir: Callable[..., Path]) -> None:
    folder = a_model_dir()
    teacher = load_frozen(str(folder), None, CPU)
    assert not teacher.training
    assert not any(weight.requires_grad for weight in teacher.parameters())
    ids = torch.tensor([[3, 4, 5]])
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(teacher(input_ids=ids).logits, plain(input_ids=ids).logits)
    with pytest.raises(UserFailure, match="nowhere"):
        load_frozen(str(folder / "nowhere"), None, CPU)


def test_c43_tied_embeddings_stay_tied_through_two_saves_and_give_the_same_logits(
    a_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    case = json.loads((CASES / "c43_tied_config.json").read_text("utf-8"))
    folder = a_model_dir()  # for its tokenizer
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**case)).save_pretrained(folder)
    engine = an_engine(folder, adapter="none")
    for save in ("first", "second"):
        gradient_of(engine)
        engine.optim_step(1e-2, 1.0)
        (tmp_path / save).mkdir()
        engine.save_state(tmp_path / save)
    back = Engine.restore(engine._spec, tmp_path / "second", source="", device=CPU)
    for model in (back.model, AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "model")):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        ids = torch.tensor([[3, 4, 5, 6]])
        torch.testing.assert_close(model(input_ids=ids).logits, engine.model(input_ids=ids).logits, atol=1e-6, rtol=0)
    assert gradient_of(back)[0] == gradient_of(engine)[0]


# --- files that make no model ----------------------------------------------------------------------------------------


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def without_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.0.mlp.up_proj" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]", encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "cannot be loaded: SafetensorError"),
        (without_a_layer, "has no weights model.layers.0.mlp.up_proj.weight: they would be random"),
        (config_is_a_list, "cannot be loaded"),
    ],
)
def test_a_model_whose_files_make_none_is_the_users_to_mend(
    spoil: Callable[[Path], None], said: str, a_model_dir: Callable[..., Path]
) -> None:
    folder = a_model_dir()
    spoil(folder)
    with pytest.raises(UserFailure, match=said):
        load_base(ModelSpec(base="tests/tiny", rank=4), str(folder), torch.device("cpu"))
    with pytest.raises(UserFailure, match=said):
        load_frozen(str(folder), None, torch.device("cpu"))
