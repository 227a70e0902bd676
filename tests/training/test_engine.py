"""The engine's primitives against plain rows, one at a time and without padding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from microtuning_core.domain.spec import ModelSpec
from training_container.engine import Engine, Example, MicroBatch, Sampling
from training_container.engine.sampler import draw, sampling_logits
from training_container.losses import cross_entropy

CASES = Path(__file__).parents[1] / "cases"
CPU = torch.device("cpu")
PROMPTS = ["7>", "31415926535>", "2718>"]


def a_preset(**changes: Any) -> Engine:
    return Engine.build(
        ModelSpec(arch="Transformer"), **({"source": "", "texts": ["0123456789>"], "seed": 3, "device": CPU} | changes)
    )


def a_lora(folder: Path, **changes: Any) -> Engine:
    spec = ModelSpec(base="tests/tiny", rank=4, alpha=8, **changes)
    return Engine.build(spec, source=str(folder), texts=[], seed=3, device=CPU)


@pytest.fixture(params=["preset", "lora", "gpt2", "sliding"])
def engine(request: pytest.FixtureRequest, a_model_dir: Callable[..., Path], tmp_path: Path) -> Engine:
    """Engines of several architectures; the adapter's B is not zero, so that it matters."""
    if request.param == "preset":
        return a_preset()
    folder = a_model_dir()
    if request.param == "lora":
        engine = a_lora(folder)
        chance = torch.Generator().manual_seed(1)
        for weight in engine.trainable.values():
            weight.data = torch.randn(weight.shape, generator=chance) * 0.05
        return engine
    model = another_architecture(request.param, len(AutoTokenizer.from_pretrained(folder)))
    return Engine(
        model, AutoTokenizer.from_pretrained(folder), spec=ModelSpec(base="x", adapter="none"), source="", seed=3
    )


def another_architecture(name: str, vocabulary: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

    torch.manual_seed(2)
    if name == "gpt2":  # learned positions: wrong ones would show under left padding
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocabulary, **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        )
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MistralForCausalLM(
        MistralConfig(vocab_size=vocabulary, **shape, num_key_value_heads=1, sliding_window=6, eos_token_id=1)
    )


def encode(engine: Engine, text: str) -> list[int]:
    return list(engine.tokenizer(text, add_special_tokens=False)["input_ids"])


def plain_logprobs(engine: Engine, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probability of every token but the first, from one forward over the row alone."""
    logits_T_V = engine.model(input_ids=torch.tensor([tokens])).logits[0].float() / temperature
    return logits_T_V.log_softmax(-1)[:-1].gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_a_plain_forward_to_1e_5_for_prompts_of_2_12_and_5_tokens(
    engine: Engine, temperature: float
) -> None:
    prompts = [encode(engine, text) for text in PROMPTS]
    groups = engine.sample(prompts, Sampling(9, temperature=temperature), group_size=6)
    with torch.no_grad():
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                expected = plain_logprobs(engine, prompt + completion.tokens, temperature)[len(prompt) - 1 :]
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_a_completion_ends_with_its_first_stop_token_or_is_called_unfinished() -> None:
    engine = a_preset()
    groups = engine.sample([encode(engine, "12>")] * 4, Sampling(12), group_size=16)
    completions = [completion for group in groups for completion in group]
    for completion in completions:
        assert engine.tokenizer.eos_token_id not in completion.tokens[:-1]
        assert completion.finished == (completion.tokens[-1] == engine.tokenizer.eos_token_id)
        assert completion.finished or len(completion.tokens) == 12
        assert len(completion.logprobs) == len(completion.tokens)
    assert {completion.finished for completion in completions} == {True, False}


def test_greedy_sampling_takes_the_likeliest_token_and_no_random_number() -> None:
    engine = a_preset()
    before = engine._sampler_generator.get_state().clone()
    ((completion,),) = engine.sample([encode(engine, "31>")], Sampling(5, greedy=True))
    tokens = encode(engine, "31>")
    with torch.no_grad():
        for token in completion.tokens:
            assert token == int(engine.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            tokens.append(token)
    assert torch.equal(engine._sampler_generator.get_state(), before)


def test_20000_draws_from_a_half_a_quarter_and_a_quarter_come_out_so_to_2_percent() -> None:
    logits_K_V = torch.tensor([0.5, 0.25, 0.25, 0.0]).log().expand(20_000, 4)
    token_K, logprob_K = draw(logits_K_V, Sampling(1), torch.rand(20_000, generator=torch.Generator().manual_seed(0)))
    share_V = torch.bincount(token_K, minlength=4) / 20_000
    torch.testing.assert_close(share_V, torch.tensor([0.5, 0.25, 0.25, 0.0]), atol=0.02, rtol=0)
    torch.testing.assert_close(logprob_K.exp(), torch.tensor([0.5, 0.25, 0.25, 0.0])[token_K])


def test_top_p_0_6_of_a_half_three_tenths_and_a_fifth_keeps_two_tokens_and_rescales_them() -> None:
    logits_K_V = torch.tensor([[0.3, 0.2, 0.5]]).log()
    kept_K_V = sampling_logits(logits_K_V, Sampling(1, top_p=0.6)).softmax(-1)
    torch.testing.assert_close(kept_K_V, torch.tensor([[0.375, 0.0, 0.625]]))


# --- training --------------------------------------------------------------------------------------------------------


def examples_of(engine: Engine) -> list[Example]:
    rows = [encode(engine, text) for text in ("12>34", "5>6", "987654321>123456789", "0>1234", "77>8")]
    return [
        Example(
            row, [False] * 2 + [True] * (len(row) - 2), advantages=index - 1.5, sampled_logprobs=[-2.0] * (len(row) - 2)
        )
        for index, row in enumerate(rows)
    ]


def reinforced(logprobs_N: Tensor, batch: MicroBatch) -> Any:
    """The policy gradient with an importance ratio, without a clip."""
    ratio_N = (logprobs_N - batch.sampled_logprobs_N).exp()
    return -(ratio_N * batch.advantages_N).sum() / batch.totals.tokens, {"ratio": ratio_N.sum() / batch.totals.tokens}


def gradient(engine: Engine) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in engine.trainable.values()])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trained": [False, True]}, "trained has 2 flags for 3 tokens"),
        ({"trained": [False, True, True, True]}, "trained has 4 flags for 3 tokens"),
        ({"trained": []}, "trained has 0 flags for 3 tokens"),
        ({"tokens": [], "trained": [True]}, "trained has 1 flags for 0 tokens"),
        ({"trained": [True, True, True]}, r"trained\[0\] is set"),
        ({"advantages": [1.0]}, "advantages has 1 numbers for 2 trained tokens"),
        ({"advantages": []}, "advantages has 0 numbers for 2 trained tokens"),
        ({"advantages": [1.0] * 3}, "advantages has 3 numbers for 2 trained tokens"),
        ({"advantages": torch.tensor(1.0)}, "advantages is a Tensor; give a float, or a list"),
        ({"advantages": None}, "advantages is a NoneType; give a float, or a list"),
        ({"sampled_logprobs": [-1.0]}, "sampled_logprobs has 1 numbers for 2 trained tokens"),
        ({"old_logprobs": [-1.0] * 3}, "old_logprobs has 3 numbers for 2 trained tokens"),
        ({"reference_logprobs": -1.0}, "reference_logprobs is a float; give a list"),
    ],
)
def test_an_example_whose_lists_do_not_fit_each_other_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Example: {message}"):
        Example(**({"tokens": [5, 6, 7], "trained": [False, True, True]} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give a whole number of at least 1"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"temperature": 0}, "temperature is 0; give a number above 0, or greedy=True"),
        ({"temperature": -1.0}, "temperature is -1.0; give a number above 0$"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_a_sampling_by_which_nothing_can_be_drawn_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Sampling: {message}"):
        Sampling(**({"max_new_tokens": 3} | fields))


def test_a_prompt_without_a_token_and_a_group_without_a_completion_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"sample: prompts\[1\] is empty"):
        engine.sample([[5], [], [6]], Sampling(2))
    with pytest.raises(ValueError, match="sample: group_size is 0; give at least 1"):
        engine.sample([[5]], Sampling(2), group_size=0)
    assert engine.sample([], Sampling(2)) == []


def test_forward_gives_the_logprobs_of_plain_rows(engine: Engine) -> None:
    examples = examples_of(engine)
    with torch.no_grad():
        for example, found in zip(examples, engine.forward(examples), strict=True):
            expected = plain_logprobs(engine, list(example.tokens))[1:]
            torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss_fn", [cross_entropy, reinforced])
def test_gradients_equal_those_of_plain_rows_through_autograd(engine: Engine, loss_fn: Any) -> None:
    examples = examples_of(engine)
    metrics = engine.forward_backward(examples, loss_fn)
    found = gradient(engine)
    engine.model.zero_grad()
    total = sum(example.trained_tokens for example in examples)
    loss = torch.zeros(())
    for example in examples:
        logprobs = plain_logprobs(engine, list(example.tokens))[1:]
        pull = example.advantages * (logprobs + 2.0).exp() if loss_fn is reinforced else logprobs
        loss = loss - pull.sum() / total
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    torch.testing.assert_close(found, gradient(engine), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("loss_fn", [cross_entropy, reinforced])
def test_micro_batches_of_1_2_or_3_rows_give_the_gradient_of_the_full_batch(
    engine: Engine, rows: int, loss_fn: Any
) -> None:
    whole = engine.forward_backward(examples_of(engine), loss_fn)
    expected = gradient(engine)
    engine.model.zero_grad()
    engine.micro_batch_rows = rows
    assert engine.forward_backward(examples_of(engine), loss_fn) == pytest.approx(whole, abs=1e-5)
    torch.testing.assert_close(gradient(engine), expected, atol=1e-6, rtol=1e-4)


def test_a_batch_is_cut_by_tokens_when_no_number_of_rows_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = a_preset()
    monkeypatch.setattr("training_container.engine.core._MAX_TOKENS_CPU", 19)
    examples = examples_of(engine)
    parts = [part for _, part in engine._cut(examples)]
    assert [[len(examples[index].tokens) for index in part] for part in parts] == [[19], [6, 5, 4], [3]]


def test_a_row_of_2_tokens_at_1_nat_and_one_of_60_at_3_nats_have_a_mean_loss_of_2_935_however_they_are_accumulated() -> (
    None
):
    oracle = json.loads((CASES / "c31_oracle.json").read_text("utf-8"))
    lengths, means = oracle["toy"]["row_tokens"], torch.tensor(oracle["toy"]["row_mean_loss"])
    engine = a_preset()
    examples = [Example([1] * (count + 1), [False] + [True] * count, label=row) for row, count in enumerate(lengths)]

    def given(logprobs_N: Tensor, batch: MicroBatch) -> Any:
        per_token_N = means[batch.label_B.long()][batch.row_N] + 0.0 * logprobs_N
        return per_token_N.sum() / batch.totals.tokens, {}

    for rows in (1, 2):
        engine.micro_batch_rows = rows
        assert engine.forward_backward(examples, given)["loss"] == pytest.approx(oracle["right_token_mean"], rel=1e-6)


@pytest.mark.parametrize("more", [0, 1])
def test_accumulated_rows_of_few_and_of_many_tokens_give_loss_norm_and_weights_of_the_full_batch(more: int) -> None:
    lines = [json.loads(line) for line in (CASES / "c31_accumulation.jsonl").read_text("utf-8").splitlines()]
    taken = {}
    for rows in (1, 2, None):
        engine = a_preset(texts=["abyesno "])
        examples = [
            Example(encode(engine, line["prompt"] + line["completion"]), [False] + [True] * len(line["completion"]))
            for line in [*lines, *lines[:more]]
        ]
        engine.micro_batch_rows = rows
        loss = engine.forward_backward(examples, cross_entropy)["loss"]
        norm = engine.optim_step(1e-3, 1.0).grad_norm
        taken[rows] = torch.cat(
            [torch.tensor([loss, norm]), *(each.detach().flatten() for each in engine.trainable.values())]
        )
    torch.testing.assert_close(taken[1], taken[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(taken[1], taken[None], rtol=1e-5, atol=1e-5)


def test_an_adapter_trains_only_its_own_weights_and_leaves_the_base_alone(a_model_dir: Callable[..., Path]) -> None:
    engine = a_lora(a_model_dir())
    frozen = {name: weight.clone() for name, weight in engine.model.named_parameters() if not weight.requires_grad}
    engine.forward_backward(examples_of(engine), cross_entropy)
    engine.optim_step(1e-2, 1.0)
    assert all("lora_" in name for name in engine.trainable)
    assert len(engine.trainable) == 3 * 7 * 2  # layers x linear layers x (A, B)
    assert all(torch.equal(frozen[name], weight) for name, weight in engine.model.named_parameters() if name in frozen)


def test_a_step_clips_the_gradient_to_its_norm_and_reports_it_unclipped() -> None:
    engine = a_preset()
    engine.forward_backward(examples_of(engine), cross_entropy)
    norm = float(gradient(engine).norm())
    taken = engine.optim_step(1e-3, 0.3)
    assert taken.grad_norm == pytest.approx(norm, rel=1e-4)
    assert norm > 0.3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_no_weight(value: float) -> None:
    engine = a_preset()
    before = [weight.clone() for weight in engine.trainable.values()]
    engine.forward_backward(examples_of(engine), cross_entropy)
    next(iter(engine.trainable.values())).grad[0] = value
    taken = engine.optim_step(1e-3, 1.0)
    assert not taken.applied
    assert all(torch.equal(old, new) for old, new in zip(before, engine.trainable.values(), strict=True))
    engine.forward_backward(examples_of(engine), cross_entropy)
    assert engine.optim_step(1e-3, 1.0).applied


# --- keeping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["preset", "lora"])
def test_a_restored_engine_takes_the_same_next_steps_to_the_bit(
    kind: str, a_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = a_model_dir()
    spec = ModelSpec(arch="Transformer") if kind == "preset" else ModelSpec(base="tests/tiny", rank=4, alpha=8)
    engine = Engine.build(spec, source=str(folder), texts=["0123456789>"], seed=3, device=CPU)

    def three_steps(engine: Engine) -> tuple[Any, bytes]:
        for _ in range(3):
            engine.forward_backward(examples_of(engine), cross_entropy)
            engine.optim_step(1e-3, 1.0)
        drawn = engine.sample([encode(engine, "12>")], Sampling(6), group_size=4)
        return drawn, b"".join(weight.detach().numpy().tobytes() for weight in engine.trainable.values())

    three_steps(engine)
    (tmp_path / "state").mkdir()
    engine.save_state(tmp_path / "state")
    onward = three_steps(engine)
    restored = Engine.restore(spec, tmp_path / "state", source=str(folder), device=CPU)
    assert three_steps(restored) == onward
    engine.load_state(tmp_path / "state")
    assert three_steps(engine) == onward


def test_saved_state_is_safetensors_and_json_alone(tmp_path: Path) -> None:
    a_preset().save_state(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}


def test_a_saved_preset_loads_as_any_transformers_model_with_tied_embeddings_and_the_same_logits(
    tmp_path: Path,
) -> None:
    engine = a_preset()
    engine.save_weights(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer("31415>")["input_ids"]])
    torch.testing.assert_close(model(ids).logits, engine.model.eval()(ids).logits, atol=0, rtol=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.decode(tokenizer("31415>")["input_ids"]) == "31415>"
    assert tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]
