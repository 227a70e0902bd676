"""Drawing beside the trainer: vLLM on the same GPU, many times as fast where completions are long.

It gets the weights after every change of them. Its kernels round in another way than the trainer's, so the numbers it drew
with are not the trainer's: `engine.samples_exactly` is false, and the recipe asks the trainer's model before it learns. Its
draws follow from the seed, but resuming to the bit is not promised. vLLM is never needed: without it, without CUDA, for
presets and with `sampler: engine` the trainer's own model draws (sampler.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from microtuning_core.domain.spec import ModelSpec

from ..failures import UserFailure
from .sampler import Completion, Sampling
from .sharding import full

# The trainer's weights, gradients and activations live on the same GPU.
_GPU_SHARE = 0.3


class Sampler(Protocol):
    """What can draw in the engine's place."""

    name: str

    def take_weights(self, model: Any) -> None:
        """Draw with these weights from now on. Every process of a sharded model calls at the same time."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        group_size: int,
        stop_tokens: Sequence[int],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """As the engine's `sample`; `seeds` has one a prompt and is the only source of chance."""


def choose_sampler(
    wanted: Literal["auto", "engine", "vllm"], spec: ModelSpec, source: str, device: torch.device
) -> Sampler | None:
    """None where the engine is to draw itself.

    Raises:
        UserFailure: vllm was asked for, and cannot be had.
    """
    missing = what_vllm_lacks(spec, device)
    if wanted == "vllm" and missing:
        raise UserFailure(
            f"algorithm.sampler is vllm, but {missing}. Use sampler: auto, which takes it where it can be had."
        )
    return None if wanted == "engine" or missing else VllmSampler(spec, source)


def what_vllm_lacks(spec: ModelSpec, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "this machine has no GPU"
    if spec.arch:
        return "a preset has no files that it could read"
    return None if importlib.util.find_spec("vllm") else "vllm is not installed in this image"


class VllmSampler:
    """One vLLM engine a process, on that process's GPU."""

    name = "vllm"

    def __init__(self, spec: ModelSpec, source: str) -> None:
        be_torchruns_process()
        self._vllm: Any = importlib.import_module("vllm")
        self._adapted = spec.effective_adapter != "none"
        self._folder = Path(tempfile.mkdtemp(prefix="microtuning-adapter-"))
        self._versions = 0
        adapter = {"enable_lora": True, "max_lora_rank": max(8, spec.rank)} if self._adapted else {}
        quantized = {"quantization": "bitsandbytes"} if spec.effective_adapter == "qlora" else {}
        self._llm = self._vllm.LLM(
            model=source,
            revision=spec.revision,
            gpu_memory_utilization=_GPU_SHARE,
            distributed_executor_backend="external_launcher",
            logprobs_mode="processed_logprobs",  # of the distribution drawn from: after temperature and top_p
            trust_remote_code=False,
            **adapter,
            **quantized,
        )

    def take_weights(self, model: Any) -> None:
        shutil.rmtree(self._adapter_folder, ignore_errors=True)
        self._versions += 1
        if self._adapted:
            model.save_pretrained(self._adapter_folder, save_embedding_layers=False)
        else:
            inner = self._llm.llm_engine.model_executor.driver_worker.model_runner.model
            for name, weight in model.named_parameters():
                inner.load_weights([(name, full(weight.detach()))])
        self._llm.reset_prefix_cache()  # what it holds was computed with the weights before

    @property
    def _adapter_folder(self) -> Path:
        return self._folder / f"version-{self._versions}"

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        group_size: int,
        stop_tokens: Sequence[int],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        if not prompts:
            return []
        wanted = [self._parameters(sampling, group_size, stop_tokens, seed) for seed in seeds]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(asked, sampling_params=wanted, lora_request=self._adapter(), use_tqdm=False)
        return [[as_completion(output) for output in answer.outputs] for answer in answers]

    def _parameters(self, sampling: Sampling, group_size: int, stop_tokens: Sequence[int], seed: int) -> Any:
        return self._vllm.SamplingParams(
            n=group_size,
            max_tokens=sampling.max_new_tokens,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            seed=seed,
            stop_token_ids=list(stop_tokens),
            logprobs=0,  # the drawn token's own, and no other's
            detokenize=False,
        )

    def _adapter(self) -> Any:
        if not self._adapted:
            return None
        request = importlib.import_module("vllm.lora.request").LoRARequest
        # vLLM knows an adapter by its number: a new one for every change, or it would draw with the first for ever.
        return request(f"version-{self._versions}", self._versions, str(self._adapter_folder))


def as_completion(output: Any) -> Completion:
    tokens = list(output.token_ids)
    logprobs = [drawn[token].logprob for token, drawn in zip(tokens, output.logprobs, strict=True)]
    return Completion(tokens, logprobs, finished=output.finish_reason == "stop")


def be_torchruns_process() -> None:
    """vLLM joins the processes that torchrun's variables describe; one process alone describes itself."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights are handed over in this very process
