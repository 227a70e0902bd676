"""`cdk synth` and `cdk deploy` start here. Context: -c stage=<stage> (default dev), -c image_uri=<training image>, and
-c vpc=true for a network of the stage's own.

Synthesis needs no Docker, no credentials and no network, and gives the same files for the same sources.
"""

from __future__ import annotations

from pathlib import Path

import aws_cdk as cdk

from infrastructure.stack import MicrotuningStack
from infrastructure.stages import stage_tenants

ROOT = Path(__file__).resolve().parent.parent


def build_app(
    *,
    root: Path = ROOT,
    build: Path = ROOT / "build" / "lambda",
    outdir: Path | None = None,
    context: dict[str, str] | None = None,
) -> cdk.App:
    """The app over the sources under `root`; function folders are written to `build`.

    `outdir` and `context` are for callers without the cdk command, which hands both over in the environment.
    """
    app = cdk.App(analytics_reporting=False, outdir=str(outdir) if outdir else None, context=context)
    stage = app.node.try_get_context("stage") or "dev"
    image_uri = app.node.try_get_context("image_uri") or ""
    tenants = stage_tenants(stage, root)
    vpc = str(app.node.try_get_context("vpc")).lower() == "true"
    MicrotuningStack(app, stage=stage, tenants=tenants, image_uri=image_uri, vpc=vpc, root=root, build=build)
    return app


if __name__ == "__main__":
    build_app().synth()
