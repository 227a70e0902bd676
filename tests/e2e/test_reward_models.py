"""A reward model, from pairs to the reward of other runs: given as the finished Run, and named in a spec file."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest

from microtuning_sdk import RewardTrainer, Run, Stage, cli
from microtuning_sdk._rewards import reward_model_of

from .conftest import an_rl_trainer, share_in_place, sort_rows

PAIRS = [
    {"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1]}
    for row in sort_rows(40)
    if row["answer"] != row["answer"][::-1]
][:32]


@pytest.fixture(scope="module")
def taught(stage: Stage) -> Run:
    """A reward model that has seen 32 pairs: digits in order, and the same turned round."""
    return RewardTrainer("Transformer", stage=stage, name="taste").fit(PAIRS, batch_size=16)


def test_a_finished_run_of_pairs_is_the_reward_of_the_next(
    taught: Run, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    run = an_rl_trainer(stage, reward_func=taught, name="by taste").fit(sort_rows(4), batch_size=8)
    assert run.record.spec.reward is not None
    assert run.record.spec.reward.entry == f"model:{reward_model_of(taught)}"
    rollouts = run.rollouts()
    scores = [each["reward"] for each in rollouts]
    assert len(scores) == 8
    assert all(math.isfinite(score) for score in scores)
    # One number for the text that was said, and not the same for everything.
    said = {(each["prompt"], re.sub("<(eos|pad|unk)>", "", each["completion"])) for each in rollouts}
    assert len({round(score, 4) for score in scores}) == len(said) > 1
    assert cli.main(["runs", "rollouts", run.run_id, "--best", "--stage", "local"]) == 0
    summary, head, *lines = capsys.readouterr().out.splitlines()
    assert summary.startswith("step 2: 8 completions, reward ")
    assert head.split() == ["times", "reward", "advantage", "tokens", "row", "prompt", "completion"]
    shown = [float(line.split()[1]) for line in lines]
    assert shown == sorted(shown, reverse=True)
    assert (shown[0], shown[-1]) == pytest.approx((max(scores), min(scores)), abs=1e-3)


def test_an_adapter_on_a_model_of_ones_own_is_a_reward_with_its_base(taught: Run, stage: Stage, tmp_path: Path) -> None:
    folder = taught.model.download(tmp_path / "model")
    adapted = RewardTrainer(model=folder, rank=2, stage=stage, name="adapted taste").fit(PAIRS[:16], batch_size=16)
    run = an_rl_trainer(stage, reward_func=[(adapted, 2.0)], name="by adapted taste").fit(sort_rows(2), batch_size=8)
    (part,) = run.record.spec.reward.named_parts.values()  # type: ignore[union-attr]
    assert part.base == adapted.record.spec.model.base
    assert all(each["reward"] == 2.0 * each["components"]["model"] for each in run.rollouts())


def test_a_spec_file_names_its_archive_and_weighs_it_against_a_function(
    taught: Run, stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_rewards.py").write_text(inspect.getsource(share_in_place))
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{row["prompt"]}", "answer": "{row["answer"]}"}}\n' for row in sort_rows(4))
    )
    (tmp_path / "spec.yaml").write_text(
        f"""\
name: right and in good taste
model: {{arch: Transformer}}
algorithm: {{type: grpo, batch_size: 8, group_size: 4, max_completion_tokens: 4}}
data: {{train: rows.jsonl}}
reward:
  parts:
    right: {{entry: "my_rewards:share_in_place"}}
    taste: {{entry: "model:{taught.model.uri}", weight: 0.5}}
"""
    )
    assert cli.main(["run", str(tmp_path / "spec.yaml"), "--stage", "local"]) == 0
    run = Run(capsys.readouterr().out.strip(), stage)
    for each in run.rollouts():
        parts = each["components"]
        assert each["reward"] == pytest.approx(parts["right"] + 0.5 * parts["taste"])
    assert cli.main(["runs", "rollouts", run.run_id, "--stage", "local"]) == 0
    head = capsys.readouterr().out.splitlines()[1]
    assert head.split()[:4] == ["times", "reward", "right", "taste"]
