"""What others wrote and we ship: `python -m tests.supply_chain audit | sbom`.

audit   known faults of what constraints.txt pins, by pip-audit from the advisory service. 0: none; 1: some; 2: the service
        did not answer for all of them, so nothing is known (with --if-reachable that is said, and 0).
sbom    build/sbom.json, CycloneDX: every installed distribution with version, licence and where it is from.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SBOM = ROOT / "build" / "sbom.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="supply_chain", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("audit", "sbom"))
    parser.add_argument("--if-reachable", action="store_true", help="no failure where the service does not answer")
    given = parser.parse_args(arguments)
    return write_sbom() if given.what == "sbom" else audit(if_reachable=given.if_reachable)


# --- known faults ----------------------------------------------------------------------------------------------------


def audit(*, if_reachable: bool) -> int:
    command = ["-r", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip", "--format", "json"]
    done = subprocess.run([sys.executable, "-m", "pip_audit", *command], capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        found = []
    faults, unknown = judged(found)
    for fault in faults:
        print(fault)
    if faults:
        return 1
    if found and not unknown:
        print(f"{len(found)} packages, and no advisory names one of them in this version.")
        return 0
    asked = f"{len(unknown)} of {len(found)} packages" if found else "anything"
    print(f"The advisory service did not answer for {asked}: nothing is known of them.", file=sys.stderr)
    print(f"    {(done.stderr.strip().splitlines() or unknown or ['no word'])[-1]}", file=sys.stderr)
    print("    Run `make audit` where pypi.org and its advisories can be reached.", file=sys.stderr)
    return 0 if if_reachable else 2


def judged(dependencies: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """`(known faults, packages of which nothing is known)` in pip-audit's answer."""
    faults = [
        f"{each['name']} {each['version']}: {vuln['id']}, mended in {', '.join(vuln['fix_versions']) or 'no version yet'}"
        for each in dependencies
        for vuln in each.get("vulns", [])
    ]
    return faults, [each["name"] for each in dependencies if "skip_reason" in each]


# --- what is installed -----------------------------------------------------------------------------------------------


def write_sbom(file: Path = SBOM) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["environment", "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--of", "JSON"]
    subprocess.run([sys.executable, "-m", "cyclonedx_py", *command, "-o", str(file), sys.executable], check=True)
    parts = json.loads(file.read_text("utf-8"))["components"]
    print(f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}: {len(parts)} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
