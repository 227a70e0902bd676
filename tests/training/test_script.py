"""The user's own script, under SageMaker's container contract."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training_container.failures import Failure
from training_container.job import read_job, unpack_code
from training_container.paths import MlTree
from training_container.processes import oom_kills
from training_container.recipes.script import run_script
from training_container.sagemaker_env import command_line, derive

CASES = Path(__file__).parents[1] / "cases"
Box = Callable[..., Any]
TEXTS = [{"text": "one two", "weight": 0.5}, {"text": "three"}]
WRITES_WHAT_IT_SEES = """
import json, os, sys
environment = {key: value for key, value in os.environ.items() if key.startswith("SM_")}
with open(os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], "seen.json"), "w") as file:
    json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "environment": environment}, file)
"""


def script(text: str, hyperparameters: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Changes to a box that make it a run of this script."""
    algorithm = {"type": "script", "entry": "train.py", "hyperparameters": hyperparameters or {}}
    return {"algorithm": algorithm, "code": {"train.py": text}, "rows": TEXTS, **changes}


def seen_by(box: Any) -> dict[str, Any]:
    return json.loads((box.tree.output_data / "seen.json").read_text("utf-8"))


def test_every_hyperparameter_reaches_the_script_with_its_type_and_value(a_box: Box) -> None:
    values = json.loads((CASES / "c49_hparams.json").read_text("utf-8"))
    values |= {f"extra_{number}": number for number in range(101)}
    box = a_box(**script(WRITES_WHAT_IT_SEES))
    (box.tree.channel("config") / "hyperparameters.json").write_text(json.dumps(values), encoding="utf-8")
    done = box.supervise()
    assert done.returncode == 0, done.stderr
    seen = seen_by(box)
    hps = json.loads(seen["environment"]["SM_HPS"])
    assert hps == values
    assert {key: type(value) for key, value in hps.items()} == {key: type(value) for key, value in values.items()}
    assert json.loads(seen["environment"]["SM_TRAINING_ENV"])["hyperparameters"] == values
    assert (seen["environment"]["SM_HP_LOOKS_LIKE_NUMBER"], seen["environment"]["SM_HP_FLAG"]) == ("007", "False")
    flags = dict(zip(seen["argv"][::2], seen["argv"][1::2], strict=True))
    assert flags["--lr"] == "5e-07"
    assert flags["--text"] == values["text"]
    assert json.loads(flags["--nested"]) == values["nested"]
    assert len(flags["--long"]) > 2500
    assert Path(seen["cwd"]) == box.tree.code


def test_sagemakers_own_strings_are_read_as_json_where_they_are_json(a_box: Box) -> None:
    box = a_box(**script(WRITES_WHAT_IT_SEES))
    box.tree.input_config.mkdir(parents=True)
    strings = {"lr": "5e-07", "name": '"007"', "plain": "text", "flag": "true"}
    (box.tree.input_config / "hyperparameters.json").write_text(json.dumps(strings), encoding="utf-8")
    assert box.supervise().returncode == 0
    assert json.loads(seen_by(box)["environment"]["SM_HPS"]) == {
        "lr": 5e-07,
        "name": "007",
        "plain": "text",
        "flag": True,
    }


@pytest.mark.parametrize("variant", ["as it is", "with device_map"])
def test_the_seed_script_runs_as_it_is_and_with_device_map_auto(
    variant: str, a_box: Box, a_model_dir: Callable[..., Path]
) -> None:
    text = (CASES / "seed_script.py").read_text("utf-8")
    if variant == "with device_map":
        text = text.replace("from_pretrained(name).to(device)", 'from_pretrained(name, device_map="auto")')
        assert "device_map" in text
    box = a_box(**script(text, {"model_name": str(a_model_dir()), "epochs": 2, "learning_rate": 1e-3}))
    done = box.supervise()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch=") == 2
    assert {path.name for path in box.tree.model.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}


COUNTS_FROM_ITS_CHECKPOINT = """
import os, sys, time
from pathlib import Path
kept = Path(os.environ["SM_CHECKPOINT_DIR"]) / "n"
n = int(kept.read_text()) if kept.exists() else 0
print("began at", n, flush=True)
while n < 40:
    n += 1
    kept.with_suffix(".new").write_text(str(n))
    kept.with_suffix(".new").replace(kept)
    print("reached", n, flush=True)
    time.sleep(60 if n == 7 else 0)
"""


def test_a_killed_script_goes_on_from_its_own_checkpoint_in_the_same_root(a_box: Box) -> None:
    box = a_box(**script(COUNTS_FROM_ITS_CHECKPOINT))
    with box.start() as process:
        assert process.stdout.readline() == "began at 0\n"
        while process.stdout.readline() != "reached 7\n":
            assert process.poll() is None
        process.kill()  # the supervisor; the script goes with it
        process.communicate(timeout=10)
    done = box.supervise()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("began at 7\n")
    assert (box.tree.checkpoints / "n").read_text() == "40"


def test_every_place_under_opt_ml_is_given_where_it_is(a_box: Box) -> None:
    values = {
        "model": "/opt/ml/input/data/model", "root": "/opt/ml", "many": ["/opt/ml/code/a", {"b": "/opt/ml/b"}],
        "other": "/opt/mlx/a", "inside": "see /opt/ml/a", "number": 3,
    }  # fmt: skip
    box = a_box(**script(WRITES_WHAT_IT_SEES, values))
    assert box.supervise().returncode == 0
    root = str(box.tree.root)
    wanted = {
        **values, "model": f"{root}/input/data/model", "root": root, "many": [f"{root}/code/a", {"b": f"{root}/b"}],
    }  # fmt: skip
    seen = seen_by(box)
    environment = seen["environment"]
    assert json.loads(environment["SM_HPS"]) == wanted
    assert json.loads(environment["SM_TRAINING_ENV"])["hyperparameters"] == wanted
    assert environment["SM_HP_MODEL"] == wanted["model"]
    flags = dict(zip(seen["argv"][::2], seen["argv"][1::2], strict=True))
    assert (flags["--model"], flags["--root"], flags["--other"]) == (wanted["model"], root, "/opt/mlx/a")


def test_at_opt_ml_itself_every_path_stays_as_it_is() -> None:
    values = {"model": "/opt/ml/input/data/model", "many": ["/opt/ml"]}
    assert MlTree.from_environment({}).located(values) == values


def test_code_may_come_as_a_zip(a_box: Box) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("train.py", WRITES_WHAT_IT_SEES)
    code = {"uri": "s3://bucket/code.zip", "sha256": hashlib.sha256(packed.getvalue()).hexdigest()}
    box = a_box(**script(WRITES_WHAT_IT_SEES), spec={"code": code})
    (box.tree.channel("code") / "train.py").unlink()
    (box.tree.channel("code") / "code.zip").write_bytes(packed.getvalue())
    assert box.supervise().returncode == 0
    assert seen_by(box)["argv"] == []


def test_a_raising_script_fails_as_user_with_its_own_file_and_line(a_box: Box) -> None:
    box = a_box(**script("import json\n\ndef f():\n    json.loads('{')\n\nf()\n"))
    done = box.supervise()
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    failure = box.failure
    assert (failure["class"], failure["file"], failure["line"]) == ("user", str(box.tree.code / "train.py"), 4)
    assert failure["message"].startswith("json.decoder.JSONDecodeError: Expecting property name")


@pytest.mark.parametrize(
    ("text", "failure_class", "message"),
    [
        ("raise SystemExit(7)", "user", "exit status 7"),
        ("import sys; sys.exit('no GPU here')", "user", "no GPU here"),
        ("raise MemoryError", "memory", "MemoryError"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')", "memory", "CUDA out of memory"),
        ("raise SystemExit(137)", "memory", "exit status 137"),
        ("raise SystemExit(139)", "user", "exit status 139"),
    ],
)
def test_a_script_that_ends_badly_says_how(text: str, failure_class: str, message: str, a_box: Box) -> None:
    box = a_box(**script(text))
    assert box.supervise().returncode == 1
    assert box.failure["class"] == failure_class
    assert message in box.failure["message"]


@pytest.mark.parametrize(
    ("number", "failure_class"),
    [(signal.SIGKILL, "platform")]
    + [(number, "user") for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1)]
    + [(number, "user") for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)],
)
def test_a_script_that_dies_of_a_signal_nobody_sent_has_failed_and_the_signal_is_named(
    number: signal.Signals, failure_class: str, a_box: Box
) -> None:
    text = (
        f"import os, signal\nsignal.signal({number:d}, signal.SIG_DFL)\n" if number != signal.SIGKILL else "import os\n"
    )
    box = a_box(**script(f"{text}os.kill(os.getpid(), {number:d})\n"))
    assert box.supervise().returncode == 1
    assert box.failure == {"class": failure_class, "message": f"The script was killed by {number.name}."}


def test_the_last_words_of_a_script_that_aborted_are_kept(a_box: Box) -> None:
    box = a_box(**script("import os, sys\nprint('assertion failed', file=sys.stderr, flush=True)\nos.abort()\n"))
    assert box.supervise().returncode == 1
    assert box.failure["message"] == "The script was killed by SIGABRT. It said last: assertion failed"


@pytest.mark.parametrize(
    ("text", "kills", "failure_class"),
    [
        ("import os; os.kill(os.getpid(), 9)", (4, 5), "memory"),
        ("import os; os.kill(os.getpid(), 9)", (4, 4), "platform"),
        ("import os; os.kill(os.getpid(), 11)", (4, 5), "user"),
        ("raise ValueError", (4, 5), "user"),
    ],
)
def test_sigkill_is_out_of_memory_where_the_kernel_counted_one(
    text: str, kills: tuple[int, int], failure_class: str, a_box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter(kills)
    monkeypatch.setattr("training_container.recipes.script.oom_kills", lambda: next(counted))
    _, failure = run_here(a_box(**script(text)))
    assert failure is not None and failure.failure_class == failure_class


def run_here(box: Any) -> tuple[int, Failure | None]:
    """The script as a child of this process."""
    box.tree.make_outputs()
    job = read_job({"MICROTUNING_ML_ROOT": str(box.tree.root)})
    unpack_code(box.tree)
    return run_script(job, lambda pid: None)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_kills_for_memory_are_read_from_either_version_of_cgroups(
    file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (tmp_path / "memory.events", tmp_path / "memory.oom_control")
    monkeypatch.setattr("training_container.processes._OOM_COUNTERS", paths)
    assert oom_kills() == 0
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert oom_kills() == 2


def test_a_missing_entry_is_named(a_box: Box) -> None:
    box = a_box(algorithm={"type": "script", "entry": "other.py"}, rows=TEXTS)
    assert box.supervise().returncode == 1
    assert "no file 'other.py'" in box.failure["message"]


def test_a_stop_reaches_the_script_which_may_save(a_box: Box) -> None:
    text = (
        "import os, signal, sys, time\n"
        "def stop(*_):\n    open(os.path.join(os.environ['SM_MODEL_DIR'], 'saved'), 'w').close()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    box = a_box(**script(text))
    with box.start() as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 143
    assert (box.tree.model / "saved").exists()
    assert not box.tree.failure.exists()


def test_command_lines_follow_sagemakers_toolkit() -> None:
    values = {"b": 1, "lr": 0.1, "flag": True, "none": None, "list": [1, "x"]}
    assert command_line(values) == ["-b", "1", "--flag", "True", "--list", '[1, "x"]', "--lr", "0.1", "--none", ""]


def test_two_hosts_have_ranks_and_a_master(tmp_path: Path) -> None:
    tree = MlTree(tmp_path)
    tree.input_config.mkdir(parents=True)
    hosts = ["algo-1", "algo-2"]
    resources = {
        "current_host": "algo-2", "hosts": hosts, "network_interface_name": "eth1",
        "current_instance_type": "ml.g5.xlarge", "current_group_name": "workers",
        "instance_groups": [{"instance_group_name": "workers", "instance_type": "ml.g5.xlarge", "hosts": hosts}],
    }  # fmt: skip
    (tree.input_config / "resourceconfig.json").write_text(json.dumps(resources), encoding="utf-8")
    tree.channel("my-train").mkdir(parents=True)
    found = derive(tree, {}, entry="train.py", arguments=[])
    assert (found["SM_CURRENT_HOST_RANK"], found["SM_HOST_COUNT"], found["SM_MASTER_ADDR"]) == ("1", "2", "algo-1")
    assert found["SM_CHANNEL_MY_TRAIN"] == str(tree.channel("my-train"))
    assert json.loads(found["SM_CHANNELS"]) == ["my-train"]
    assert (found["SM_NETWORK_INTERFACE_NAME"], found["SM_CURRENT_INSTANCE_GROUP"]) == ("eth1", "workers")
    assert json.loads(found["SM_CURRENT_INSTANCE_GROUP_HOSTS"]) == ["algo-1", "algo-2"]


def test_the_supervisor_does_not_wait_for_torch_before_a_script() -> None:
    code = "import sys, training_container.supervisor, training_container.recipes.script; print('torch' in sys.modules)"
    assert (
        subprocess.run([__import__("sys").executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
