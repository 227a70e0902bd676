"""Where things lie in the stage's bucket; keys are built and parsed here and nowhere else.

    tenants/<t>/specs/<file>                 a spec, by upload
    tenants/<t>/receipts/<file>.json         the answer to it
    tenants/<t>/commands/<run_id>/<id>.json  cancel …
    tenants/<t>/datasets/<sha256>/…          data copied by fit()
    tenants/<t>/code/<sha256>/code.zip       the user's sources
    tenants/<t>/models/…                     model versions
    tenants/<t>/runs/<run_id>/run.json       the record, as last written
    tenants/<t>/runs/<run_id>/config/a<NNN>/ spec.json, plan.json, hyperparameters.json
    tenants/<t>/runs/<run_id>/checkpoints/l<NN>/{progress.json, step-<n>/manifest.json, …}
    tenants/<t>/runs/<run_id>/checkpoints/l<NN>/rollouts/step-<n>.jsonl   what was said and how it was scored
    tenants/<t>/runs/<run_id>/kept/l<NN>/step-<n>/…   checkpoints that are never pruned
    tenants/<t>/runs/<run_id>/output/
    prices/<region>.json                     price lists that `microtuning prices refresh` read; no tenant's

Every prefix ends in "/": without it, run-1 would also be run-10. Keys are raw, as EventBridge carries them; the classic
S3 notification (percent-encoded, blanks as "+") has its own parser in `events`. Digits are ASCII's, since `\\d` takes those
of every script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from microtuning_core.domain.errors import InvalidName
from microtuning_core.domain.names import check_tenant, parse_run_id

_SPEC_SUFFIXES = (".yaml", ".yml", ".json")
_SPEC = re.compile(r"tenants/(?P<tenant>[^/]+)/specs/(?P<file>[^/]+)")
_COMMAND = re.compile(r"tenants/(?P<tenant>[^/]+)/commands/(?P<run_id>[^/]+)/(?P<id>[^/]+)\.json")
# The folder of the rollout log beside the checkpoints, where the mirror to S3 carries it along.
ROLLOUTS = "rollouts"
_ROLLOUT_FILE = re.compile(r"step-(?P<step>[0-9]{1,12})\.jsonl")
_CHECKPOINT = re.compile(
    r"tenants/(?P<tenant>[^/]+)/runs/(?P<run_id>[^/]+)/checkpoints/l(?P<lineage>[0-9]{2,6})/"
    r"(?:step-(?P<step>[0-9]{1,12})/manifest|progress)\.json"
)


def prices_key(region: str) -> str:
    return f"prices/{_plain_file(region)}.json"


def tenant_prefix(tenant: str) -> str:
    return f"tenants/{check_tenant(tenant)}/"


def spec_key(tenant: str, file: str) -> str:
    return f"{tenant_prefix(tenant)}specs/{_plain_file(file)}"


def receipt_key(tenant: str, file: str) -> str:
    return f"{tenant_prefix(tenant)}receipts/{_plain_file(file)}.json"


def command_key(run_id: str, command_id: str) -> str:
    return f"{tenant_prefix(parse_run_id(run_id).tenant)}commands/{run_id}/{_plain_file(command_id)}.json"


def answer_key(run_id: str, command_id: str) -> str:
    """What became of a command: {"command_id", "run_id", …} or {"command_id", "errors"}."""
    return receipt_key(parse_run_id(run_id).tenant, f"{run_id}.{_plain_file(command_id)}")


def dataset_key(tenant: str, sha256: str, file: str) -> str:
    return f"{tenant_prefix(tenant)}datasets/{_plain_file(sha256)}/{_plain_file(file)}"


def dataset_prefix(tenant: str, sha256: str) -> str:
    return f"{tenant_prefix(tenant)}datasets/{_plain_file(sha256)}/"


def file_key(prefix: str, path: str) -> str:
    """The key of a file by its path below a prefix, which ends in "/"."""
    if not prefix.endswith("/"):
        raise InvalidName("prefix", prefix, "a key that ends in '/'")
    return prefix + "/".join(_plain_file(part) for part in path.split("/"))


def code_key(tenant: str, sha256: str) -> str:
    return f"{tenant_prefix(tenant)}code/{_plain_file(sha256)}/code.zip"


def model_prefix(tenant: str, sha256: str) -> str:
    """A base model that fit() uploaded once, by its hash."""
    return f"{tenant_prefix(tenant)}models/base/{_plain_file(sha256)}/"


def model_version_key(tenant: str, group: str, version: int) -> str:
    return f"{tenant_prefix(tenant)}models/{_plain_file(group)}/v{version:04d}.json"


def run_prefix(run_id: str) -> str:
    return f"{tenant_prefix(parse_run_id(run_id).tenant)}runs/{run_id}/"


def run_record_key(run_id: str) -> str:
    return f"{run_prefix(run_id)}run.json"


def config_prefix(run_id: str, attempt: int) -> str:
    return f"{run_prefix(run_id)}config/a{attempt:03d}/"


def checkpoints_prefix(run_id: str, lineage: int) -> str:
    """What CheckpointConfig.S3Uri points at: one lineage, since SageMaker restores the whole prefix."""
    return f"{run_prefix(run_id)}checkpoints/l{lineage:02d}/"


def step_prefix(run_id: str, lineage: int, step: int) -> str:
    return f"{checkpoints_prefix(run_id, lineage)}step-{step}/"


def kept_prefix(run_id: str, lineage: int, step: int) -> str:
    """Where a pinned checkpoint's copy lies."""
    return f"{run_prefix(run_id)}kept/l{lineage:02d}/step-{step}/"


def progress_key(run_id: str, lineage: int) -> str:
    return f"{checkpoints_prefix(run_id, lineage)}progress.json"


def rollouts_prefix(run_id: str, lineage: int) -> str:
    return f"{checkpoints_prefix(run_id, lineage)}{ROLLOUTS}/"


def rollout_file(step: int) -> str:
    return f"step-{step}.jsonl"


def step_of_rollout_file(name: str) -> int | None:
    """The step whose completions a file holds; None for any other name."""
    match = _ROLLOUT_FILE.fullmatch(name)
    return int(match["step"]) if match else None


def output_prefix(run_id: str) -> str:
    return f"{run_prefix(run_id)}output/"


def _plain_file(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise InvalidName("file name", name, "one path component, without a slash")
    return name


@dataclass(frozen=True)
class SpecKey:
    tenant: str
    file: str


def parse_spec_key(key: str) -> SpecKey | None:
    """None for whatever is not a spec: folder markers, hidden files, other folders, other endings, no such tenant."""
    match = _SPEC.fullmatch(key)
    if not match or match["file"].startswith(".") or not match["file"].endswith(_SPEC_SUFFIXES):
        return None
    try:
        return SpecKey(check_tenant(match["tenant"]), match["file"])
    except InvalidName:  # a folder that no tenant can have: nobody could read a receipt there
        return None


@dataclass(frozen=True)
class CommandKey:
    tenant: str
    run_id: str
    command_id: str


def parse_command_key(key: str) -> CommandKey | None:
    """None for other keys; InvalidName when a command names a run of another tenant."""
    match = _COMMAND.fullmatch(key)
    return CommandKey(_owner(match["tenant"], match["run_id"]), match["run_id"], match["id"]) if match else None


@dataclass(frozen=True)
class CheckpointKey:
    """A manifest (`step` set) or the progress file (`step` None) of one lineage."""

    tenant: str
    run_id: str
    lineage: int
    step: int | None


def parse_checkpoint_key(key: str) -> CheckpointKey | None:
    match = _CHECKPOINT.fullmatch(key)
    if not match:
        return None
    step = int(match["step"]) if match["step"] is not None else None
    return CheckpointKey(_owner(match["tenant"], match["run_id"]), match["run_id"], int(match["lineage"]), step)


def _owner(tenant: str, run_id: str) -> str:
    if parse_run_id(run_id).tenant != check_tenant(tenant):
        raise InvalidName("key", f"tenants/{tenant}/…/{run_id}", "under the prefix of the tenant its run belongs to")
    return tenant


@dataclass(frozen=True)
class S3Uri:
    """`s3://bucket/key`; a key that ends in "/" is a folder."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def is_folder(self) -> bool:
        return self.key.endswith("/")

    @property
    def file(self) -> str:
        return self.key.rstrip("/").rsplit("/", 1)[-1]


_S3_URI = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<key>.+)", re.DOTALL)
_BAD_PART = re.compile(r"(^|/)\.{1,2}(/|$)|^/|//|[\x00-\x1f\x7f-\x9f#?]")


def parse_s3_uri(uri: str) -> S3Uri:
    """Refuses what could name another place than it seems to: `..`, `//`, `#`, `?` and control characters."""
    match = _S3_URI.fullmatch(uri)
    if not match or _BAD_PART.search(match["key"]):
        raise InvalidName("S3 URI", uri, "s3://<bucket>/<key>, without '..', '//', '#' or '?'")
    return S3Uri(match["bucket"], match["key"])


def belongs_to(uri: S3Uri, bucket: str, tenant: str) -> bool:
    """Whether `uri` lies under the tenant's own prefix of the stage's bucket."""
    return uri.bucket == bucket and uri.key.startswith(tenant_prefix(tenant))
