"""What others wrote: each with a reason and a pin, its faults asked for, and no finding waved through without a word."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import supply_chain

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PACKAGES = ("sdk", "functions", "infrastructure", "training_container")


def requirements() -> set[str]:
    optional = (each for extra in PROJECT["optional-dependencies"].values() for each in extra)
    return {re.split(r"[\[<>=!~; ]", each)[0].lower() for each in (*PROJECT["dependencies"], *optional)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if line and not line.startswith("#")]
    assert all(found), "every line of constraints.txt is name==version"
    return {re.sub(r"[-_.]+", "-", each[1]).lower(): each[2] for each in found if each}


def test_every_dependency_is_pinned_exactly() -> None:
    # sagemaker lives in an environment of its own: it wants a newer botocore than the emulator (docs/dependencies.md).
    assert {re.sub(r"[-_.]+", "-", name) for name in requirements()} - pins().keys() == {"sagemaker"}


def test_what_the_image_installs_is_pinned_too() -> None:
    lines = (ROOT / "training_container" / "requirements.txt").read_text("utf-8").splitlines()
    named = {re.split(r"[\[<>=!~; ]", line)[0].lower() for line in lines if line.strip() and not line.startswith("#")}
    exact = {re.split(r"[\[<>=!~; ]", line)[0].lower() for line in lines if "==" in line}
    assert {re.sub(r"[-_.]+", "-", name) for name in named - exact} <= pins().keys()


def test_what_bandit_finds_and_we_keep_has_its_id_and_its_reason() -> None:
    marks = [
        line
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if "nosec" in line
    ]
    assert marks
    assert [line for line in marks if not re.search(r"# nosec B\d{3} # \w.{5,}", line)] == []


FAULTY = {"name": "x", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
WELL: dict[str, Any] = {"name": "y", "version": "1", "vulns": []}
UNKNOWN = {"name": "z", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("dependencies", "strict", "lenient", "said"),
    [
        ([WELL], 0, 0, "no advisory names one"),
        ([WELL, FAULTY], 1, 1, "x 1: PYSEC-1, mended in 2"),
        ([WELL, UNKNOWN], 2, 0, "did not answer for 1 of 2 packages"),
        ([UNKNOWN, FAULTY], 1, 1, "PYSEC-1"),
        ([], 2, 0, "did not answer for anything"),
    ],
)
def test_an_audit_that_learned_nothing_is_no_clean_one(
    dependencies: list[Any], strict: int, lenient: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    told = subprocess.CompletedProcess([], 0, json.dumps({"dependencies": dependencies}), "No route to host")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: told)
    assert supply_chain.audit(if_reachable=False) == strict
    assert said in "".join(capsys.readouterr())
    assert supply_chain.audit(if_reachable=True) == lenient


def test_the_bill_of_materials_names_every_direct_dependency_that_is_installed(tmp_path: Path) -> None:
    assert supply_chain.write_sbom(tmp_path / "sbom.json") == 0
    bill = json.loads((tmp_path / "sbom.json").read_text("utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    parts = {each["name"].lower(): each for each in bill["components"]}
    assert {"boto3", "pydantic", "pyyaml", "torch", "ministack"} <= parts.keys()
    assert all(part["version"] for part in parts.values())
    assert parts["boto3"]["purl"].startswith("pkg:pypi/boto3@")


def test_bandit_finds_nothing_that_is_not_marked() -> None:
    command = ["bandit", "--quiet", "--configfile", "pyproject.toml", "--recursive", "sdk/microtuning_local"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
