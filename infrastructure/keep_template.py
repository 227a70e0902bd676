"""Keep the local stage's template and tenants where the local cloud finds them: `python -m infrastructure.keep_template`.

Hashes become names (functions/<name>.zip, a fixed image tag), so that only a change of infrastructure/ changes the file
and the local cloud needs neither Node nor aws-cdk-lib. Buckets of assets stay as CDK names them.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from infrastructure.app import ROOT, build_app
from infrastructure.stages import stage_tenants

LOCAL = "local"
KEPT = ROOT / "sdk" / "microtuning_local" / "template" / "template.json"
KEPT_TENANTS = KEPT.with_name("tenants.json")
_HANDLER = re.compile(r"functions\.(\w+)\.handler")
_IMAGE = re.compile(r"(container-assets-[^:]*\$\{AWS::AccountId\}-\$\{AWS::Region\}):[0-9a-f]{64}")


def synthesized(stage: str = LOCAL, root: Path = ROOT) -> dict[str, Any]:
    """The stage's template as the CDK app gives it for the sources under `root`."""
    with tempfile.TemporaryDirectory() as work:
        paths = {"build": Path(work) / "lambda", "outdir": Path(work) / "out"}
        assembly = build_app(root=root, context={"stage": stage}, **paths).synth()
        template: dict[str, Any] = json.loads(Path(assembly.stacks[0].template_full_path).read_text(encoding="utf-8"))
    return template


def with_names_for_hashes(template: dict[str, Any]) -> dict[str, Any]:
    """The template with asset keys by function name and the image under the fixed tag `training`."""
    named: dict[str, Any] = json.loads(_IMAGE.sub(r"\1:training", json.dumps(template)))
    for resource in named["Resources"].values():
        if resource["Type"] == "AWS::Lambda::Function":
            properties = resource["Properties"]
            properties["Code"]["S3Key"] = f"functions/{_function_of(properties['Handler'])}.zip"
    return named


def _function_of(handler: str) -> str:
    match = _HANDLER.fullmatch(handler)
    if not match:
        raise ValueError(
            f"The handler {handler} is not functions.<name>.handler. Correct it in infrastructure/functions.py."
        )
    return match[1]


def as_text(template: dict[str, Any]) -> str:
    return json.dumps(template, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def kept_tenants(root: Path = ROOT) -> str:
    return stage_tenants(LOCAL, root).model_dump_json(indent=1, exclude_defaults=True) + "\n"


if __name__ == "__main__":
    KEPT_TENANTS.write_text(kept_tenants(), encoding="utf-8")
    KEPT.write_text(as_text(with_names_for_hashes(synthesized())), encoding="utf-8")
