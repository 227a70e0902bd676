"""How reward functions and scripts travel: what is shipped, what is pickled, and what is refused before any upload."""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from microtuning_core.domain.errors import InvalidCode
from microtuning_sdk import _sources
from microtuning_sdk._code import CodePackage, package_reward, package_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

CASES = Path(__file__).parents[1] / "cases"

CALL = """
import json, sys, zipfile
sys.path.insert(0, sys.argv[1])
entry = json.load(open(sys.argv[1] + "/code.json"))["entry"]
module, _, name = entry.partition(":")
if module == "pickle":
    import cloudpickle
    reward = cloudpickle.load(open(f"{sys.argv[1]}/{name}", "rb"))
else:
    import importlib
    reward = getattr(importlib.import_module(module), name)
print(json.dumps(reward(completions=["a", "bcd"])))
"""


@pytest.fixture
def zoo() -> Iterator[ModuleType]:
    """The case's module, as a user's own module that was imported by its name."""
    name = "c19_reward_closures"
    spec = importlib.util.spec_from_file_location(name, CASES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is on sys.path, as a user's project is."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def elsewhere(package: CodePackage, folder: Path) -> Any:
    """What the packed reward gives in a fresh process that has nothing but the package."""
    with zipfile.ZipFile(io.BytesIO(package.archive)) as archive:
        archive.extractall(folder)
    call = [sys.executable, "-I", "-c", CALL, str(folder)]
    return json.loads(subprocess.run(call, capture_output=True, text=True, check=True, cwd=folder).stdout)


@pytest.mark.parametrize(
    ("name", "entry"),
    [("by_lambda", "pickle:"), ("by_partial", "pickle:"), ("by_object", "pickle:"), ("make", "pickle:")],
)
def test_lambda_closure_partial_and_callable_object_give_the_same_numbers_elsewhere(
    zoo: ModuleType, tmp_path: Path, name: str, entry: str
) -> None:
    reward = zoo.make(0.5) if name == "make" else getattr(zoo, name)
    package = package_reward(reward)
    assert package.entry == "pickle:reward.pkl"
    assert elsewhere(package, tmp_path) == reward(completions=["a", "bcd"])


def test_a_lock_in_a_closure_is_refused_by_its_name(zoo: ModuleType) -> None:
    with pytest.raises(InvalidCode, match=r"with_lock\.<locals>\.inner captures 'lock', a _thread\.lock") as refused:
        package_reward(zoo.with_lock())
    assert "inside the function that uses it" in str(refused.value)


def test_the_innermost_culprit_is_named() -> None:
    lock = threading.Lock()

    class Scorer:
        def __init__(self) -> None:
            self.parts = {"guard": [lock]}

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0 for _ in completions]

    with pytest.raises(InvalidCode, match=r"partial\(.*Scorer.* captures 'item 0', a _thread\.lock"):
        package_reward(functools.partial(Scorer()))


def test_a_function_of_a_module_travels_as_source_with_the_local_modules_it_imports(project: Path) -> None:
    (project / "texts").mkdir()
    (project / "texts" / "__init__.py").write_text("from .length import measure\n")
    (project / "texts" / "length.py").write_text("import json\ndef measure(text): return float(len(text))\n")
    (project / "texts" / "words.txt").write_text("data of the package")
    (project / "texts" / "__pycache__").mkdir()
    (project / "texts" / "__pycache__" / "length.pyc").write_bytes(b"x")
    (project / "unused.py").write_text("raise RuntimeError\n")
    (project / "scoring_mod.py").write_text(
        "def reward(completions):\n    from texts import measure\n    return [measure(c) for c in completions]\n"
    )
    module = importlib.import_module("scoring_mod")
    try:
        package = package_reward(module.reward)
        assert package.entry == "scoring_mod:reward"
        assert sorted(package.files) == ["scoring_mod.py", "texts/__init__.py", "texts/length.py", "texts/words.txt"]
        assert elsewhere(package, project / "there") == [1.0, 3.0]
    finally:
        del sys.modules["scoring_mod"]


def test_a_name_is_packed_without_importing_its_module(project: Path) -> None:
    (project / "costly.py").write_text("print('imported')\nraise RuntimeError\ndef reward(completions): return []\n")
    assert package_reward("costly:reward").files.keys() == {"costly.py"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nowhere_at_all:reward", "no module 'nowhere_at_all'"),
        ("plain:other", "plain.py has no 'other'"),
        ("plain", "not the name"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(project: Path, entry: str, words: str) -> None:
    (project / "plain.py").write_text("def reward(completions): return []\n")
    with pytest.raises(InvalidCode, match=words):
        package_reward(entry)


def test_a_pickled_function_takes_along_the_local_module_that_it_calls(project: Path) -> None:
    (project / "helper_mod.py").write_text("def double(x): return 2.0 * x\n")
    module = importlib.import_module("helper_mod")
    try:
        package = package_reward(lambda completions: [module.double(len(c)) for c in completions])
        assert sorted(package.files) == ["helper_mod.py", "reward.pkl", "reward.pkl.json"]
        assert elsewhere(package, project / "there") == [2.0, 6.0]
    finally:
        del sys.modules["helper_mod"]


def test_beside_a_pickle_lies_what_its_function_is_called_and_where_it_was_written() -> None:
    def boom(completions: list[str]) -> list[float]:
        raise ValueError

    origin = json.loads(package_reward(boom).files["reward.pkl.json"])
    assert origin["name"].endswith("<locals>.boom")
    assert origin["file"] == "test_sdk_code.py"


def test_a_function_of_a_script_is_pickled_because_no_job_can_import_main(tmp_path: Path) -> None:
    script = tmp_path / "main_script.py"
    script.write_text(
        "from microtuning_sdk._code import package_reward\n"
        "BONUS = 1.0\n"
        "def helper(c): return BONUS + len(c)\n"
        "def reward(completions): return [helper(c) for c in completions]\n"
        "package = package_reward(reward)\n"
        "open('code.zip', 'wb').write(package.archive)\n"
        "print(package.entry, sorted(package.files))\n"
    )
    run = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "pickle:reward.pkl ['reward.pkl', 'reward.pkl.json']\n"
    package = CodePackage("", {})
    package.__dict__["archive"] = (tmp_path / "code.zip").read_bytes()
    assert elsewhere(package, tmp_path / "there") == [2.0, 4.0]


def test_an_error_of_syntax_is_found_before_the_job_finds_it(project: Path) -> None:
    (project / "broken_mod.py").write_text("def reward(completions):\n    return [\n")
    with pytest.raises(InvalidCode, match=r"broken_mod\.py .* line 2"):
        package_reward("broken_mod:reward")


def test_what_is_not_callable_is_refused() -> None:
    not_callable: Any = 3
    with pytest.raises(InvalidCode, match="a reward is a function"):
        package_reward(not_callable)


def test_the_same_code_gives_the_same_hash(project: Path) -> None:
    (project / "stable_mod.py").write_text("def reward(completions): return []\n")
    first = package_reward("stable_mod:reward").sha256
    (project / "stable_mod.py").touch()
    assert package_reward("stable_mod:reward").sha256 == first


def test_the_archive_says_which_python_wrote_it_and_where_to_begin(zoo: ModuleType) -> None:
    with zipfile.ZipFile(io.BytesIO(package_reward(zoo.by_lambda).archive)) as archive:
        manifest = json.loads(archive.read("code.json"))
    assert manifest == {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "entry": "pickle:reward.pkl"}


def test_more_than_the_limit_is_refused_with_the_largest_file_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sources, "MAX_CODE_BYTES", 1000)
    (project / "big").mkdir()
    (project / "big" / "train.py").write_text("pass\n")
    (project / "big" / "weights.bin").write_bytes(bytes(2000))
    with pytest.raises(InvalidCode, match=r"weights\.bin has"):
        package_script("train.py", project / "big")


def test_a_script_takes_along_what_it_imports_and_nothing_else(project: Path) -> None:
    (project / "train.py").write_text("import torch\nfrom mylib import loss\n")
    (project / "mylib.py").write_text("def loss(): ...\n")
    (project / "other.py").write_text("")
    package = package_script(project / "train.py")
    assert (package.entry, sorted(package.files)) == ("train.py", ["mylib.py", "train.py"])


def test_a_source_dir_is_shipped_whole_but_for_hidden_files(project: Path) -> None:
    (project / "src").mkdir()
    (project / "src" / "run.py").write_text("")
    (project / "src" / "config.yaml").write_text("a: 1")
    (project / "src" / ".git").mkdir()
    (project / "src" / ".git" / "HEAD").write_text("x")
    assert sorted(package_script("run.py", project / "src").files) == ["config.yaml", "run.py"]


def test_the_users_own_script_is_shipped_byte_for_byte() -> None:
    package = package_script(CASES / "seed_script.py")
    assert package.files == {"seed_script.py": (CASES / "seed_script.py").read_bytes()}


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCode, match="no such file"):
        package_script(tmp_path / "missing.py")


def test_a_reward_that_breaks_while_loading_is_refused_here_and_not_in_the_job() -> None:
    def broken() -> Callable[..., Any]:
        raise RuntimeError("only once")

    class Once:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
            return broken, ()

        def __call__(self, completions: list[str]) -> list[float]:
            return []

    with pytest.raises(InvalidCode, match=r"saved but not loaded again \(only once\)"):
        package_reward(Once())
