"""Builders of whole /opt/ml trees, and two ways to run one: as real processes, or inside this one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from training_container.job import read_job, unpack_code
from training_container.paths import MlTree
from training_container.supervisor import LIBRARIES

for library, wanted in LIBRARIES.items():  # before torch is loaded, as the supervisor does it
    os.environ.setdefault(library, wanted)

CASES = Path(__file__).parents[1] / "cases"
RUN_ID = "default-test-0a1b2c3d4e5f"
REWARDS = """
def share_sorted(completions, answer, **kw):
    return [sum(x == y for x, y in zip(c, a)) / len(a) - abs(len(c) - len(a)) / 9 for c, a in zip(completions, answer)]

def length(completions, **kw):
    return [float(len(c)) for c in completions]
"""


def pytest_configure(config: pytest.Config) -> None:
    # peft 0.21 asks transformers 5.24 by a name that goes in version 6.
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing`:FutureWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("training")


def sort_rows(count: int, *, digits: int = 4, seed: int = 0) -> list[dict[str, str]]:
    chance = random.Random(seed)
    drawn = ["".join(chance.choice("0123456789") for _ in range(digits)) for _ in range(count)]
    return [
        {"prompt": f"{text}>", "answer": "".join(sorted(text)), "completion": "".join(sorted(text))} for text in drawn
    ]


@dataclass
class Box:
    """One job's tree, and what came out of it."""

    tree: MlTree
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.tree.output_data / "metrics.jsonl"
        text = path.read_text("utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a reader may see half of a line that is being written
        return [json.loads(line, parse_constant=_refuse) for line in whole.splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    @property
    def steps(self) -> list[int]:
        return [each["step"] for each in self.of("metrics")]

    @property
    def progress(self) -> dict[str, Any]:
        return json.loads((self.tree.checkpoints / "progress.json").read_text("utf-8"))

    @property
    def failure(self) -> dict[str, Any]:
        return json.loads(self.tree.failure.read_text("utf-8"))

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.parent.name for path in self.tree.checkpoints.glob("step-*/manifest.json"))

    def manifest(self, step: int) -> dict[str, Any]:
        return json.loads((self.tree.checkpoints / f"step-{step}" / "manifest.json").read_text("utf-8"))

    @property
    def weights_sha256(self) -> str:
        """Of the model that came out, full or adapter."""
        (path,) = self.tree.model.glob("*.safetensors")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def start(self, **environment: str) -> subprocess.Popen[str]:
        """The job as SageMaker starts it."""
        own = {"MICROTUNING_ML_ROOT": str(self.tree.root), "MICROTUNING_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "training_container.supervisor"],
            env=os.environ | own | self.environment | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def supervise(self, **environment: str) -> subprocess.CompletedProcess[str]:
        with self.start(**environment) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def work(self, stop: Callable[[], bool] = lambda: False) -> int:
        """The worker inside this process: no import time, and a stop at a place of the test's choosing."""
        from training_container.worker import work

        self.tree.make_outputs()
        job = read_job({"MICROTUNING_ML_ROOT": str(self.tree.root), "MICROTUNING_TORCH_THREADS": "1"})
        unpack_code(self.tree)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            return work(job, started_at_s=time.monotonic(), restart=None, stop=stop)  # type: ignore[arg-type]

    def wait_for_step(self, step: int, process: subprocess.Popen[str]) -> None:
        ends_at_s = time.monotonic() + 60
        while step not in self.steps:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < ends_at_s, f"step {step} never came"
            time.sleep(0.005)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture
def a_box(tmp_path: Path) -> Callable[..., Box]:
    """Makes a job's tree: `a_box(algorithm={...}, rows=[...], …)`; the test overrides the one thing it is about."""

    def make(
        *,
        name: str = "ml",
        algorithm: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        rows: list[Any] | None = None,
        eval_rows: list[Any] | None = None,
        warm_rows: list[Any] | None = None,
        code: dict[str, str] | None = None,
        reward: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        plan: dict[str, Any] | None = None,
    ) -> Box:
        tree = MlTree(tmp_path / name)
        algorithm = algorithm or {"type": "sft", "batch_size": 4}
        write_rows(tree, "train", rows if rows is not None else sort_rows(16))
        if eval_rows is not None:
            write_rows(tree, "eval", eval_rows)
        if warm_rows is not None:
            write_rows(tree, "warm", warm_rows)
        for file, text in (code or {"rewards.py": REWARDS}).items():
            write_file(tree.channel("code") / file, text)
        if algorithm["type"] == "grpo":
            reward = {"entry": "rewards:share_sorted"} | (reward or {})
        whole = {
            "name": "test", "model": model or {"arch": "Transformer"}, "algorithm": algorithm, "reward": reward,
            "data": {"train": "s3://bucket/train.jsonl"}, "code": {"uri": "s3://bucket/code.zip", "sha256": "0" * 64},
        }  # fmt: skip
        write_file(tree.channel("config") / "spec.json", json.dumps(whole | (spec or {})))
        a_plan = {
            "run_id": RUN_ID, "attempt": 1, "lineage": 1, "instance_type": "ml.m5.large", "count": 1, "spot": False,
            "micro_batch_size": None, "max_runtime_s": 3600, "price_usd_per_hour": "0.115",
        }  # fmt: skip
        write_file(tree.channel("config") / "plan.json", json.dumps(a_plan | (plan or {})))
        return Box(tree)

    return make


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_rows(tree: MlTree, channel: str, rows: list[Any]) -> None:
    write_file(tree.channel(channel) / f"{channel}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def rows() -> Callable[..., list[dict[str, str]]]:
    return sort_rows


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def a_model_dir(tmp_path: Path) -> Callable[..., Path]:
    """A tiny model with random weights as save_pretrained leaves it, knowing all of ASCII."""

    def make(folder: Path | None = None, *, chat_template: str | None = None) -> Path:
        from training_container.engine.presets import character_tokenizer, preset_model

        folder = folder or tmp_path / "base"
        tokenizer = character_tokenizer([chr(code) for code in range(10, 127)])
        tokenizer.chat_template = chat_template
        preset_model("tiny-decoder", tokenizer, seed=5).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def a_lora_box(a_box: Callable[..., Box], a_model_dir: Callable[..., Path]) -> Callable[..., Box]:
    """A box whose model channel holds a tiny base model, trained by LoRA."""

    def make(**changes: Any) -> Box:
        box = a_box(**({"model": {"base": "tests/tiny", "rank": 4, "alpha": 8}} | changes))
        a_model_dir(box.tree.channel("model"), chat_template=CHAT_TEMPLATE)
        return box

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
