"""The rollout log: whole steps, bounded, and no line lost or doubled by a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from microtuning_core.domain.layout import parse_checkpoint_key, rollouts_prefix, step_of_rollout_file
from microtuning_core.domain.spec import CheckpointSpec
from training_container.checkpoints import newest_step, newest_whole, prune
from training_container.rollout_log import RolloutLog, Said, is_chosen

RUN_ID = "default-test-0a1b2c3d4e5f"


def said(text: str, reward: float = 1.0, **more: Any) -> Said:
    return Said("train.jsonl:1", "q", text, reward, **more)


def lines_of(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts" / f"step-{step}.jsonl").read_text("utf-8").splitlines()]


def test_a_line_holds_what_was_said_and_every_component_of_its_score(tmp_path: Path) -> None:
    more = {"components": {"exact": 1.0, "style": math.nan}, "notes": {"why": "ü"}, "advantage": 0.5, "tokens": 2}
    RolloutLog(tmp_path, seed=0).write(3, [said("8", math.nan), said("\ud800", truncated=True, **more)])
    first, second = lines_of(tmp_path, 3)
    assert (first["step"], first["index"], first["row"], first["reward"]) == (3, 0, "train.jsonl:1", None)
    assert (second["completion"], second["components"]) == ("\\ud800", {"exact": 1.0, "style": None})
    assert (second["notes"], second["advantage"], second["truncated"], second["tokens"]) == ({"why": "ü"}, 0.5, True, 2)


def test_a_step_that_is_made_again_is_said_once(tmp_path: Path) -> None:
    for step in (1, 2, 2, 3):
        RolloutLog(tmp_path, seed=0).write(step, [said("a"), said("b")])
    assert [len(lines_of(tmp_path, step)) for step in (1, 2, 3)] == [2, 2, 2]


def test_a_tenth_of_the_completions_is_the_same_tenth_after_a_restart(tmp_path: Path) -> None:
    chosen = [[is_chosen(7, step, index, 0.1) for index in range(1000)] for step in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 70 < sum(chosen[0]) < 130
    RolloutLog(tmp_path, seed=7, share=0.1).write(1, [said(str(index)) for index in range(1000)])
    assert [each["index"] for each in lines_of(tmp_path, 1)] == [i for i, flag in enumerate(chosen[0]) if flag]


def test_a_share_of_nothing_writes_nothing_and_of_all_writes_all(tmp_path: Path) -> None:
    RolloutLog(tmp_path, seed=0, share=0.0).write(1, [said("a")])
    assert not (tmp_path / "rollouts").exists()
    RolloutLog(tmp_path, seed=0, share=1.0).write(1, [said("a")] * 50)
    assert len(lines_of(tmp_path, 1)) == 50


def test_over_the_limit_the_oldest_steps_are_emptied_and_keep_their_files(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, seed=0, max_bytes=16_000)
    for step in range(1, 41):
        log.write(step, [said("x" * 100)] * 10)
    files = {step: path.stat().st_size for path in (tmp_path / "rollouts").iterdir()
             if (step := step_of_rollout_file(path.name)) is not None}  # fmt: skip
    assert sorted(files) == list(range(1, 41))
    assert files[1] == 0 < files[40] <= 1000
    assert 14_000 < sum(files.values()) <= 16_000


def test_nothing_takes_the_log_for_a_checkpoint(tmp_path: Path) -> None:
    RolloutLog(tmp_path, seed=0).write(9, [said("a")])
    prune(tmp_path, CheckpointSpec(keep=1))
    assert newest_step(tmp_path) == -1
    assert newest_whole(tmp_path, lambda name, reason: None) is None
    assert len(lines_of(tmp_path, 9)) == 1
    assert parse_checkpoint_key(f"{rollouts_prefix(RUN_ID, 1)}step-9.jsonl") is None
    assert step_of_rollout_file("step-9.json") is step_of_rollout_file(".step-9.jsonl.tmp") is None
