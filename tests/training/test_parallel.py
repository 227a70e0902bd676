"""Two processes over gloo train as one does: the same losses, norms and completions to 1e-5, whatever the rows' lengths."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from training_container.engine import Engine
from training_container.engine.parallel import World, buckets
from training_container.engine.presets import character_tokenizer, preset_model

SCRIPT = Path(__file__).with_name("parallel_cases.py")
KINDS = ("full", "lora", "sharded")


def load_cases() -> Any:
    module_spec = importlib.util.spec_from_file_location("parallel_cases", SCRIPT)
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


@dataclass
class Both:
    """What one process and two made of the same cases, and where they left their states."""

    one: dict[str, Any]
    two: dict[str, Any]
    folder: Path
    cases: Any


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("parallel")
    tokenizer = character_tokenizer([chr(code) for code in range(10, 127)])
    preset_model("tiny-decoder", tokenizer, seed=5).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    cases = load_cases()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = json.loads(json.dumps(cases.cases(World(), folder / "base", folder / "one")))
    run_two_processes(folder)
    yield Both(one, json.loads((folder / "results.json").read_text("utf-8")), folder, cases)
    torch.set_num_threads(threads)


def run_two_processes(folder: Path) -> None:
    """As torchrun starts them."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env=os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Every number of two nested structures, ids exactly."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other, tolerance)
    elif isinstance(expected, int):
        assert found == expected
    else:
        assert found == pytest.approx(expected, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["sft", "pairs", "one row", "after"])
def test_two_processes_have_one_process_losses_and_norms_to_1e_5(case: str, kind: str, both: Both) -> None:
    name = f"{case} {kind}"
    close(both.two[name]["steps"], both.one[name]["steps"])


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_draw_the_very_completions_that_one_draws_and_learn_the_same_from_them(
    kind: str, both: Both
) -> None:
    found, expected = both.two[f"grpo {kind}"], both.one[f"grpo {kind}"]
    assert found["tokens"] == expected["tokens"]
    close(found["steps"], expected["steps"])
    close(both.two[f"logprobs {kind}"], both.one[f"logprobs {kind}"])


def test_score_models_recomputing_and_two_calls_before_a_step_come_out_alike(both: Both) -> None:
    for name in ("scores", "scores sharded", "recomputed", "accumulated"):
        close(both.two[name]["steps"], both.one[name]["steps"])


def test_the_sum_of_gradients_is_what_torchs_own_ddp_has_to_1e_6(both: Both) -> None:
    assert both.two["ddp"] < 1e-6


@pytest.mark.parametrize(("kind", "trained"), [("full", 161_088), ("lora", 15_360)])
def test_only_trained_weights_cross_the_wire(kind: str, trained: int, both: Both) -> None:
    """4 bytes a weight between two processes, and one a weight matrix to say that it has a gradient."""
    assert both.two[f"sft {kind}"]["bytes"] == pytest.approx(4 * trained, abs=64)
    assert both.one[f"sft {kind}"]["bytes"] == 0


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_gradients_of_16_bits_send_half_the_bytes_and_lose_less_than_a_hundredth(wire: str, both: Both) -> None:
    found, expected = both.two[f"sft in {wire}"], both.two["sft full"]
    assert found["bytes"] == pytest.approx(expected["bytes"] / 2, abs=64)
    close(found["steps"], expected["steps"], 1e-2)


def test_spread_weights_come_whole_out_of_a_checkpoint_and_go_on_in_one_process(both: Both) -> None:
    for kind in KINDS:
        spec = both.cases.a_spec(kind, World())
        state = both.folder / "two" / f"state {kind}"
        engine = Engine.restore(spec, state, source=str(both.folder / "base"), device=torch.device("cpu"))
        engine.micro_batch_rows = 2
        close(both.cases.trained(engine, both.cases.cross_entropy, both.cases.ROWS)["steps"],
              both.one[f"after {kind}"]["steps"])  # fmt: skip
        assert "lm_head.weight" not in list_tensors(state / "model")


def list_tensors(folder: Path) -> list[str]:
    from safetensors import safe_open

    (path,) = folder.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_from_a_checkpoint_of_one_and_the_second_has_numbers_of_its_own(
    kind: str, both: Both
) -> None:
    close(both.two[f"restored {kind}"]["steps"], both.one[f"after {kind}"]["steps"])
    first, second = both.two[f"chance {kind}"]
    assert first != second


def test_what_processes_tell_each_other(both: Both) -> None:
    assert both.two["shares"] == [[0, 2], [1, 3, 4]]
    assert both.two["once"] == ["rank 0", "rank 0"]
    assert both.two["sum"] == {"both": 3.0, "rank 0": 2.0, "rank 1": 2.0}
    assert both.two["most"] == 4
    assert both.two["absent"] == [[1.0, 1.0], [2.0, 2.0], None]


def test_a_bucket_holds_16_million_numbers_of_one_dtype_or_one_weight() -> None:
    def weight(numbers: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(numbers, dtype=dtype, device="meta"))

    weights = [weight(2**23), weight(2**23), weight(1), weight(2**25), weight(3, torch.bfloat16)]
    assert [[each.numel() for each in bucket] for bucket in buckets(weights)] == [[2**23, 2**23], [1], [2**25], [3]]


def test_a_lone_process_is_a_world_in_which_nothing_is_sent() -> None:
    world = World()
    assert world.share([5, 5]) == [0, 1]
    assert (world.gather("x"), world.once(lambda: 3), world.most(2), world.rounds(7)) == (["x"], 3, 2, 7)
    assert world.add_gradients([]) == 0
