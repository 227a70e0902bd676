"""What would go wrong or waste money, said before a machine is paid for.

    data.train  1,600 rows: prompts of 7 tokens (median), 7 at most; exact
    reward      tried on 4 rows: 1.00 for the row's own answer, 0.00 for another's
    machine     ml.m5.large at 0.115 USD an hour, on-demand; about 1.6 GiB of 8 GiB
    recovery    cheap: on-demand at 0.115 USD an hour; a lost machine comes back when … Instead fast: …
    time        25 steps; ml.m5.large: 1 min and 0.01 USD (0.01 to 0.02) on AWS, on demand; by 3 past attempts …

Rows in tokens and tries of the user's code are found by `training_container.preflight` in a process of its own, with a time
limit: nothing of torch, and no code of the user's, is loaded here.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from microtuning_core.domain.catalog import find
from microtuning_core.domain.errors import RunWouldFail
from microtuning_core.domain.planning import RUNTIME_GIB, memory_on
from microtuning_core.domain.prices import is_stale
from microtuning_core.domain.recovery_choice import choice_words
from microtuning_sdk._estimates import estimates, mark, shown_estimate, shown_time, spread, work_of

if TYPE_CHECKING:
    from microtuning_core.domain.calibration import Sample
    from microtuning_sdk._draft import Draft

LIMIT_S = 120.0
_ROWS_COMPARED = 200_000
_CONTAINER = "training_container"


@dataclass(frozen=True)
class Finding:
    """level: "ok", "note" (worth knowing), "warning" (would waste money) or "error" (would end the run)."""

    level: Literal["ok", "note", "warning", "error"]
    about: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Preflight:
    findings: tuple[Finding, ...]

    def raise_if_broken(self) -> None:
        """RunWouldFail, naming everything that would end the run."""
        if broken := [each for each in self.findings if each.level == "error"]:
            found = "; ".join(f"{each.about} {each.found}" for each in broken)
            raise RunWouldFail(found, next_step=broken[0].advice)

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self.findings]


def preflight(ready: Draft, past: Sequence[Sample] = (), silence: str = "") -> Preflight:
    """Everything that can be told of this run before it starts. Nothing is uploaded.

    past: what earlier runs measured. silence: why the stage said nothing of them (both of _estimates.as_the_stage_knows).
    """
    found = [*_about_rows(ready), *_from_container(ready), *_about_machine(ready, past)]
    return Preflight((*found, Finding("warning", "stage", silence)) if silence else tuple(found))


def shown(found: Preflight) -> Iterator[str]:
    """A line a finding; "!" marks a warning, and its advice follows."""
    width = max((len(each.about) for each in found.findings), default=0)
    for each in found.findings:
        mark = {"warning": "!", "error": "x"}.get(each.level, " ")
        advice = f". {each.advice}" if each.advice else ""
        yield f"{mark} {each.about.ljust(width)}  {each.found.rstrip('.')}{advice}"


# --- rows ------------------------------------------------------------------------------------------------------------


def _about_rows(ready: Draft) -> Iterator[Finding]:
    """Rows that are there twice, and held-out rows that are trained on."""
    seen = {field: Counter(map(mark, rows[:_ROWS_COMPARED])) for field, rows in ready.rows.items()}
    train, held_out = seen.get("data.train", Counter()), seen.get("data.eval", Counter())
    repeated = sum(count - 1 for count in train.values())
    if train and repeated > 0.01 * sum(train.values()):
        yield Finding(
            "note", "data.train", f"{repeated:,} of {sum(train.values()):,} rows repeat an earlier row",
            "Leave them out, unless they shall weigh more.",
        )  # fmt: skip
    if shared := sum(count for mark, count in held_out.items() if mark in train):
        yield Finding(
            "warning", "data.eval",
            f"{shared:,} of {sum(held_out.values()):,} held-out rows are trained on, and measure what was learned by heart",
            "Hold out other rows.",
        )  # fmt: skip


# --- what the container finds ----------------------------------------------------------------------------------------


def _from_container(ready: Draft) -> list[Finding]:
    if ready.spec.algorithm.type == "script" or not ready.rows:
        return []
    with tempfile.TemporaryDirectory(prefix="microtuning-preflight-") as name:
        folder = Path(name).resolve()
        _write_request(folder, ready)
        told = folder / "findings.jsonl"
        failed = _asked(folder)
        lines = told.read_text("utf-8").splitlines() if told.is_file() else []
    found = [Finding(**json.loads(line)) for line in lines]
    return [*found, Finding("warning", "preflight", failed)] if failed else found


def _write_request(folder: Path, ready: Draft) -> None:
    names = {field: f"{field}.jsonl" for field in ready.rows}
    for field, name in names.items():
        kept = spread(ready.rows[field])
        lines = (json.dumps({"values": each.values, "file": each.file, "line": each.line}) for each in kept)
        (folder / name).write_text("\n".join(lines), "utf-8")
    request = {
        "spec": ready.spec.model_dump(mode="json"),
        "rows": names,
        "totals": {field: len(rows) for field, rows in ready.rows.items()},
        "model": str(ready.model_folder.resolve()) if ready.model_folder else None,
    }
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    (folder / "code").mkdir()
    if ready.code is not None:
        with zipfile.ZipFile(io.BytesIO(ready.code.archive)) as archive:
            archive.extractall(folder / "code")


def _asked(folder: Path) -> str:
    """Runs the container's part; why it did not end well, or ""."""
    home = importlib.util.find_spec(_CONTAINER)
    if home is None or not home.submodule_search_locations:
        return (
            "rows in tokens and the code could not be looked at: the package training_container is not installed here"
        )
    paths = [str(Path(next(iter(home.submodule_search_locations))).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-P", "-m", f"{_CONTAINER}.preflight", str(folder)]
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"was not through in {LIMIT_S:g} s; what it had found until then is above"
    last = (ended.stderr.strip().splitlines() or ["no reason was given"])[-1]
    return f"could not look at everything: {last}" if ended.returncode else ""


# --- machine, time and money -----------------------------------------------------------------------------------------


def _about_machine(ready: Draft, past: Sequence[Sample]) -> Iterator[Finding]:
    plan, machine = ready.plan, find(ready.plan.instance_type)
    need = memory_on(ready.request, plan)
    memory = f"; about {need.total_gib + RUNTIME_GIB:.1f} of {machine.memory_for_training_gib} GiB" if need else ""
    batch = f", {plan.micro_batch_size} rows at a time" if plan.micro_batch_size else ""
    kind = "spot at most " if plan.spot else ""
    yield Finding(
        "ok", "machine", f"{plan.instance_type}, {kind}{plan.price_usd_per_hour} USD an hour on AWS{memory}{batch}"
    )
    if plan.price_as_of and is_stale(plan.price_as_of, datetime.now(UTC).date()):
        yield Finding("note", "machine", f"its price is of {plan.price_as_of}", "See `microtuning prices refresh`.")
    yield from (Finding("note", "machine", notice) for notice in plan.notices)
    yield Finding("ok", "recovery", choice_words(ready.request, plan))
    yield from _about_time(ready, past)


def _about_time(ready: Draft, past: Sequence[Sample]) -> Iterator[Finding]:
    """Of the chosen machine and the next best ones; warnings about the chosen one alone."""
    found, work = estimates(ready, past), work_of(ready)
    if not found or work is None:
        return
    yield Finding("ok", "time", f"{work.steps:,} steps; {shown_estimate(found[0])}")
    yield from (Finding("ok", "instead", shown_estimate(each)) for each in found[1:])
    chosen, budget = found[0], ready.spec.budget_usd
    if budget is not None and chosen.usd > budget:
        yield Finding(
            "warning", "time", f"the estimate is over the budget of {budget} USD, which would end the run",
            "Raise budget_usd, or do less: fewer epochs, max_train_steps.",
        )  # fmt: skip
    elif budget is not None and chosen.high_usd > budget:
        yield Finding("note", "time", f"at the upper end of the range the budget of {budget} USD would end the run")
    if chosen.seconds > ready.plan.max_runtime_s:
        yield Finding(
            "warning", "time", f"the estimate is over the longest run time of {shown_time(ready.plan.max_runtime_s)}",
            "Raise compute.max_runtime_s, or do less.",
        )  # fmt: skip
