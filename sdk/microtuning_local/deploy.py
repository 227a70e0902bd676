"""Deploys the kept template to the local cloud, as CDK would to AWS: assets first, then the stack by TemplateURL.

The tenants of the local stage (infrastructure/stages/local.yaml) are kept beside it and travel with every function.

The template names each function's code `functions/<name>.zip`; the object is stored under a name with the hash of its
content, so that changed code is a changed template and CloudFormation sees it. Nothing happens when the stack already
carries the fingerprint of all of this in its tag.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import LocalCloudError
from microtuning_core.domain.tenants import StageTenants, stage_module
from microtuning_local.clients import root_client
from microtuning_local.home import STAGE, local_home
from microtuning_local.rescue import objects_set_aside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from microtuning_local.home import Endpoint

STACK = f"microtuning-{STAGE}"
FINGERPRINT_TAG = "microtuning-fingerprint"
TRAINING_IMAGE = "local/microtuning-training:1"
PARAMETERS = {
    "Stage": STAGE,
    "SageMakerEventSource": "local.sagemaker",
    "OnAws": "false",
    "TrainingImageUri": TRAINING_IMAGE,
    "QueueVisibilitySeconds": "10",
    "ReconcileRate": "rate(1 minute)",
}
CAPABILITIES = ["CAPABILITY_IAM", "CAPABILITY_NAMED_IAM", "CAPABILITY_AUTO_EXPAND"]

# The same bytes for the same sources, whenever and wherever they are packed (zip cannot say an earlier date).
ZIP_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Deployment:
    """What is put on the cloud: the template text, the objects it refers to by key, and the hash of it all."""

    template: str
    assets: Mapping[str, bytes]
    fingerprint: str


def kept_template() -> dict[str, Any] | None:
    """The synthesized template that ships with this package; None in a checkout that never synthesized one."""
    path = resources.files("microtuning_local") / "template" / "template.json"
    return json.loads(path.read_text()) if path.is_file() else None


def kept_tenants() -> StageTenants:
    """Whom the local stage serves, as its configuration declared them when the template was kept."""
    path = resources.files("microtuning_local") / "template" / "tenants.json"
    return StageTenants.model_validate_json(path.read_text()) if path.is_file() else StageTenants()


def functions_folder() -> Path:
    """The handlers' sources: `functions/` beside `sdk/` in a checkout, else the copy in the wheel."""
    package = Path(__file__).parent
    checkout = package.parents[1] / "functions"
    return checkout if (checkout / "__init__.py").exists() else package / "bundle" / "functions"


def function_names(functions: Path) -> list[str]:
    return sorted(path.stem for path in functions.glob("*.py") if not path.name.startswith("_"))


def prepare(template: dict[str, Any], functions: Path, parameters: Mapping[str, str]) -> Deployment:
    """Pack every function and point the template at the packages."""
    shared = shared_sources(functions)
    packages = {name: zipped(shared | function_source(functions, name)) for name in function_names(functions)}
    keys = {f"functions/{name}.zip": f"functions/{name}-{digest(body)[:16]}.zip" for name, body in packages.items()}
    text = json.dumps(with_asset_keys(template, keys), sort_keys=True)
    assets = {keys[f"functions/{name}.zip"]: body for name, body in packages.items()}
    return Deployment(text, assets, digest(text.encode() + json.dumps(dict(parameters), sort_keys=True).encode()))


def shared_sources(functions: Path) -> dict[str, bytes]:
    """What every package holds: functions/_*.py, the tenants, microtuning_core, and PyYAML without its C part."""
    helpers = {f"functions/{path.name}": path.read_bytes() for path in functions.glob("_*.py")}
    helpers["functions/_stage.py"] = stage_module(kept_tenants()).encode()
    return helpers | package_sources("microtuning_core") | package_sources("yaml")


def function_source(functions: Path, name: str) -> dict[str, bytes]:
    return {f"functions/{name}.py": (functions / f"{name}.py").read_bytes()}


def package_sources(package: str) -> dict[str, bytes]:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LocalCloudError(
            f"The Python package {package} is not installed here, and every function needs it.",
            next_step='Install it: pip install "microtuning[local]".',
        )
    folder = Path(spec.submodule_search_locations[0])
    return {f"{package}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.py")}


def sources_stamp() -> str:
    """Changes when anything that is deployed may have changed. Looks at sizes and times only, so it takes 2 ms."""
    core = find_spec("microtuning_core")
    folders = [
        functions_folder(),
        Path(__file__).parent,
        *map(Path, core.submodule_search_locations or [] if core else []),
    ]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json"))
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return digest(repr(facts).encode())


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip whose bytes depend on names and contents only. Stored, not deflated: it travels over the loopback."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as package:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, ZIP_DATE)
            entry.external_attr = 0o644 << 16
            package.writestr(entry, files[name])
    return buffer.getvalue()


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def with_asset_keys(template: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The template with each `Code.S3Key` replaced by the key its package is stored under."""
    changed: dict[str, Any] = json.loads(json.dumps(template))
    for resource in changed["Resources"].values():
        code = resource.get("Properties", {}).get("Code")
        if isinstance(code, dict) and code.get("S3Key") in keys:
            code["S3Key"] = keys[code["S3Key"]]
    return changed


def deploy(endpoint: Endpoint, template: dict[str, Any], functions: Path | None = None) -> bool:
    """Create or update the stack. Returns False when it was up to date already."""
    wanted = {name: value for name, value in PARAMETERS.items() if name in template.get("Parameters", {})}
    deployment = prepare(template, functions or functions_folder(), wanted)
    cloudformation = root_client(endpoint, "cloudformation")
    stack = describe_stack(cloudformation)
    if stack and is_current(stack, deployment.fingerprint):
        return False
    url = upload(endpoint, deployment)
    with nullcontext() if stack else objects_set_aside(endpoint):
        apply(cloudformation, stack, url, wanted, deployment.fingerprint)
    return True


def is_current(stack: Mapping[str, Any], fingerprint: str) -> bool:
    tags = {tag["Key"]: tag["Value"] for tag in stack.get("Tags", [])}
    return tags.get(FINGERPRINT_TAG) == fingerprint and stack["StackStatus"] in ("CREATE_COMPLETE", "UPDATE_COMPLETE")


def upload(endpoint: Endpoint, deployment: Deployment) -> str:
    """Put assets and template into CDK's bootstrap bucket; returns the TemplateURL."""
    s3 = root_client(endpoint, "s3")
    bucket = f"cdk-hnb659fds-assets-{endpoint.account}-{endpoint.region}"
    with suppress(s3.exceptions.BucketAlreadyOwnedByYou):
        s3.create_bucket(Bucket=bucket)
    for key, body in deployment.assets.items():
        s3.put_object(Bucket=bucket, Key=key, Body=body)
    key = f"{STACK}-{deployment.fingerprint[:16]}.json"
    s3.put_object(Bucket=bucket, Key=key, Body=deployment.template.encode())
    return f"{endpoint.endpoint_url}/{bucket}/{key}"


def apply(
    cloudformation: Any, stack: Mapping[str, Any] | None, url: str, parameters: Mapping[str, str], fingerprint: str
) -> None:
    """Create or update, and wait. A stack that failed to be created is deleted first: it cannot be updated."""
    if stack and stack["StackStatus"] in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "DELETE_FAILED"):
        cloudformation.delete_stack(StackName=STACK)
        wait_settled(cloudformation)
        stack = None
    verb = cloudformation.update_stack if stack else cloudformation.create_stack
    verb(
        StackName=STACK,
        TemplateURL=url,
        Capabilities=CAPABILITIES,
        Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()],
        Tags=[{"Key": FINGERPRINT_TAG, "Value": fingerprint}],
    )
    settled = wait_settled(cloudformation)
    if not settled or settled["StackStatus"] not in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
        raise LocalCloudError(
            f"The stack {STACK} was not deployed: {failures(cloudformation, settled)}",
            log_path=str(local_home().logs / "emulator.log"),
        )


def describe_stack(cloudformation: Any) -> Mapping[str, Any] | None:
    try:
        stack: Mapping[str, Any] = cloudformation.describe_stacks(StackName=STACK)["Stacks"][0]
    except cloudformation.exceptions.ClientError as error:
        if "does not exist" not in str(error):
            raise
        return None
    return None if stack["StackStatus"] == "DELETE_COMPLETE" else stack


def wait_settled(cloudformation: Any, *, timeout_s: float = 60) -> Mapping[str, Any] | None:
    deadline = time.monotonic() + timeout_s
    stack = describe_stack(cloudformation)
    while stack and stack["StackStatus"].endswith("IN_PROGRESS") and time.monotonic() < deadline:
        time.sleep(0.03)
        stack = describe_stack(cloudformation)
    return stack


def failures(cloudformation: Any, stack: Mapping[str, Any] | None) -> str:
    """Each failed resource by name, type and reason, oldest first."""
    events = cloudformation.describe_stack_events(StackName=stack["StackId"])["StackEvents"] if stack else []
    named = [
        f"{event['LogicalResourceId']} ({event.get('ResourceType', '')}): {event.get('ResourceStatusReason', '?')}"
        for event in reversed(events)
        if event["ResourceStatus"].endswith("FAILED")
    ]
    return "; ".join(named) or (stack or {}).get("StackStatusReason") or "no reason was given"
