"""The policy family against TRL's own loss function and advantages, on the same tensors: loss and gradient to 1e-5."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from microtuning_core.domain.spec import ModelSpec
from training_container.advantages import group_advantages
from training_container.engine import Engine, Example, Totals
from training_container.engine.presets import character_tokenizer, preset_model
from training_container.losses import Objective, policy_loss

trl = pytest.importorskip("trl", reason="the oracle is an extra: pip install microtuning[oracle]")
datasets = pytest.importorskip("datasets")

CLOSE = 1e-5
TEMPERATURE, LONGEST = 0.7, 9
PROMPT_LENGTHS, COMPLETION_LENGTHS = [3, 3, 3, 3, 7, 7, 7, 7], [1, 4, 9, 2, 6, 9, 3, 5]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A tiny model, its tokenizer, and TRL's trainer of it; variants set the trainer's attributes, which its loss reads."""
    torch.set_num_threads(1)
    tokenizer = character_tokenizer(["0123456789>"])
    model = preset_model("tiny-decoder", tokenizer, seed=3)
    with torch.no_grad():
        for weight in model.parameters():  # as if trained: fresh weights answer nearly uniformly
            weight.mul_(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.GRPOTrainer(
            model=copy.deepcopy(model),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=datasets.Dataset.from_list([{"prompt": "1>"}] * 8),
            args=trl.GRPOConfig(
                str(tmp_path_factory.mktemp("trl")), per_device_train_batch_size=8, num_generations=4, use_cpu=True,
                report_to=[], max_completion_length=LONGEST, temperature=TEMPERATURE, bf16=False,
            ),
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    return model, tokenizer, trainer


@pytest.fixture(scope="module")
def rloo(parts: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, tokenizer, _ = parts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trl.RLOOTrainer(
            model=copy.deepcopy(model),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=datasets.Dataset.from_list([{"prompt": "1>"}] * 8),
            args=trl.RLOOConfig(
                str(tmp_path_factory.mktemp("rloo")), per_device_train_batch_size=8, num_generations=4, use_cpu=True,
                report_to=[], max_completion_length=LONGEST, bf16=False, beta=0.0, normalize_advantages=False,
            ),
        )  # fmt: skip


@dataclass
class Drawn:
    """Rows as both sides see them; log-probabilities lie as far from the model's as after some updates."""

    rows: list[tuple[list[int], list[int], list[bool]]]
    advantages: list[float]
    old: list[list[float]]
    sampled: list[list[float]]
    reference: list[list[float]]

    def examples(self) -> list[Example]:
        return [
            Example(
                [*prompt, *completion], [False] * len(prompt) + mask, advantage,
                old_logprobs=only(old, mask), sampled_logprobs=only(sampled, mask),
                reference_logprobs=only(reference, mask), group=index // 4,
            )
            for index, ((prompt, completion, mask), advantage, old, sampled, reference) in enumerate(
                zip(self.rows, self.advantages, self.old, self.sampled, self.reference, strict=True)
            )
        ]  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """TRL's inputs: prompts padded on the left, completions on the right."""
        longest = max(PROMPT_LENGTHS)
        ones = [[1.0] * len(completion) for _, completion, _ in self.rows]
        return {
            "prompt_ids": stacked([[0] * (longest - len(prompt)) + prompt for prompt, _, _ in self.rows]).long(),
            "prompt_mask": stacked(
                [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _, _ in self.rows]
            ).long(),
            "completion_ids": stacked([completion for _, completion, _ in self.rows]).long(),
            "completion_mask": stacked(ones).long(),
            "tool_mask": stacked([mask for _, _, mask in self.rows]).long(),
            "advantages": torch.tensor(self.advantages),
            "old_per_token_logps": stacked(self.old),
            "ref_per_token_logps": stacked(self.reference),
            "num_items_in_batch": torch.tensor(float(sum(sum(mask) for _, _, mask in self.rows))),
        }


def only(values: list[float], mask: list[bool]) -> list[float]:
    return [value for value, kept in zip(values, mask, strict=True) if kept]


def stacked(rows: list[Any]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[float(value) for value in row] + [0.0] * (longest - len(row)) for row in rows])


def drawn(engine: Engine, *, told: bool = False) -> Drawn:
    """told: the second token of every longer completion was not drawn, as a tool's answer in a conversation is not."""
    chance = torch.Generator().manual_seed(11)
    prompts = {length: torch.randint(3, 14, (length,), generator=chance).tolist() for length in set(PROMPT_LENGTHS)}
    rows = []
    for before, after in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True):
        completion = torch.randint(3, 14, (after,), generator=chance).tolist()
        rows.append((prompts[before], completion, [not (told and after > 2 and at == 1) for at in range(after)]))
    whole = [Example([*p, *c], [False] * len(p) + [True] * len(c)) for p, c, _ in rows]
    now = engine.forward(whole, temperature=TEMPERATURE)

    def near(spread: float) -> list[list[float]]:
        return [[value + spread * float(torch.randn((), generator=chance)) for value in row] for row in now]

    advantages = [1.5, -0.5, -0.75, -0.25, 0.0, 2.0, -1.0, -1.0]
    return Drawn(rows, advantages, near(0.25), near(0.4), near(0.5))


def ours(
    model: Any, tokenizer: Any, examples: list[Example], objective: Objective, *, rows: int | None = None,
    totals: Totals | None = None,
) -> dict[str, Any]:  # fmt: skip
    engine = Engine(copy.deepcopy(model), tokenizer, spec=ModelSpec(arch="tiny-decoder"), source="", seed=0)
    engine.micro_batch_rows = rows
    loss = partial(policy_loss, objective=objective)
    metrics = engine.forward_backward(examples, loss, temperature=TEMPERATURE, totals=totals)
    return metrics | {"gradient": {name: weight.grad for name, weight in engine.trainable.items()}}


def theirs(trainer: Any, model: Any, inputs: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(trainer, name, value)
        trainer.model.load_state_dict(model.state_dict())
        trainer.model.train()
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
    gradient = {
        name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if weight.grad is not None
    }
    return {"loss": float(loss.detach()), "gradient": gradient}


def distance(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Of losses, and the largest of any weight's gradient."""
    assert one["gradient"].keys() == other["gradient"].keys()
    apart = max(float((one["gradient"][name] - other["gradient"][name]).abs().max()) for name in one["gradient"])
    return abs(one["loss"] - other["loss"]), apart


BY_TOKEN, BY_ROW, BY_CONSTANT = ({"loss_type": name, "beta": 0.0} for name in ("dapo", "grpo", "dr_grpo"))
VARIANTS = {
    "grpo": (Objective(normalise="sequence"), BY_ROW),
    "bnpo": (Objective(), {"loss_type": "bnpo", "beta": 0.0}),
    "dr_grpo": (Objective(normalise="constant", max_tokens=LONGEST), BY_CONSTANT),
    "dapo": (Objective(), BY_TOKEN),
    "clip higher": (Objective(clip_high=0.28), BY_TOKEN | {"epsilon_high": 0.28}),
    "clip lower": (Objective(clip_low=0.1, normalise="sequence"), BY_ROW | {"epsilon_low": 0.1}),
    # TRL's bound of cispo is the ratio itself.
    "cispo": (Objective("cispo", clip_high=0.28), {"loss_type": "cispo", "beta": 0.0, "epsilon_high": 1.28}),
    "gspo": (
        Objective("gspo", clip_low=0.1, clip_high=0.1, normalise="sequence"),
        BY_ROW | {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
    ),
    "gspo, narrow, by token": (
        Objective("gspo", clip_low=3e-2, clip_high=4e-2),
        BY_TOKEN | {"importance_sampling_level": "sequence", "epsilon_low": 3e-2, "epsilon_high": 4e-2},
    ),
    "k3": (Objective(kl_coef=0.04), BY_TOKEN | {"beta": 0.04}),
    "k3 by row": (Objective(kl_coef=0.5, normalise="sequence"), BY_ROW | {"beta": 0.5}),
    "cispo with k3": (
        Objective("cispo", clip_high=0.28, kl_coef=0.1),
        {"loss_type": "cispo", "beta": 0.1, "epsilon_high": 1.28},
    ),
}  # fmt: skip


@pytest.mark.parametrize("told", [False, True], ids=["one turn", "several turns"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_trls(name: str, told: bool, parts: Any) -> None:
    model, tokenizer, trainer = parts
    objective, changes = VARIANTS[name]
    data = drawn(
        Engine(copy.deepcopy(model), tokenizer, spec=ModelSpec(arch="tiny-decoder"), source="", seed=0), told=told
    )
    found, expected = (
        ours(model, tokenizer, data.examples(), objective),
        theirs(trainer, model, data.tensors(), **changes),
    )
    assert found["clipped"] > 0.02, "a comparison that clips nothing shows little"
    apart = distance(found, expected)
    print(f"{name}: loss {apart[0]:.1e}, gradient {apart[1]:.1e} from TRL's")
    assert max(apart) < CLOSE


def test_weights_of_a_foreign_sampler_are_trls_cut_at_the_same_cap(parts: Any) -> None:
    model, tokenizer, trainer = parts
    data = drawn(Engine(copy.deepcopy(model), tokenizer, spec=ModelSpec(arch="tiny-decoder"), source="", seed=0))
    ratio = (stacked(data.old) - stacked(data.sampled)).exp().clamp(max=1.25)
    inputs = data.tensors() | {"importance_sampling_ratio": ratio}
    changes = BY_TOKEN | {"use_vllm": True, "vllm_importance_sampling_correction": True, "beta": 0.04}
    expected = theirs(trainer, model, inputs, **changes)
    apart = distance(ours(model, tokenizer, data.examples(), Objective(off_policy_cap=1.25, kl_coef=0.04)), expected)
    assert max(apart) < CLOSE


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", ["ppo", "importance_sampling", "cispo", "gspo", "dro"])
def test_micro_batches_and_the_order_of_rows_leave_the_gradient_as_it_is(loss: Any, normalise: Any, parts: Any) -> None:
    model, tokenizer, _ = parts
    data = drawn(Engine(copy.deepcopy(model), tokenizer, spec=ModelSpec(arch="tiny-decoder"), source="", seed=0))
    objective = Objective(loss, normalise=normalise, max_tokens=LONGEST, kl_coef=0.1)
    whole = ours(model, tokenizer, data.examples(), objective, rows=8)
    for rows in (1, 3):
        assert max(distance(ours(model, tokenizer, data.examples(), objective, rows=rows), whole)) < CLOSE
    assert max(distance(ours(model, tokenizer, data.examples()[::-1], objective, rows=3), whole)) < CLOSE


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", ["ppo", "importance_sampling", "cispo", "gspo"])
def test_rows_without_an_advantage_may_be_left_out_and_counted(loss: Any, normalise: Any, parts: Any) -> None:
    model, tokenizer, _ = parts
    data = drawn(Engine(copy.deepcopy(model), tokenizer, spec=ModelSpec(arch="tiny-decoder"), source="", seed=0))
    data.advantages[4:] = [0.0] * 4  # a group without spread
    objective = Objective(loss, normalise=normalise, max_tokens=LONGEST)
    examples = data.examples()
    without = ours(model, tokenizer, examples[:4], objective, totals=Totals.of(examples))
    apart = distance(without, ours(model, tokenizer, examples, objective))
    assert max(apart) < CLOSE


# --- advantages ----------------------------------------------------------------------------------------------------------


REWARDS = [
    [1.0, 0.0, 0.0, 0.5, 0.25, 0.75, 1.0, 0.1],
    [1.0, None, 0.0, 0.5, 0.3, 0.3, 0.3, 0.3],
    [None, None, 2.0, 0.5, 7.0, -1.0, None, 3.0],
]


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize(("kind", "scale"), [("group_std", "group"), ("group_mean", "none"), ("batch_std", "batch")])
def test_advantages_are_trls(kind: Any, scale: str, rewards: list[float | None], parts: Any) -> None:
    _, _, trainer = parts
    assert_same_advantages(trainer, rewards, kind, scale_rewards=scale)


@pytest.mark.parametrize("rewards", REWARDS)
def test_leave_one_out_advantages_are_those_of_trls_rloo(rewards: list[float | None], parts: Any, rloo: Any) -> None:
    assert_same_advantages(rloo, rewards, "leave_one_out")


def assert_same_advantages(trainer: Any, rewards: list[float | None], kind: Any, **changes: Any) -> None:
    values = torch.tensor([math.nan if value is None else value for value in rewards])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(trainer, name, value)
        patch.setattr(trainer, "_calculate_rewards", lambda *_: values[:, None])
        outputs = trainer._generate_and_score_completions([{"prompt": "1>"}] * 8)
    found = group_advantages(values.view(2, 4), kind).flatten()
    torch.testing.assert_close(found, outputs["advantages"], atol=CLOSE, rtol=0)
