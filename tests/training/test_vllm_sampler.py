"""The seam where another program draws, with a stand-in for vLLM: it needs CUDA, and these tests do not."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from microtuning_core.domain.spec import ModelSpec
from training_container.engine import Completion, Engine, Example, Sampling
from training_container.engine.vllm_sampler import VllmSampler, choose_sampler
from training_container.failures import UserFailure
from training_container.losses import cross_entropy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = [Example([3, 4, 5, 6], [False, True, True, True])]


class Elsewhere:
    """Draws one token a completion: the number of times it was given weights."""

    name = "elsewhere"

    def __init__(self) -> None:
        self.versions = 0
        self.seeds: list[list[int]] = []

    def take_weights(self, model: Any) -> None:
        self.versions += 1

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, group_size: int, seeds: Sequence[int], **_: Any
    ) -> list[list[Completion]]:
        self.seeds.append(list(seeds))
        return [[Completion([self.versions], [-0.5], True)] * group_size for _ in prompts]


def an_engine(seed: int = 3) -> Engine:
    return Engine.build(ModelSpec(arch="Transformer"), source="", texts=["0123456789>"], seed=seed, device=CPU)


def test_another_program_draws_with_the_newest_weights_and_the_engine_says_that_it_did(tmp_path: Path) -> None:
    engine, elsewhere = an_engine(), Elsewhere()
    assert (engine.sampler_name, engine.samples_exactly) == ("engine", True)
    engine.use_sampler(elsewhere)
    assert (engine.sampler_name, engine.samples_exactly) == ("elsewhere", False)
    tokens = []
    for _ in range(3):
        tokens += [engine.sample([[3], [4, 5]], Sampling(4), group_size=2)[1][0].tokens for _ in range(2)]
        engine.forward_backward(ROWS, cross_entropy)
        engine.optim_step(1e-3, 1.0)
    assert tokens == [[1], [1], [2], [2], [3], [3]], "weights go over once after each change, and not twice"
    next(iter(engine.trainable.values())).grad = torch.full_like(next(iter(engine.trainable.values())), torch.inf)
    assert not engine.optim_step(1e-3, 1.0).applied
    assert engine.sample([[3]], Sampling(4))[0][0].tokens == [4]
    assert engine.sample([[3]], Sampling(4))[0][0].tokens == [4]
    (tmp_path / "state").mkdir()
    engine.save_state(tmp_path / "state")
    engine.load_state(tmp_path / "state")
    assert engine.sample([[3]], Sampling(4))[0][0].tokens == [5]


def test_its_seeds_are_the_engines_chance_one_a_prompt_and_the_same_after_a_resume(tmp_path: Path) -> None:
    engine, elsewhere = an_engine(), Elsewhere()
    engine.use_sampler(elsewhere)
    (tmp_path / "state").mkdir()
    engine.save_state(tmp_path / "state")
    for _ in range(2):
        engine.sample([[3], [4], [5]], Sampling(4), group_size=2)
    engine.load_state(tmp_path / "state")
    engine.sample([[3], [4], [5]], Sampling(4), group_size=2)
    first, second, resumed = elsewhere.seeds
    assert len(set(first + second)) == 6
    assert resumed == first


@pytest.mark.parametrize(
    ("spec", "device", "why"),
    [
        (ModelSpec(base="a/b"), CPU, "this machine has no GPU"),
        (ModelSpec(arch="Transformer"), CUDA, "a preset has no files"),
        (ModelSpec(base="a/b"), CUDA, "vllm is not installed"),
    ],
)
def test_vllm_is_taken_where_it_can_be_had_and_refused_in_words_where_it_is_asked_for(
    spec: ModelSpec, device: torch.device, why: str
) -> None:
    assert choose_sampler("auto", spec, "", device) is None
    assert choose_sampler("engine", spec, "", device) is None
    with pytest.raises(UserFailure, match=why):
        choose_sampler("vllm", spec, "", device)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A stand-in for the package: it keeps what it is told, and answers the prompt's first token and a stop token."""
    told = SimpleNamespace(options={}, weights=[], asked=[], resets=0)

    class LLM:
        def __init__(self, **options: Any) -> None:
            told.options = options
            inner = SimpleNamespace(load_weights=told.weights.extend)
            runner = SimpleNamespace(model_runner=SimpleNamespace(model=inner))
            self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

        def reset_prefix_cache(self) -> None:
            told.resets += 1

        def generate(self, asked: Any, *, sampling_params: Any, lora_request: Any, use_tqdm: bool) -> Any:
            told.asked.append((sampling_params, lora_request))
            return [answer(prompt["prompt_token_ids"][0], wanted) for prompt, wanted in zip(
                asked, sampling_params, strict=True)]  # fmt: skip

    def answer(first: int, wanted: Any) -> Any:
        drawn = [{first: SimpleNamespace(logprob=-1.0)}, {1: SimpleNamespace(logprob=-2.0)}]
        output = SimpleNamespace(token_ids=(first, 1), logprobs=drawn, finish_reason="stop")
        cut = SimpleNamespace(token_ids=(first,), logprobs=drawn[:1], finish_reason="length")
        return SimpleNamespace(outputs=[output] * (wanted.n - 1) + [cut])

    package, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    package.LLM, package.SamplingParams = LLM, lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    request.LoRARequest = lambda name, number, path: (name, number, path)  # type: ignore[attr-defined]
    for name, module in (("vllm", package), ("vllm.lora", lora), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")  # so that what the sampler sets goes with the test
    return told


def test_vllm_gets_ids_seeds_and_stops_and_gives_ids_log_probabilities_and_ends(vllm: SimpleNamespace) -> None:
    sampler = VllmSampler(ModelSpec(base="a/b", adapter="none"), "/models/b")
    groups = sampler.sample(
        [[7, 8], [9]], Sampling(5, temperature=0.7, top_p=0.9), group_size=2, stop_tokens=[1], seeds=[11, 12]
    )
    assert groups[0] == [Completion([7, 1], [-1.0, -2.0], True), Completion([7], [-1.0], False)]
    ((wanted, adapter),) = vllm.asked
    assert [(each.n, each.max_tokens, each.temperature, each.top_p, each.seed) for each in wanted] == [
        (2, 5, 0.7, 0.9, 11), (2, 5, 0.7, 0.9, 12),
    ]  # fmt: skip
    assert wanted[0].stop_token_ids == [1]
    assert adapter is None
    assert (vllm.options["model"], vllm.options["logprobs_mode"]) == ("/models/b", "processed_logprobs")
    sampler.sample([[7]], Sampling(5, greedy=True, top_p=0.5), group_size=1, stop_tokens=[1], seeds=[1])
    assert (vllm.asked[1][0][0].temperature, vllm.asked[1][0][0].top_p) == (0.0, 1.0)
    assert sampler.sample([], Sampling(5), group_size=1, stop_tokens=[1], seeds=[]) == []


def test_vllm_gets_all_weights_by_name_or_a_new_adapter_with_a_new_number(
    vllm: SimpleNamespace, a_model_dir: Callable[..., Path]
) -> None:
    folder = a_model_dir()
    full = Engine.build(ModelSpec(base="a/b", adapter="none"), source=str(folder), texts=[], seed=3, device=CPU)
    VllmSampler(ModelSpec(base="a/b", adapter="none"), str(folder)).take_weights(full.model)
    assert [name for name, _ in vllm.weights] == [name for name, _ in full.model.named_parameters()]
    assert vllm.resets == 1
    spec = ModelSpec(base="a/b", rank=4)
    adapted = Engine.build(spec, source=str(folder), texts=[], seed=3, device=CPU)
    adapted.use_sampler(VllmSampler(spec, str(folder)))
    for _ in range(2):
        adapted.sample([[7]], Sampling(5))
        adapted.forward_backward(ROWS, cross_entropy)
        adapted.optim_step(1e-3, 1.0)
    (_, (first, one, before)), (_, (second, two, path)) = vllm.asked
    assert (first, one, second, two) == ("version-1", 1, "version-2", 2)
    assert (Path(path) / "adapter_config.json").exists()
    assert not Path(before).exists(), "a long run would fill the disk"
    assert vllm.options["enable_lora"]
