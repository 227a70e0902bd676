"""Synthesis needs nothing but the sources, and gives the same for the same sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from filecmp import dircmp
from pathlib import Path
from typing import Any

import pytest

SOURCES = ("functions", "sdk/microtuning_core", "training_container", "pyproject.toml", "README.md", "docs")


@pytest.fixture(scope="module")
def sources(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what synthesis reads, to change at will."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir():
            shutil.copytree(root / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(root / name, target)
    return copy


def hashes(sources: Path, out: Path, **context: str) -> dict[str, str]:
    """Asset hash by function name, and of the training image under `image`."""
    from infrastructure.app import build_app

    build_app(root=sources, build=out / "lambda", outdir=out / "cdk.out", context=context).synth()
    template = json.loads((out / "cdk.out" / "Microtuning.template.json").read_text())
    functions = [each for each in template["Resources"].values() if each["Type"] == "AWS::Lambda::Function"]
    found = {each["Properties"]["Handler"].split(".")[1]: each["Properties"]["Code"]["S3Key"] for each in functions}
    images = json.loads((out / "cdk.out" / "Microtuning.assets.json").read_text())["dockerImages"]
    return found | dict(zip(["image"], images, strict=False))


@pytest.fixture(scope="module")
def before(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hashes(sources, tmp_path_factory.mktemp("before"))


def test_c69_two_synths_without_docker_credentials_or_network_are_equal(root: Path, tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),  # no ~/.aws
        "DOCKER_HOST": "unix:///nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "1",
    }
    command = [sys.executable, *_app_of(root).split()[1:]]
    outs = [tmp_path / "out1", tmp_path / "out2"]
    for out in outs:
        subprocess.run(command, cwd=root, env=environment | {"CDK_OUTDIR": str(out)}, check=True, capture_output=True)
    assert _differences(dircmp(*outs)) == []
    assert len(list(outs[0].glob("asset.*"))) == 14  # thirteen functions and the context of the image


def _app_of(root: Path) -> str:
    app: str = json.loads((root / "cdk.json").read_text())["app"]
    assert app == "python3 -m infrastructure.app"
    return app


def _differences(compared: dircmp[str]) -> list[str]:
    here = [*compared.left_only, *compared.right_only, *compared.diff_files, *compared.funny_files]
    return here + [each for below in compared.subdirs.values() for each in _differences(below)]


def test_c69_a_touched_readme_moves_no_hash(sources: Path, before: dict[str, str], tmp_path: Path) -> None:
    readme = sources / "README.md"
    readme.write_text(readme.read_text() + "\nOne more line.\n")
    (sources / "docs" / "new.md").write_text("A page.\n")
    (sources / "training_container" / "__pycache__").mkdir()
    (sources / "training_container" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"cache")
    assert hashes(sources, tmp_path) == before


def test_c69_a_changed_handler_moves_its_own_hash_only(sources: Path, before: dict[str, str], tmp_path: Path) -> None:
    handler = sources / "functions" / "on_command.py"
    text = handler.read_text()
    handler.write_text(text + "\n# changed\n")
    after = hashes(sources, tmp_path)
    handler.write_text(text)
    assert {name for name in after if after[name] != before[name]} == {"on_command"}


def test_c69_changed_rules_move_every_function_and_the_image(
    sources: Path, before: dict[str, str], tmp_path: Path
) -> None:
    rules = sources / "sdk" / "microtuning_core" / "domain" / "names.py"
    text = rules.read_text()
    rules.write_text(text + "\n# changed\n")
    after = hashes(sources, tmp_path)
    rules.write_text(text)
    assert [name for name in after if after[name] == before[name]] == []


def test_an_image_given_by_context_leaves_the_image_asset_out(sources: Path, tmp_path: Path) -> None:
    assert "image" not in hashes(sources, tmp_path, image_uri="111122223333.dkr.ecr.us-east-1.amazonaws.com/own:1")
    template = json.loads((tmp_path / "cdk.out" / "Microtuning.template.json").read_text())
    assert template["Parameters"]["TrainingImageUri"]["Default"].endswith("/own:1")
    assert "container-assets" not in json.dumps(template)


def test_a_stage_given_by_context_names_the_stack_and_the_parameters_default(sources: Path, tmp_path: Path) -> None:
    hashes(sources, tmp_path, stage="prod", image_uri="own:1")
    stack = json.loads((tmp_path / "cdk.out" / "manifest.json").read_text())["artifacts"]["Microtuning"]
    assert stack["properties"]["stackName"] == "microtuning-prod"
    template = json.loads((tmp_path / "cdk.out" / "Microtuning.template.json").read_text())
    assert template["Parameters"]["Stage"]["Default"] == "prod"


def test_the_images_context_is_what_its_dockerfile_copies(sources: Path, tmp_path: Path) -> None:
    image = hashes(sources, tmp_path)["image"]
    context = tmp_path / "cdk.out" / f"asset.{image}"
    files = [path.relative_to(context) for path in context.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in files} <= {"training_container", "sdk", "pyproject.toml", "constraints.txt"}
    assert {path.parts[1] for path in files if path.parts[0] == "sdk"} == {"microtuning_core"}
    assert Path("training_container/Dockerfile") in files
    assert [path for path in files if path.suffix in (".md", ".pyc")] == []


def test_a_bundle_holds_its_handler_the_shared_modules_the_core_and_pure_yaml(root: Path, tmp_path: Path) -> None:
    from infrastructure.bundles import stage_function

    folder = stage_function("on_command", root=root, into=tmp_path)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    handlers = {path for path in files if path.startswith("functions/")}
    shared = {f"functions/{path.name}" for path in (root / "functions").glob("_*.py")}
    assert handlers == shared | {"functions/on_command.py"}
    assert {"microtuning_core/domain/names.py", "yaml/__init__.py"} <= files
    assert {Path(path).suffix for path in files} == {".py"}
    assert {path.split("/")[0] for path in files} == {"functions", "microtuning_core", "yaml"}


def test_a_staged_bundle_imports_its_yaml_and_core_without_the_checkout(root: Path, tmp_path: Path) -> None:
    from infrastructure.bundles import stage_function

    folder = stage_function("on_command", root=root, into=tmp_path)
    code = "import yaml, microtuning_core.domain.names as n; print(yaml.__with_libyaml__, yaml.__file__, n.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    with_c, yaml_file, names_file = done.stdout.split()
    assert Path(yaml_file).is_relative_to(folder)
    assert Path(names_file).is_relative_to(folder)
    assert with_c == "False"


def test_a_row_without_its_handler_fails_and_says_which_file_is_missing(tmp_path: Path) -> None:
    from infrastructure.bundles import stage_function

    with pytest.raises(FileNotFoundError, match=r"FUNCTIONS has a row on_nothing but there is no .*on_nothing\.py"):
        stage_function("on_nothing", root=tmp_path, into=tmp_path / "build")


def test_a_handler_that_is_not_ours_has_no_place_in_the_kept_template() -> None:
    from infrastructure.keep_template import with_names_for_hashes

    function: dict[str, Any] = {"Type": "AWS::Lambda::Function", "Properties": {"Handler": "a.b", "Code": {}}}
    with pytest.raises(ValueError, match=r"a\.b is not functions\.<name>\.handler"):
        with_names_for_hashes({"Resources": {"F": function}})
