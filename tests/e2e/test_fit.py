"""fit() end to end, and how a run says that it failed or was stopped."""

from __future__ import annotations

import json
import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from microtuning_core.domain.errors import InvalidCode, RunFailed, RunStopped, RunWouldFail
from microtuning_core.domain.layout import parse_s3_uri
from microtuning_sdk import Run, ScriptTrainer, SFTTrainer, Stage, cli

from .conftest import PATIENCE_S, an_rl_trainer, slowly, sort_rows, wait_for_step

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture(scope="module")
def finished(stage: Stage) -> Run:
    """One RL run of four steps, with a warm start, by fit()."""
    warm = {"data": sort_rows(64, 1), "steps": 3, "batch_size": 8}
    trainer = an_rl_trainer(stage, name="sort digits", warm_start=warm)
    return trainer.fit(sort_rows(8), sort_rows(8, 2), epochs=1, batch_size=8)


def everything_of(stage: Stage) -> tuple[list[str], set[str]]:
    """Every object of the tenant's, and every run."""
    keys = sorted(each.key for each in stage.objects.walk("tenants/default/"))
    return keys, {run.run_id for run in stage.runs.list_runs("default")}


def test_fit_trains_and_leaves_metrics_checkpoints_cost_and_a_model(finished: Run, tmp_path: Path) -> None:
    view = finished.view()
    assert (view["status"], len(view["attempts"]), view["attempts"][0]["outcome"]) == ("completed", 1, "completed")
    assert [each["step"] for each in finished.metrics() if "warm_step" not in each] == [1, 2, 3, 4]
    assert view["checkpoints"][-1]["step"] == 4
    assert {"eval_accuracy", "eval_reward"} <= view["metrics"]["first"].keys() & view["metrics"]["last"].keys()
    assert finished.cost().state == "final"
    assert finished.cost().total_usd > Decimal(0)
    assert finished.record.model_version == "sort-digits/v1"
    folder = finished.model.download(tmp_path / "model")
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}


def test_every_log_line_is_there_once_and_in_order(finished: Run) -> None:
    events = [json.loads(line) for line in finished.logs() if line.startswith('{"event"')]
    times = [event["time"] for event in events]
    assert times == sorted(times)
    steps = [event["step"] for event in events if event["event"] == "metrics" and "warm_step" not in event]
    assert steps == [1, 2, 3, 4]


def test_the_commands_show_the_run_as_json(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for command in (
        ["runs", "list"],
        ["runs", "show", finished.run_id],
        ["cost", finished.run_id],
        ["checkpoints", finished.run_id],
    ):
        assert cli.main([*command, "--json", "--stage", "local"]) == 0
        shown[" ".join(command[:2])] = json.loads(capsys.readouterr().out)
    assert finished.run_id in [run["run_id"] for run in shown["runs list"]["runs"]]
    assert shown["runs show"] == finished.view()
    assert Decimal(shown[f"cost {finished.run_id}"]["total_usd"]) == finished.cost().total_usd


def test_what_the_model_said_is_shown_with_its_scores(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = finished.rollouts()
    assert [(each["step"], each["index"]) for each in rollouts] == [(4, index) for index in range(8)]
    assert {each["row"].rpartition(":")[2] for each in finished.rollouts(1)} <= {str(line) for line in range(1, 9)}
    best = [each["reward"] for each in finished.rollouts(order="best")]
    assert best == sorted(best, reverse=True)
    assert cli.main(["runs", "rollouts", finished.run_id, "--worst", "--limit", "2", "--stage", "local"]) == 0
    summary, head, *lines = capsys.readouterr().out.splitlines()
    assert summary.startswith("step 4: 8 completions, reward ")
    assert head.split() == ["times", "reward", "advantage", "tokens", "row", "prompt", "completion"]
    assert len(lines) <= 2


def test_the_users_own_script_runs_as_it_is_on_a_model_beside_it(finished: Run, stage: Stage, tmp_path: Path) -> None:
    shutil.copy(CASES / "seed_script.py", tmp_path)
    finished.model.download(tmp_path / "model")
    trainer = ScriptTrainer(
        "seed_script.py", source_dir=tmp_path, hyperparameters={"model_name": "model", "epochs": 2}, stage=stage
    )
    run = trainer.fit([{"text": "123>123", "weight": 0.5}, {"text": "321>123"}])
    assert [line.split()[0] for line in run.logs() if line.startswith("epoch=")] == ["epoch=0", "epoch=1"]
    assert (run.model.download(tmp_path / "trained") / "model.safetensors").is_file()


def test_a_local_model_is_uploaded_once_and_gets_an_adapter(finished: Run, stage: Stage, tmp_path: Path) -> None:
    folder = finished.model.download(tmp_path / "model")
    trainer = SFTTrainer(model=folder, stage=stage, name="adapted", rank=4, max_length=16)
    run = trainer.fit(sort_rows(16), sort_rows(4), batch_size=8, epochs=1)
    assert run.record.spec.model.base is not None
    base = parse_s3_uri(run.record.spec.model.base)
    assert {each.key.removeprefix(base.key) for each in stage.objects.walk(base.key)} == {
        path.name for path in folder.iterdir()
    }
    assert (run.model.download(tmp_path / "adapter") / "adapter_config.json").is_file()


def test_a_reward_that_raises_is_found_before_anything_is_uploaded_or_started(stage: Stage) -> None:
    def broken(completions: list[str]) -> list[float]:
        raise ValueError("the reward has no answer")

    before = everything_of(stage)
    with pytest.raises(RunWouldFail, match="the reward has no answer"):
        an_rl_trainer(stage, reward_func=broken, name="broken reward").fit(sort_rows(8), batch_size=8)
    assert everything_of(stage) == before


def test_a_reward_that_raises_only_in_the_job_fails_the_run_as_its_users_with_no_second_attempt(stage: Stage) -> None:
    def full(completions: list[str]) -> list[float]:
        if len(completions) > 8:  # as many as preflight tries
            raise ValueError("the reward has no answer")
        return [float(len(text)) for text in completions]

    with pytest.raises(RunFailed, match="the reward has no answer") as failed:
        an_rl_trainer(stage, reward_func=full, name="breaking reward").fit(sort_rows(8), batch_size=16)
    run = Run(failed.value.run_id, stage)
    (attempt,) = run.view()["attempts"]
    assert (attempt["outcome"], attempt["failure_class"]) == ("failed", "user")
    assert any("Traceback" in line or "ValueError" in line for line in run.logs())


def test_a_cancelled_run_is_stopped_and_wait_returns(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    run = an_rl_trainer(stage, reward_func=slowly, name="to be stopped").fit(
        sort_rows(64), batch_size=8, epochs=50, wait=False, logs=True
    )
    wait_for_step(run, 2)
    run.cancel()
    assert run.wait(PATIENCE_S).status == "stopped"
    with pytest.raises(RunStopped, match="was stopped"):
        run.raise_if_unsuccessful()
    assert cli.main(["runs", "wait", run.run_id, "--stage", "local"]) == 3


def test_nothing_is_uploaded_for_a_reward_that_cannot_travel(stage: Stage) -> None:
    import threading

    lock = threading.Lock()
    before = everything_of(stage)
    with pytest.raises(InvalidCode, match=r"captures 'lock', a _thread\.lock"):
        an_rl_trainer(stage, reward_func=lambda completions: [0.0 for _ in completions if lock]).fit(sort_rows(9))
    assert everything_of(stage) == before


def test_supervised_rows_from_a_foreign_bucket_are_copied_with_the_callers_rights(stage: Stage) -> None:
    stage.s3.create_bucket(Bucket="somebody-elses-data")
    body = "".join(json.dumps(row) + "\n" for row in sort_rows(16)).encode()
    stage.s3.put_object(Bucket="somebody-elses-data", Key="parts/a.jsonl", Body=body)
    trainer = SFTTrainer("Transformer", stage=stage, name="foreign data")
    run = trainer.fit("s3://somebody-elses-data/parts/", sort_rows(4), batch_size=8, epochs=1)
    assert run.record.spec.data.train.startswith(f"s3://{stage.bucket}/tenants/default/datasets/")
    assert run.status == "completed"
