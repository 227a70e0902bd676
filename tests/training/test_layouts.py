"""However rows reach the model, values and gradients are those of each row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from microtuning_core.domain.spec import ModelSpec
from training_container.engine import Engine, Example, MicroBatch, Sampling, Totals
from training_container.engine.forward import pick_logprobs
from training_container.engine.layouts import BY_NAME
from training_container.engine.layouts.families import families, shared_prefix
from training_container.engine.presets import character_tokenizer
from training_container.engine.probe import drops_out, sampling_ways, sharing_layouts, usable
from training_container.engine.rows import Costs, Limits, micro_batches, units
from training_container.engine.sampler import Ways, sample

CPU = torch.device("cpu")
VOCABULARY = 41
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
# Windows of 4 tokens are shorter than every prompt: one that is cut wrongly shows.
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=1,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=4, final_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        dropout=0.0,
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=1
    ),
}
SHARING = [name for name in ARCHITECTURES if name not in ("bloom", "mamba")]


def a_model(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
    for weight in model.parameters():  # far from the small weights of a fresh model, where every mask gives the same
        if weight.dim() > 1:
            weight.data *= 4.0
    return model


def with_adapter(model: Any) -> Any:
    """LoRA on every linear layer, with a B that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    dressed = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    for name, weight in dressed.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape) * 0.1
    return dressed


def an_engine(model: Any) -> Engine:
    tokenizer = character_tokenizer(["0123456789>"])
    return Engine(model, tokenizer, spec=ModelSpec(arch="Transformer"), source="", seed=3)


def tokens(count: int, chance: torch.Generator) -> list[int]:
    return torch.randint(2, VOCABULARY, (count,), generator=chance).tolist()


def rows_of(group: int | None, prompt: int, lengths: tuple[int, ...], seed: int = 0) -> list[Example]:
    """Completions of these lengths of one prompt, all tokens trained."""
    chance = torch.Generator().manual_seed(100 * seed + (group or 7))
    beginning = tokens(prompt, chance)
    return [
        Example(
            [*beginning, *tokens(length, chance)],
            [False] * prompt + [True] * length,
            advantages=0.5 - row,
            sampled_logprobs=[-3.0] * length,
            group=group,
        )
        for row, length in enumerate(lengths)
    ]


def a_pair(group: int) -> list[Example]:
    """A chosen and a rejected answer, of which the first tokens are alike too: those are trained in both."""
    chosen, rejected = rows_of(group, 8, (6, 9), seed=1)
    return [chosen, replace(rejected, tokens=[*chosen.tokens[:10], *rejected.tokens[10:]])]


def turns(group: int) -> list[Example]:
    """Two episodes that begin alike and in which what is trained is interrupted by what is not."""
    chance = torch.Generator().manual_seed(group)
    beginning = tokens(6, chance)
    trained = [False] * 8 + [True] * 3 + [False] * 4 + [True] * 2
    return [Example([*beginning, *tokens(11, chance)], trained, group=group) for _ in range(2)]


def all_sorts() -> list[Example]:
    """Groups of four, three, two and one, single tokens, unequal prompts, pairs, turns, and rows without a group."""
    return [
        *rows_of(0, 9, (6, 2, 1, 5)),
        *rows_of(None, 3, (4,)),
        *rows_of(1, 5, (1, 1, 1)),
        *a_pair(2),
        *rows_of(3, 12, (3,)),
        *turns(4),
        *rows_of(None, 1, (7,)),
    ]


def alone(model: Any, examples: list[Example], temperature: float = 1.0) -> Tensor:
    """Log-probability of every trained token [N] by the textbook: one row at a time, one softmax."""
    found = []
    for example in examples:
        logits_T_V = model(input_ids=torch.tensor([example.tokens])).logits[0].float() / temperature
        logprobs_T = logits_T_V.log_softmax(-1)[:-1].gather(-1, torch.tensor(example.tokens[1:])[:, None]).squeeze(-1)
        found.append(logprobs_T[torch.tensor(example.trained[1:])])
    return torch.cat(found)


def gradient_of(model: Any, logprobs_N: Tensor) -> Tensor:
    """Of an uneven combination, over all weights that train."""
    pull_N = torch.linspace(-1.0, 2.0, len(logprobs_N))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad((logprobs_N * pull_N).sum(), weights, allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


def assert_same_gradient(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 1e-5


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "packed", "fork"])
@pytest.mark.parametrize("architecture", SHARING)
def test_every_layout_gives_value_and_gradient_of_each_row_alone_to_1e_5(architecture: str, layout: str) -> None:
    model, examples = a_model(architecture), all_sorts()
    expected_N = alone(model, examples, temperature=0.8)
    found_N = BY_NAME[layout](model, examples, device=CPU, temperature=0.8)
    torch.testing.assert_close(found_N, expected_N, atol=1e-5, rtol=1e-5)
    assert_same_gradient(gradient_of(model, found_N), gradient_of(model, expected_N))


@pytest.mark.parametrize("layout", ["plain", "packed", "fork"])
def test_every_layout_gives_an_adapters_gradient_to_1e_5(layout: str) -> None:
    model, examples = with_adapter(a_model("llama")), all_sorts()
    expected_N = alone(model, examples)
    found_N = BY_NAME[layout](model, examples, device=CPU)
    torch.testing.assert_close(found_N, expected_N, atol=1e-5, rtol=1e-5)
    assert_same_gradient(gradient_of(model, found_N), gradient_of(model, expected_N))


@pytest.mark.parametrize("layout", ["packed", "fork"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sharing_is_right_under_either_attention(layout: str, attention: str) -> None:
    model, examples = a_model("mistral"), all_sorts()
    model.set_attn_implementation(attention)
    torch.testing.assert_close(
        BY_NAME[layout](model, examples, device=CPU), alone(model, examples), atol=1e-5, rtol=1e-5
    )


def test_logits_are_made_where_a_token_is_predicted_and_once_for_the_whole_group() -> None:
    model, examples = a_model("llama"), rows_of(0, 20, (3, 4, 2))
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: seen.append(logits.shape[1]))
    for layout in ("plain", "packed", "fork"):
        BY_NAME[layout](model, examples, device=CPU)
    assert seen == [3 + 4 + 2, 1 + 2 + 3 + 1, 1, 2 + 3 + 1]  # the prompt's last token predicts all three first ones


def test_picked_logprobs_have_the_gradient_of_a_log_softmax_with_several_targets_a_row() -> None:
    chance = torch.Generator().manual_seed(0)
    logits_M_V = torch.randn(3, 7, generator=chance, requires_grad=True, dtype=torch.float64)
    source_N, target_N = torch.tensor([0, 2, 2, 1, 2]), torch.tensor([6, 0, 3, 3, 0])
    found_N = pick_logprobs(logits_M_V, target_N, source_N=source_N, temperature=0.7)
    expected_N = (logits_M_V / 0.7).log_softmax(-1)[source_N, target_N]
    torch.testing.assert_close(found_N, expected_N.float())
    pull_N = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5])
    (found,) = torch.autograd.grad((found_N * pull_N).sum(), logits_M_V)
    (expected,) = torch.autograd.grad((expected_N * pull_N).sum(), logits_M_V)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


# --- families --------------------------------------------------------------------------------------------------------


def test_what_is_shared_is_found_from_the_tokens_and_ends_where_training_begins() -> None:
    def row(ids: list[int], first: int) -> Example:
        return Example(ids, [False] * first + [True] * (len(ids) - first), group=0)

    assert shared_prefix([row([5, 6, 7, 8], 3), row([5, 6, 7, 8, 9], 3)]) == 3
    assert shared_prefix([row([5, 6, 7, 8], 3), row([5, 6, 9, 8, 9], 3)]) == 2
    assert shared_prefix([row([5, 6, 7, 8], 3), row([5, 6, 7, 8, 9], 2)]) == 2
    assert shared_prefix([row([5, 6, 7], 2), row([4, 6, 7], 2)]) == 0


def test_rows_of_a_group_that_begin_differently_are_each_their_own_family() -> None:
    first, second = rows_of(0, 4, (2, 2))
    other = replace(second, tokens=[(second.tokens[0] + 1) % VOCABULARY, *second.tokens[1:]])
    assert [(family.rows, family.prefix) for family in families([first, other])] == [([0], 4), ([1], 4)]


# --- probing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_probe_finds_which_layouts_and_ways_of_drawing_a_model_allows(architecture: str) -> None:
    model = a_model(architecture)
    before = torch.get_rng_state()
    layouts, ways = sharing_layouts(model, CPU), sampling_ways(model, CPU)
    expected = {"bloom": (("fork",), Ways(padded=True)), "mamba": ((), Ways(padded=False))}
    assert (layouts, ways) == expected.get(architecture, (("packed", "fork"), Ways(padded=True, queries=True)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_model_that_ignores_masks_or_positions_is_trained_on_plain_rows() -> None:
    model = a_model("llama")
    inner = model.forward

    def without(names: tuple[str, ...]) -> Callable[..., Any]:
        def forward(input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            return inner(input_ids, **{name: value for name, value in given.items() if name not in names}, **rest)

        return forward

    model.forward = without(("position_ids",))
    assert sharing_layouts(model, CPU) == ()
    model.forward = without(("attention_mask",))
    assert sharing_layouts(model, CPU) == ()


def test_learned_prompts_share_nothing() -> None:
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(a_model("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert sharing_layouts(model, CPU) == ()


def test_dropout_and_recomputed_activations_count_while_training_alone() -> None:
    from peft import LoraConfig, get_peft_model

    model = a_model("llama")
    model.activation_checkpointing_enable()
    assert usable(model.train(), ("packed", "fork")) == ("packed",)
    assert usable(model.eval(), ("packed", "fork")) == ("packed", "fork")
    config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.1, target_modules="all-linear")
    dropping = get_peft_model(a_model("llama"), config)
    assert drops_out(dropping)
    assert usable(dropping.train(), ("packed", "fork")) == ()
    assert usable(dropping.eval(), ("packed", "fork")) == ("packed", "fork")
    assert not drops_out(model)
    assert drops_out(
        transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL, attention_dropout=0.1))
    )


# --- units and micro-batches -----------------------------------------------------------------------------------------

COSTS, WIDE = Costs(token=160_000.0, pair=384.0), Limits(tokens=4096, trained=2**28)


def layouts_of(prompt: int, length: int, members: int) -> set[str]:
    examples = rows_of(0, prompt, (length,) * members)
    return {unit.layout for unit in units(examples, limits=WIDE, costs=COSTS, sharing=("packed", "fork"))}


def test_long_prompts_with_short_answers_are_packed_long_answers_forked_and_single_rows_plain() -> None:
    assert layouts_of(prompt=121, length=10, members=16) == {"packed"}
    assert layouts_of(prompt=121, length=100, members=16) == {"fork"}
    assert layouts_of(prompt=121, length=10, members=1) == {"plain"}


def test_a_group_too_large_for_a_micro_batch_is_parted_and_each_part_shares() -> None:
    examples = rows_of(0, 50, (10,) * 16)
    limits = Limits(tokens=130, trained=2**28)
    found = units(examples, limits=limits, costs=COSTS, sharing=("packed",))
    assert [unit.rows for unit in found] == [list(range(start, start + 8)) for start in (0, 8)]
    assert {(unit.layout, unit.tokens) for unit in found} == {("packed", 50 + 8 * 9)}
    (whole,) = units(examples, limits=limits, costs=COSTS, sharing=("packed",), whole_groups=True)
    assert whole.rows == list(range(16))


def test_a_micro_batch_holds_one_layout_and_no_more_tokens_logits_or_rows_than_allowed() -> None:
    examples = [*rows_of(0, 60, (4,) * 8), *rows_of(None, 30, (5, 6, 7)), *rows_of(1, 60, (4,) * 8)]
    for limits in (WIDE, Limits(90, 2**28), Limits(4096, 40), Limits(4096, 2**28, rows=3)):
        found = units(examples, limits=limits, costs=COSTS, sharing=("packed", "fork"))
        parts = list(micro_batches(found, limits))
        assert sorted(row for part in parts for unit in part for row in unit.rows) == list(range(len(examples)))
        for part in parts:
            assert len({unit.layout for unit in part}) == 1
            assert sum(unit.height for unit in part) * max(unit.width for unit in part) <= limits.tokens
            assert sum(unit.trained for unit in part) <= limits.trained
            assert sum(len(unit.rows) for unit in part) <= (limits.rows or 99)


def test_rows_of_unlike_lengths_part_where_their_padding_costs_more_than_another_call() -> None:
    examples = [example for length in (100, 98, 50, 49, 10) for example in rows_of(None, 4, (length,))]
    parts = {
        padding: [
            [row for unit in part for row in unit.rows]
            for part in micro_batches(units(examples, limits=WIDE, costs=COSTS), Limits(4096, 2**28, padding=padding))
        ]
        for padding in (0, 2, 60, 1000)
    }
    assert parts[1000] == [[0, 1, 2, 3, 4]]
    assert parts[60] == [[0, 1, 2], [3, 4]]
    assert parts[2] == [[0, 1], [2, 3], [4]]
    assert parts[0] == [[0], [1], [2], [3], [4]]


def test_a_call_costs_a_small_model_more_tokens_than_a_large_one_and_a_gpu_more_than_a_cpu() -> None:
    small, large = Costs(token=160e3, pair=384.0, layers=3), Costs(token=8.4e6, pair=4096.0, layers=8)
    assert (small.call("cpu"), large.call("cpu")) == (64 + 187, 64 + 9)
    assert small.call("cuda") > small.call("cpu")


# --- the engine ------------------------------------------------------------------------------------------------------


def reinforced(logprobs_N: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient with an importance ratio, and a term a row."""
    ratio_N = (logprobs_N - batch.sampled_logprobs_N).exp()
    per_row_B = batch.per_row(logprobs_N) ** 2
    loss = -(ratio_N * batch.advantages_N).sum() / batch.totals.tokens + per_row_B.sum() / batch.totals.rows
    return loss, {"ratio": ratio_N.detach().sum() / batch.totals.tokens}


def taken(engine: Engine, examples: list[Example], **options: Any) -> tuple[dict[str, float], Tensor]:
    """Metrics and gradient of a fresh backward."""
    engine.model.zero_grad()
    metrics = engine.forward_backward(examples, reinforced, **options)
    return metrics, torch.cat([weight.grad.flatten() for weight in engine.trainable.values()])


@pytest.fixture(scope="module", params=["llama", "adapter"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield an_engine(with_adapter(a_model("llama")) if request.param == "adapter" else a_model("llama"))


@pytest.mark.parametrize(
    "change",
    [
        "sharing on",
        "one row at a time",
        "three rows at a time",
        "whole groups",
        "other order",
        "without groups",
        "cut small",
    ],
)
def test_no_way_of_cutting_a_batch_changes_its_loss_metrics_or_gradient(
    engine: Engine, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [replace(each, advantages=each.advantages or 0.1) for each in all_sorts()]
    examples = [replace(each, sampled_logprobs=[-3.0] * each.trained_tokens) for each in examples]
    monkeypatch.setattr(engine, "_trusted", ())
    expected, expected_gradient = taken(engine, examples)
    monkeypatch.setattr(engine, "_trusted", ("packed", "fork"))
    options: dict[str, Any] = {}
    if change == "one row at a time":
        monkeypatch.setattr(engine, "micro_batch_rows", 1)
    elif change == "three rows at a time":
        monkeypatch.setattr(engine, "micro_batch_rows", 3)
    elif change == "whole groups":
        options["whole_groups"] = True
    elif change == "other order":
        examples = examples[::-1]
    elif change == "without groups":
        examples = [replace(each, group=None) for each in examples]
    elif change == "cut small":
        monkeypatch.setattr("training_container.engine.core._MAX_TOKENS_CPU", 20)
    found, gradient = taken(engine, examples, **options)
    assert found == pytest.approx(expected, rel=1e-5)
    assert_same_gradient(gradient, expected_gradient)


def test_one_batch_of_eight_rows_trains_like_eight_batches_of_one(engine: Engine) -> None:
    examples = rows_of(0, 9, (6, 2, 1, 5, 3, 3, 8, 4))
    whole, gradient = taken(engine, examples)
    engine.model.zero_grad()
    parts = [engine.forward_backward([each], reinforced, totals=Totals.of(examples)) for each in examples]
    assert sum(part["loss"] for part in parts) == pytest.approx(whole["loss"], rel=1e-5)
    assert_same_gradient(torch.cat([weight.grad.flatten() for weight in engine.trainable.values()]), gradient)


def test_forward_gives_each_row_its_own_whatever_is_shared_and_the_reference_without_the_adapter() -> None:
    model = with_adapter(a_model("llama"))
    engine, examples = an_engine(model), all_sorts()
    with torch.no_grad():
        found = [value for row in engine.forward(examples) for value in row]
        torch.testing.assert_close(torch.tensor(found), alone(model, examples), atol=1e-5, rtol=1e-5)
        reference = [value for row in engine.forward(examples, reference=True) for value in row]
        with model.disable_adapter():
            expected_N = alone(model, examples)
    torch.testing.assert_close(torch.tensor(reference), expected_N, atol=1e-5, rtol=1e-5)
    assert max(abs(one - other) for one, other in zip(found, reference, strict=True)) > 1e-2


# --- drawing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("group_size", [1, 5])
def test_what_is_drawn_has_the_logprobs_of_each_row_alone_to_1e_5(architecture: str, group_size: int) -> None:
    model = a_model(architecture)
    chance = torch.Generator().manual_seed(0)
    prompts = [tokens(count, chance) for count in (9, 2, 5, 9)]
    uniforms_P_G_T = torch.rand(4, group_size, 7, generator=chance)
    drawn = sample(
        model,
        prompts,
        Sampling(7, temperature=1.3),
        group_size=group_size,
        stop_tokens=(1, 2, 3, 4, 5),
        uniforms_P_G_T=uniforms_P_G_T,
        ways=sampling_ways(model, CPU),
    )
    rows = [
        Example([*prompt, *each.tokens], [False] * len(prompt) + [True] * len(each.tokens))
        for prompt, group in zip(prompts, drawn, strict=True)
        for each in group
    ]
    found = [value for group in drawn for each in group for value in each.logprobs]
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), alone(model, rows, 1.3), atol=1e-5, rtol=1e-5)


def test_a_completion_depends_on_its_own_numbers_alone() -> None:
    model = a_model("llama")
    chance = torch.Generator().manual_seed(4)
    prompts = [tokens(count, chance) for count in (30, 3, 12)]
    uniforms_P_G_T = torch.rand(3, 6, 8, generator=chance)

    def drawn(which: slice, members: int, ways: Ways) -> list[list[list[int]]]:
        groups = sample(
            model,
            prompts[which],
            Sampling(8, top_p=0.9),
            group_size=members,
            stop_tokens=(1, 2, 3),
            uniforms_P_G_T=uniforms_P_G_T[which, :members],
            ways=ways,
        )
        return [[each.tokens for each in group] for group in groups]

    together = drawn(slice(0, 3), 6, Ways(queries=True))
    assert drawn(slice(0, 3), 6, Ways(queries=False)) == together
    assert drawn(slice(0, 3), 6, Ways(padded=False)) == together
    assert drawn(slice(1, 2), 6, Ways(queries=True)) == together[1:2]
    assert drawn(slice(0, 3), 1, Ways()) == [group[:1] for group in together]
