"""sft, dpo, kto, orpo and reward against TRL's own trainers: from the same rows as text, loss and gradient to 1e-5.

TRL renders, tokenizes, collates and computes its loss by itself, and so do we, so labels and ends are compared with it.

Where TRL departs: its `sigmoid` has no label smoothing, its `aot_unpaired` has and is the same on a single pair. Its
likelihood term of orpo covers the prompts' tokens too, ours the answers' alone: with prompts of one token, which nothing
stands before, both are the same, and with longer ones the odds-ratio part is.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from microtuning_core.domain.datasets import Row
from microtuning_core.domain.spec import ModelSpec
from training_container.data import Rated, render_marked, render_pairs, render_supervised
from training_container.engine import Engine, Example, MicroBatch
from training_container.engine.presets import character_tokenizer, preset_model
from training_container.losses import bradley_terry_loss, cross_entropy, dpo_loss, kto_loss, orpo_loss
from training_container.recipes import kto
from training_container.recipes.preference import compared_pairs, examples_of

trl = pytest.importorskip("trl", reason="the oracle is an extra: pip install microtuning[oracle]")
datasets = pytest.importorskip("datasets")

CLOSE = 1e-5
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Answers of unlike lengths; none of a row is the other's beginning.
PAIRS = [
    {"prompt": "31>", "chosen": "13", "rejected": "31!"},
    {"prompt": "4022>", "chosen": "0224, surely.", "rejected": "4"},
    {"prompt": "9>", "chosen": "9", "rejected": "No answer to this at all"},
    {"prompt": "Sort 567>", "chosen": "567", "rejected": "765"},
]
MARKED = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}
    for pair, good in zip(PAIRS, [True, False, True, True], strict=True)
]


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant", "completion": "assistant"}
    return {name: [{"role": roles[name], "content": value}] if name in roles else value for name, value in row.items()}


def rows_of(values: list[dict[str, Any]]) -> list[Row]:
    return [Row(each, "rows.jsonl", line) for line, each in enumerate(values, 1)]


@pytest.fixture(autouse=True)
def their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = character_tokenizer([chr(code) for code in range(10, 127)])
    found.chat_template = TEMPLATE
    return found


def as_if_trained(model: Any, *, by: float = 2.0) -> Any:
    """Fresh weights answer nearly uniformly."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(by)
    return model.eval()


def a_policy(tokenizer: Any, *, seed: int = 3) -> Any:
    return as_if_trained(preset_model("tiny-decoder", tokenizer, seed=seed))


def a_lora() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")


def an_adapted(tokenizer: Any) -> Any:
    """A policy with an adapter that has moved away from nothing."""
    model = get_peft_model(a_policy(tokenizer), a_lora())
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=chance))
    return model.eval()


# --- both sides ------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    loss: float
    gradient: dict[str, Tensor]


def engine_of(model: Any, tokenizer: Any, *, head: Any = "policy") -> Engine:
    spec = ModelSpec(arch="tiny-decoder")
    return Engine(copy.deepcopy(model), tokenizer, spec=spec, source="", seed=0, head=head)


def ours(engine: Engine, examples: list[Example], loss: Any, *, rows: int | None = None) -> Found:
    engine.micro_batch_rows = rows
    value = engine.forward_backward(examples, loss, whole_groups=True)["loss"]
    return Found(value, {name: weight.grad for name, weight in engine.trainable.items()})  # type: ignore[misc]


def a_trainer(kind: Any, config: Any, folder: Any, model: Any, tokenizer: Any, rows: list[Any], **options: Any) -> Any:
    """TRL's trainer of a copy of the model, with all rows as one batch.

    options: of its arguments; but a reference model (`ref_model`) and a new adapter (`peft_config`) are the trainer's.
    """
    given = {name: options.pop(name) for name in ("ref_model", "peft_config") if name in options}
    arguments = config(
        str(folder), per_device_train_batch_size=len(rows), use_cpu=True, report_to=[], bf16=False,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    return kind(
        model=copy.deepcopy(model), processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(rows),
        args=arguments, **given,
    )  # fmt: skip


def batch_of(trainer: Any) -> dict[str, Any]:
    return dict(trainer.data_collator(list(trainer.train_dataset)))


def theirs(trainer: Any, compute: Callable[[], Tensor], **changes: Any) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(trainer, name, value)
        trainer.model.train()
        trainer.model.zero_grad()
        loss = compute()
        loss.backward()
    gradient = {
        name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if weight.grad is not None
    }
    return Found(float(loss.detach()), gradient)


def assert_close(found: Found, expected: Found, what: str) -> None:
    assert found.gradient.keys() == expected.gradient.keys()
    largest = max(float(each.abs().max()) for each in expected.gradient.values())
    assert largest > 1e-3, "a comparison of nothing with nothing"
    apart = max(float((found.gradient[name] - expected.gradient[name]).abs().max()) for name in found.gradient)
    print(f"{what}: loss {abs(found.loss - expected.loss):.1e}, gradient {apart:.1e} (of {largest:.1e}) from TRL's")
    assert abs(found.loss - expected.loss) < CLOSE
    assert apart < CLOSE * max(1.0, largest)  # float32 has no more digits


# --- sft -------------------------------------------------------------------------------------------------------------

TALK = [
    [("user", "12"), ("assistant", "one two"), ("user", "3"), ("assistant", "three")],
    [("system", "Count."), ("user", "7"), ("assistant", "seven, I think")],
]
TAUGHT: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "whole texts": ([{"text": "31>13"}, {"text": "All of this is learned, from its second letter on."}], {}),
    "completions": ([{"prompt": each["prompt"], "completion": each["chosen"]} for each in PAIRS], {}),
    "completions in a chat": (
        [as_chat({"prompt": each["prompt"], "completion": each["chosen"]}) for each in PAIRS],
        {},
    ),
    "the assistant's messages": (
        [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in TALK],
        {"assistant_only_loss": True},
    ),
    "cut": ([{"prompt": each["prompt"], "completion": each["rejected"]} for each in PAIRS], {"max_length": 12}),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_sft_is_trls(name: str, tokenizer: Any, tmp_path: Any) -> None:
    values, options = TAUGHT[name]
    model = a_policy(tokenizer)
    trainer = a_trainer(trl.SFTTrainer, trl.SFTConfig, tmp_path, model, tokenizer, values, **options)
    expected = theirs(trainer, lambda: trainer.compute_loss(trainer.model, batch_of(trainer)))
    rendered = render_supervised(rows_of(values), tokenizer, options.get("max_length", 1024))
    assert not rendered.dropped
    for rows in (None, 1):
        assert_close(ours(engine_of(model, tokenizer), rendered.examples, cross_entropy, rows=rows), expected, name)


# --- dpo -------------------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """A policy, what it is held to, and TRL's trainer of both."""

    engine: Callable[[], Engine]
    reference: Callable[[list[Example]], list[list[float]]]
    trainer: Any


@pytest.fixture(scope="module", params=["adapter off", "a reference model", "a reference model, chat"])
def held(request: pytest.FixtureRequest, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(held, rows) of dpo."""
    rows = [as_chat(row) for row in PAIRS] if "chat" in request.param else PAIRS
    folder = tmp_path_factory.mktemp("dpo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return a_held(trl.DPOTrainer, trl.DPOConfig, folder, tokenizer, rows, with_adapter="off" in request.param), rows


def a_held(kind: Any, config: Any, folder: Any, tokenizer: Any, rows: list[Any], *, with_adapter: bool) -> Held:
    if with_adapter:
        # An adapter that TRL is given is its reference; of one that it makes, the model without it is.
        model = an_adapted(tokenizer)
        trainer = a_trainer(kind, config, folder, a_policy(tokenizer), tokenizer, rows, peft_config=a_lora())
        trainer.model.load_state_dict(model.state_dict())
        reference = partial(engine_of(model, tokenizer).forward, reference=True)
        return Held(partial(engine_of, model, tokenizer), reference, trainer)
    model, other = a_policy(tokenizer), a_policy(tokenizer, seed=4)
    trainer = a_trainer(kind, config, folder, model, tokenizer, rows, ref_model=copy.deepcopy(other))
    return Held(partial(engine_of, model, tokenizer), engine_of(other, tokenizer).forward, trainer)


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_dpo_is_trls(kind: Any, beta: float, held: Any, tokenizer: Any) -> None:
    held, rows = held
    trainer = held.trainer
    expected = theirs(
        trainer, lambda: trainer._compute_loss(trainer.model, batch_of(trainer), False),
        loss_types=[kind], loss_weights=[1.0], beta=beta,
    )  # fmt: skip
    found = pairs_under(held, rows, tokenizer, partial(dpo_loss, beta=beta, kind=kind))
    for each in found:
        assert_close(each, expected, f"dpo {kind}, beta {beta}")


def pairs_under(held: Held, rows: list[Any], tokenizer: Any, loss: Any) -> list[Found]:
    """In one micro-batch, and a pair at a time."""
    pairs = compared_pairs(render_pairs(rows_of(rows), tokenizer, 1024).pairs, held.reference)
    return [ours(held.engine(), examples_of(pairs), loss, rows=count) for count in (None, 1)]


def test_dpo_with_label_smoothing_is_trls_pair_by_pair(held: Any, tokenizer: Any) -> None:
    held, rows = held
    trainer = held.trainer

    def mean_over_pairs() -> Tensor:
        single = [trainer.data_collator([row]) for row in trainer.train_dataset]
        losses = [trainer._compute_loss(trainer.model, dict(inputs), False) for inputs in single]
        return sum(losses) / len(losses)  # type: ignore[return-value]

    expected = theirs(
        trainer, mean_over_pairs, loss_types=["aot_unpaired"], loss_weights=[1.0], beta=0.3, label_smoothing=0.2
    )
    for each in pairs_under(held, rows, tokenizer, partial(dpo_loss, beta=0.3, label_smoothing=0.2)):
        assert_close(each, expected, "dpo smoothed")


def test_dpo_with_a_precomputed_reference_is_trls(tokenizer: Any, tmp_path: Any) -> None:
    held = a_held(
        trl.DPOTrainer, partial(trl.DPOConfig, precompute_ref_log_probs=True), tmp_path, tokenizer, PAIRS,
        with_adapter=False,
    )  # fmt: skip
    inputs = batch_of(held.trainer)
    assert {"ref_chosen_logps", "ref_rejected_logps"} <= inputs.keys()
    expected = theirs(held.trainer, lambda: held.trainer._compute_loss(held.trainer.model, inputs, False))
    for each in pairs_under(held, PAIRS, tokenizer, partial(dpo_loss, beta=0.1)):
        assert_close(each, expected, "dpo, precomputed")


def test_metrics_of_dpo_are_trls(held: Any, tokenizer: Any) -> None:
    held, rows = held
    held.trainer._metrics["train"].clear()
    theirs(held.trainer, lambda: held.trainer._compute_loss(held.trainer.model, batch_of(held.trainer), False))
    pairs = compared_pairs(render_pairs(rows_of(rows), tokenizer, 1024).pairs, held.reference)
    metrics = held.engine().forward_backward(examples_of(pairs), partial(dpo_loss, beta=0.1), whole_groups=True)
    of_both = metrics.keys() & held.trainer._metrics["train"].keys()
    assert of_both == metrics.keys() - {"loss"}
    assert {name: metrics[name] for name in of_both} == {
        name: pytest.approx(held.trainer._metrics["train"][name][0], abs=1e-4) for name in of_both
    }


# --- kto -------------------------------------------------------------------------------------------------------------


BOTH, GOOD, BAD = [True, False, True, True], [True] * 4, [False] * 4


@pytest.mark.parametrize(
    ("form", "with_adapter", "marks"),
    [("text", True, BOTH), ("text", False, BOTH), ("text", True, GOOD), ("text", False, BAD), ("chat", False, BOTH)],
    ids=["adapter off", "a reference model", "good alone, adapter off", "bad alone, a reference model", "chat"],
)
def test_kto_is_trls(form: str, with_adapter: bool, marks: list[bool], tokenizer: Any, tmp_path: Any) -> None:
    rows = [row | {"label": label} for row, label in zip(MARKED, marks, strict=True)]
    rows = [as_chat(row) for row in rows] if form == "chat" else rows
    held = a_held(trl.KTOTrainer, trl.KTOConfig, tmp_path, tokenizer, rows, with_adapter=with_adapter)
    trainer = held.trainer
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7, "beta": 0.3}
    expected = theirs(trainer, lambda: trainer._compute_loss(trainer.model, batch_of(trainer), False), **weights)
    rated = kto.compared_rows(render_marked(rows_of(rows), tokenizer, 1024).rows, held.reference)
    kl = kto.divergence(held.engine(), rated)
    assert kl == pytest.approx(trainer._metrics["train"]["kl"][-1], abs=1e-4)
    for count in (None, 3, 1):
        assert_close(kto_of(held.engine(), rated, kl, weights, count), expected, "kto")


def kto_of(engine: Engine, rated: list[Rated], kl: float, weights: dict[str, float], rows: int | None) -> Found:
    good_rows = sum(kto.is_good(each.example) for each in rated)
    loss = partial(kto_loss, kl=kl, good_rows=good_rows, **weights)  # type: ignore[arg-type]
    return ours(engine, [each.example for each in rated], loss, rows=rows)


def test_the_divergence_of_kto_is_trls_where_it_is_above_0(tokenizer: Any, tmp_path: Any) -> None:
    """Between two unlike models either sign comes out; the one that is cut off at 0 shows little."""
    held = a_held(trl.KTOTrainer, trl.KTOConfig, tmp_path, tokenizer, MARKED, with_adapter=False)
    rated = kto.compared_rows(render_marked(rows_of(MARKED), tokenizer, 1024).rows, held.reference)
    batch = batch_of(held.trainer)
    with torch.no_grad():
        expected = held.trainer._compute_kl_logps(held.trainer.model, batch)
        expected = expected - held.trainer._compute_kl_logps(held.trainer.ref_model, batch)
    mates = [each.mismatched for each in rated if each.mismatched]
    answers = held.engine().forward(mates)
    found = [kto.log_ratio(mate, answer) for mate, answer in zip(mates, answers, strict=True)]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


# --- orpo ------------------------------------------------------------------------------------------------------------


def an_orpo(folder: Any, model: Any, tokenizer: Any, rows: list[Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    return a_trainer(ORPOTrainer, ORPOConfig, folder, model, tokenizer, rows, beta=0.3)


def orpo_of(pairs: list[Any], beta: float) -> Any:
    return partial(orpo_loss, beta=beta, chosen_tokens=sum(pair.chosen.trained_tokens for pair in pairs))


def test_orpo_is_trls_where_prompts_are_one_token(tokenizer: Any, tmp_path: Any) -> None:
    rows, model = [row | {"prompt": ">"} for row in PAIRS], a_policy(tokenizer)
    trainer = an_orpo(tmp_path, model, tokenizer, rows)
    expected = theirs(trainer, lambda: trainer.get_batch_loss_metrics(trainer.model, batch_of(trainer))[0])
    pairs = render_pairs(rows_of(rows), tokenizer, 1024).pairs
    for count in (None, 1):
        found = ours(engine_of(model, tokenizer), examples_of(pairs), orpo_of(pairs, 0.3), rows=count)
        assert_close(found, expected, "orpo")


def test_the_odds_ratio_of_orpo_is_trls_whatever_the_prompts(tokenizer: Any, tmp_path: Any) -> None:
    model = a_policy(tokenizer)
    trainer = an_orpo(tmp_path, model, tokenizer, PAIRS)

    def odds_alone() -> Tensor:
        chosen_P, rejected_P, *_ = trainer.concatenated_forward(trainer.model, batch_of(trainer))
        return -trainer.odds_ratio_loss(chosen_P, rejected_P)[0].mean()

    expected = theirs(trainer, odds_alone)
    pairs = render_pairs(rows_of(PAIRS), tokenizer, 1024).pairs
    for count in (None, 1):
        engine = engine_of(model, tokenizer)
        assert_close(ours(engine, examples_of(pairs), odds_part(orpo_of(pairs, 0.3)), rows=count), expected, "odds")


def odds_part(loss: Any) -> Any:
    """The loss less its likelihood term, which is linear in log-probabilities."""
    tokens = loss.keywords["chosen_tokens"]

    def part(logprobs_N: Tensor, batch: MicroBatch) -> Any:
        value, metrics = loss(logprobs_N, batch)
        return value + batch.per_row(logprobs_N)[0::2].sum() / tokens, metrics

    return part


# --- reward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "chat"])
@pytest.mark.parametrize("center_coef", [0.0, 0.3])
def test_a_reward_model_is_trls(center_coef: float, form: str, tokenizer: Any, tmp_path: Any) -> None:
    rows = [as_chat(row) for row in PAIRS] if form == "chat" else PAIRS
    model = as_if_trained(preset_model("tiny-decoder", tokenizer, seed=3, head="score"))
    trainer = a_trainer(
        trl.RewardTrainer, trl.RewardConfig, tmp_path, model, tokenizer, rows,
        center_rewards_coefficient=center_coef or None,
    )  # fmt: skip
    expected = theirs(trainer, lambda: trainer.compute_loss(trainer.model, batch_of(trainer)))
    pairs = render_pairs(rows_of(rows), tokenizer, 1024).pairs
    for count in (None, 1):
        found = ours(
            engine_of(model, tokenizer, head="score"), examples_of(pairs),
            partial(bradley_terry_loss, center_coef=center_coef), rows=count,
        )  # fmt: skip
        assert_close(found, expected, f"reward, {form}, center {center_coef}")
