"""Steps of ours against steps of TRL 1.16 on the same work, in interleaved rounds: docs/benchmarks.md.

    python -m tests.benchmarks.bench_trl [--rows grpo-7,sft] [--rounds 5] [--keep]

Before a ratio is printed both sides take one step from the same weights, on the same rows in the same order and (where they
draw) with the same random numbers; completions, rewards, number of trained tokens, loss, gradient and the new weights must
agree, or the row is refused. Needs the extra `oracle`. On a GPU where there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# One thread a side, before torch reads them.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers

from .bench_trl_ours import Measured, mean_of_last, ours
from .bench_trl_work import Work, device, in_order, keep_model, rows_of
from .report import show

GRPO_7 = Work("grpo-7", "GRPO step, prompt 7, vocabulary 49")
GRPO_121 = Work("grpo-121", "GRPO step, prompt 121, 16 samples a prompt", prompt_tokens=121, steps=4, warm_batch=32)
STEPS = (
    GRPO_7,
    GRPO_121,
    dataclasses.replace(GRPO_7, name="lora-7", title="GRPO step with LoRA, prompt 7", adapter="lora"),
    dataclasses.replace(GRPO_121, name="lora-121", title="GRPO step with LoRA, prompt 121", adapter="lora", steps=3),
    Work("grpo-32k", "GRPO step, prompt 7, vocabulary 32k", batch=4, steps=3, vocabulary=32_000, warm_batch=16),
    Work("sft", "SFT, log-normal lengths, 32 rows a step", "sft", batch=32, steps=9),
    Work("dpo", "DPO, log-normal lengths, 32 pairs a step", "dpo", batch=32, steps=7),
    dataclasses.replace(
        GRPO_7, name="dropped-7", title="GRPO step, prompt 7, groups without spread dropped", reward="exact"
    ),
)
SORTING = Work(
    "reward", "time to reward 0.85, sorting six digits", reward="exact", steps=200, learning_rate=3e-4, warm_steps=120
)
MEMORY = dataclasses.replace(GRPO_121, name="memory-121", title="peak memory, GRPO, prompt 121")
REWARD = 0.85
# To reach, and beyond.
GOALS = {
    "grpo-7": (2.0, 2.8), "grpo-121": (7.0, 10.0), "lora-7": (1.8, 2.5), "lora-121": (8.0, 12.0), "grpo-32k": (3.3, 5.0),
    "sft": (2.7, 3.5), "dpo": (3.0, 3.5), "reward": (3.0, 4.0), "memory-121": (0.6, 0.45),
}  # fmt: skip
NAMES = [*(work.name for work in STEPS), SORTING.name, MEMORY.name]

CLOSE, CLOSE_GRADIENT, CLOSE_WEIGHTS = 1e-5, 1e-4, 1e-2
# How far the mean numbers of trained tokens may be apart when each side draws by its own numbers.
CLOSE_TOKENS = 0.05
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench-trl: begin -->", "<!-- bench-trl: end -->"

Row = dict[str, Any]


class Differs(Exception):
    """The two sides do not do the same work, so there is no ratio."""


# --- the same work -------------------------------------------------------------------------------------------------------


def check(work: Work, model: Path, folder: Path) -> dict[str, float]:
    """How far the two sides' first steps are apart.

    Raises:
        Differs: further than rounding explains.
    """
    from .bench_trl_theirs import theirs

    one = dataclasses.replace(work, steps=1)
    rows = rows_of(one)
    our, their = (
        ours(one, model, rows, folder / "ours", look=True),
        theirs(one, model, in_order(rows), folder / "theirs", look=True),
    )
    if our.first["rows"] != their.first["rows"] and work.reward != "exact":
        raise Differs(f"{work.name}: the trained tokens differ")
    if our.tokens[:1] != their.tokens[:1]:
        raise Differs(f"{work.name}: {our.tokens[:1]} tokens are trained, {their.tokens[:1]} by TRL")
    found = {
        "reward": max((abs(a - b) for a, b in zip(our.rewards, their.rewards, strict=True)), default=0.0),
        "loss": abs(our.first["loss"] - their.first["loss"]),
        "gradient": apart(our.first["gradient"], their.first["gradient"]),
        "weights": moved_apart(our, their, work, model),
    }
    limits = {"reward": CLOSE, "loss": CLOSE, "gradient": CLOSE_GRADIENT, "weights": CLOSE_WEIGHTS}
    if far := {name: value for name, value in found.items() if not value <= limits[name]}:
        raise Differs(f"{work.name}: {far} from TRL's, where {limits} is allowed")
    return found


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Distance of all weights together, relative to the norm of the second."""
    if one.keys() != other.keys():
        raise Differs(f"other weights are trained: {sorted(one.keys() ^ other.keys())[:4]}")
    distance = sum(float((one[name] - other[name]).square().sum()) for name in other) ** 0.5
    return distance / sum(float(other[name].square().sum()) for name in other) ** 0.5


def moved_apart(our: Measured, their: Measured, work: Work, model: Path) -> float:
    """Of the steps that the weights took."""
    from .bench_trl_work import policy

    before = {name: weight.detach() for name, weight in policy(work, model)[0].named_parameters()}

    def step(measured: Measured) -> dict[str, torch.Tensor]:
        return {name: weight - before[name] for name, weight in measured.first["weights"].items()}

    return apart(step(our), step(their))


# --- measuring -----------------------------------------------------------------------------------------------------------


def measure_steps(work: Work, model: Path, folder: Path, rounds: int) -> Row:
    """Rounds of both sides, the first step of each a warm-up; within a round they take turns in going first."""
    found = check(work, model, folder)
    rows = rows_of(work)
    our, their = both(lambda side, index: side_of(side)(work, model, rows_for(side, rows), folder / side), rounds)
    refuse_other_lengths(work, our, their)
    ours_ms, theirs_ms = [step_ms(each) for each in our], [step_ms(each) for each in their]
    return row(work, theirs_ms, ours_ms, "ms a step") | {
        "cpu_ratio": statistics.median(map(cpu_ms, their)) / statistics.median(map(cpu_ms, our)),
        "tokens_a_step": (mean_tokens(their), mean_tokens(our)),
        "apart": found,
        "our_phases_ms": phases_ms(our),
    }


def both(run: Callable[[str, int], Any], rounds: int) -> tuple[list[Any], list[Any]]:
    results: dict[str, list[Any]] = {"ours": [], "theirs": []}
    for index in range(rounds):
        for side in ("ours", "theirs") if index % 2 else ("theirs", "ours"):
            results[side].append(run(side, index))
    return results["ours"], results["theirs"]


def side_of(side: str) -> Callable[..., Measured]:
    if side == "ours":
        return ours
    from .bench_trl_theirs import theirs

    return theirs


def rows_for(side: str, rows: list[dict[str, str]], *, seed: int = 0) -> list[dict[str, str]]:
    return rows if side == "ours" else in_order(rows, seed=seed)


def step_ms(measured: Measured) -> float:
    return 1000 * (statistics.median(measured.seconds[1:]) + measured.before_s / len(measured.seconds))


def cpu_ms(measured: Measured) -> float:
    return 1000 * statistics.median(measured.cpu_seconds[1:])


def mean_tokens(results: Sequence[Measured]) -> float:
    return statistics.mean(tokens for each in results for tokens in each.tokens)


def phases_ms(results: Sequence[Measured]) -> dict[str, float]:
    names = ("rollout", "reward", "update")
    return {
        name: 1000 * statistics.median(each.phases.get(name, 0.0) / len(each.seconds) for each in results)
        for name in names
    }


def refuse_other_lengths(work: Work, our: Sequence[Measured], their: Sequence[Measured]) -> None:
    a, b = mean_tokens(our), mean_tokens(their)
    if abs(a - b) > CLOSE_TOKENS * b and work.reward != "exact":
        raise Differs(f"{work.name}: {a:.0f} tokens a step are trained, {b:.0f} by TRL")


def measure_reward(work: Work, model: Path, folder: Path, rounds: int) -> Row:
    """Seconds of training until the mean reward of five steps is REWARD; each round has a seed of its own."""

    def until(rewards: list[float]) -> bool:
        return mean_of_last(rewards) >= REWARD

    def run(side: str, seed: int) -> Measured:
        rows = rows_of(work, seed=seed)
        ordered = rows_for(side, rows, seed=seed)
        return side_of(side)(work, model, ordered, folder / side, seed=seed, until=until)

    our, their = both(run, rounds)
    for each in (*our, *their):
        if not until(each.rewards):
            raise Differs(f"{work.name}: {len(each.seconds)} steps gave {mean_of_last(each.rewards):.3f} only")
    found = row(work, [sum(each.seconds) for each in their], [sum(each.seconds) for each in our], "s")
    steps = [statistics.median(len(each.seconds) for each in side) for side in (their, our)]
    first = statistics.mean(each.rewards[0] for each in (*our, *their))
    return found | {"steps": steps, "first_reward": first}


def measure_memory(work: Work, model: Path, folder: Path, rounds: int) -> Row:
    """Peak of a process that does nothing else, its libraries included; on a GPU that of the device's memory."""
    our, their = both(lambda side, _: peak_of(side, work, model, folder), max(1, rounds // 2))
    return row(work, their, our, "MB")


def peak_of(side: str, work: Work, model: Path, folder: Path) -> float:
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--side",
        side,
        "--model",
        str(model),
        "--folder",
        str(folder / side),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def in_a_process_of_its_own(side: str, model: Path, folder: Path) -> None:
    side_of(side)(MEMORY, model, rows_for(side, rows_of(MEMORY)), folder)
    print(torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else peak_mb())


def peak_mb() -> float:
    """Of this process since it was executed: getrusage's peak would begin with that of the process it was forked from."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def row(work: Work, theirs_: list[float], ours_: list[float], unit: str) -> Row:
    """Medians, and the ratio of each round for its spread. Memory is better the smaller, so its ratio is turned round."""
    turned = unit == "MB"
    ratios = sorted((b / a if turned else a / b) for a, b in zip(theirs_, ours_, strict=True))
    their, our = statistics.median(theirs_), statistics.median(ours_)
    return {
        "row": work.name, "work": work.title, "unit": unit, "trl": their, "ours": our,
        "ratio": our / their if turned else their / our, "spread": (ratios[0], ratios[-1]),
        "goal": GOALS.get(work.name),
    }  # fmt: skip


# --- showing -------------------------------------------------------------------------------------------------------------


def shown(found: Row) -> Row:
    low, high = found["spread"]
    sign = "≤" if found["unit"] == "MB" else "≥"
    return {
        "work": found["work"],
        "TRL": f"{found['trl']:.4g} {found['unit']}",
        "ours": f"{found['ours']:.4g} {found['unit']}",
        "ratio": f"{found['ratio']:.2f}x",
        "rounds": f"{low:.2f}-{high:.2f}",
        "goal": f"{sign} {found['goal'][0]:g}x" if found["goal"] else "",
        "beyond": f"{found['goal'][1]:g}x" if found["goal"] else "",
    }


def markdown(found: Sequence[Row], rounds: int) -> str:
    table = [shown(each) for each in found]
    lines = [list(table[0]), ["---"] * len(table[0]), *(list(each.values()) for each in table)]
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_name()}, one thread a side"
    said = f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}, {rounds} rounds."
    return "\n".join([said, "", *("| " + " | ".join(line) + " |" for line in lines)])


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {named[0] if named else platform.machine()}"


def keep(text: str) -> None:
    """Put the table where docs/benchmarks.md has its own."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")
    print(f"written to {PAGE.relative_to(PAGE.parents[1])}")


def measure(names: Sequence[str], rounds: int) -> tuple[list[Row], list[str]]:
    """Rows that were measured, and why others were not."""
    found, refused = [], []
    with tempfile.TemporaryDirectory(prefix="microtuning-bench-") as scratch:
        for work in (*STEPS, SORTING, MEMORY):
            if work.name not in names:
                continue
            folder = Path(scratch) / work.name
            folder.mkdir()
            model = folder / "model"
            keep_model(work, model)
            how = {SORTING.name: measure_reward, MEMORY.name: measure_memory}.get(work.name, measure_steps)
            try:
                found.append(how(work, model, folder, rounds))
                print(" · ".join(value for value in shown(found[-1]).values() if value), flush=True)
            except Differs as error:
                refused.append(str(error))
                print(f"refused: {error}", flush=True)
    return found, refused


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--keep", action="store_true", help="write the table into docs/benchmarks.md")
    options.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    options.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    # peft 0.21 asks transformers 5.24 by a name that goes in version 6.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    if given.side:
        in_a_process_of_its_own(given.side, given.model, given.folder)
        return 0
    names = given.rows.split(",")
    if unknown := set(names) - set(NAMES):
        options.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    print(f"rows: {', '.join(names)}; {given.rounds} rounds on {device()}", flush=True)
    found, refused = measure(names, given.rounds)
    if found:
        show("bench-trl", [shown(each) for each in found], rounds=given.rounds, details=found, refused=refused)
    if given.keep:
        keep(markdown(found, given.rounds))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
