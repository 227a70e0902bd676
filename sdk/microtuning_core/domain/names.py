"""Names that carry whom they belong to; built and parsed here and nowhere else.

    stage      local                                        [a-z][a-z0-9]{1,5}
    tenant     acme                                         [a-z][a-z0-9]{1,15}, no hyphen, so that it ends at the first one
    run_id     acme-sort-digits-0z3k8q5m1c7t                <tenant>-<slug, at most 20>-<6 of the time + 6 of a hash>
    job        local-acme-sort-digits-0z3k8q5m1c7t-a001     <stage>-<run_id>-a<NNN>, at most 62 of SageMaker's 63
    execution  acme-sort-digits-0z3k8q5m1c7t-e2             the run_id, and from the second on its number

A run_id is a function of what asked for the run (bucket, key, etag, sequencer and the event's time), so an event that is
delivered twice names the same run, while a second upload of the same file names a new one.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime

from microtuning_core.domain.errors import InvalidName

# 32 letters in ASCII order, without i, l, o and u: run ids sort by time and can be read aloud.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_EPOCH = datetime(2024, 1, 1, tzinfo=UTC)  # 30 bits of seconds from here last until 2058

_STAGE = re.compile(r"[a-z][a-z0-9]{1,5}")
_TENANT = re.compile(r"[a-z][a-z0-9]{1,15}")
_RUN_ID = re.compile(
    rf"(?P<tenant>[a-z][a-z0-9]{{1,15}})-(?P<slug>[a-z0-9](?:-?[a-z0-9]){{0,19}})-(?P<mark>[{_ALPHABET}]{{12}})"
)
_JOB = re.compile(rf"(?P<stage>{_STAGE.pattern})-(?P<run_id>.+)-a(?P<attempt>[0-9]{{3}})")
_EXECUTION = re.compile(r"(?P<run_id>.+?)(?:-e(?P<number>[1-9][0-9]{0,8}))?")

MAX_SLUG = 20
MAX_RUN_NAME = 200
MAX_ATTEMPTS = 999


def check_stage(stage: str) -> str:
    if not _STAGE.fullmatch(stage):
        raise InvalidName("stage", stage, "2 to 6 lower-case letters or digits, a letter first")
    return stage


def check_tenant(tenant: str) -> str:
    if not _TENANT.fullmatch(tenant):
        raise InvalidName("tenant", tenant, "2 to 16 lower-case letters or digits, a letter first")
    return tenant


def check_run_name(name: str) -> str:
    """A run's name is free text for people; only an empty or endless one is refused."""
    if not name.strip() or len(name) > MAX_RUN_NAME:
        raise InvalidName("run name", name[:40], f"1 to {MAX_RUN_NAME} characters, not only blanks")
    return name


def slug(name: str) -> str:
    """The readable part of a run_id: ASCII letters, digits and single hyphens, at most 20, never ending in a hyphen."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_name).strip("-")[:MAX_SLUG].rstrip("-") or "run"


def new_run_id(tenant: str, name: str, asked_at: datetime, *evidence: str) -> str:
    """The id of the run that `evidence` (bucket, key, etag, sequencer …) asked for at `asked_at`."""
    return f"{check_tenant(tenant)}-{slug(check_run_name(name))}-{_time_mark(asked_at)}{_hash_mark(evidence)}"


def _time_mark(moment: datetime) -> str:
    return _base32(int((moment - _EPOCH).total_seconds()) % 2**30)


def _hash_mark(evidence: tuple[str, ...]) -> str:
    digest = hashlib.sha256("\0".join(evidence).encode()).digest()
    return _base32(int.from_bytes(digest[:4], "big") >> 2)


def _base32(thirty_bits: int) -> str:
    return "".join(_ALPHABET[(thirty_bits >> shift) & 31] for shift in range(25, -1, -5))


@dataclass(frozen=True)
class RunName:
    run_id: str
    tenant: str
    slug: str


def parse_run_id(run_id: str) -> RunName:
    match = _RUN_ID.fullmatch(run_id)
    if not match:
        raise InvalidName("run id", run_id, "<tenant>-<slug>-<12 letters or digits>, as fit() prints it")
    return RunName(run_id, match["tenant"], match["slug"])


@dataclass(frozen=True)
class JobName:
    stage: str
    run_id: str
    attempt: int

    @property
    def tenant(self) -> str:
        return parse_run_id(self.run_id).tenant

    def __str__(self) -> str:
        return job_name(self.stage, self.run_id, self.attempt)


def job_name(stage: str, run_id: str, attempt: int) -> str:
    """The SageMaker training job of one attempt; at most 62 characters."""
    parse_run_id(run_id)
    if not 1 <= attempt <= MAX_ATTEMPTS:
        raise InvalidName("attempt", str(attempt), f"1 to {MAX_ATTEMPTS}")
    return f"{check_stage(stage)}-{run_id}-a{attempt:03d}"


def parse_job_name(name: str) -> JobName:
    """Refuses every name that this product could not have given: jobs of others are never touched."""
    match = _JOB.fullmatch(name)
    if not match:
        raise InvalidName("job name", name, "<stage>-<run id>-a<NNN>")
    return JobName(match["stage"], parse_run_id(match["run_id"]).run_id, int(match["attempt"]))


def own_job_name(name: str, stage: str) -> JobName | None:
    """None for jobs of others: another stage's, or not ours at all. They are never touched."""
    try:
        found = parse_job_name(name)
    except InvalidName:
        return None
    return found if found.stage == stage else None


def execution_name(run_id: str, number: int = 1) -> str:
    """The Step Functions execution of a run; the second and later ones take up a run whose execution died."""
    return run_id if number == 1 else f"{run_id}-e{number}"


def parse_execution_name(name: str) -> tuple[str, int]:
    """`(run_id, number)`. An execution that a person started under a name of their own is refused."""
    match = _EXECUTION.fullmatch(name)
    if not match:
        raise InvalidName("execution name", name, "<run id> or <run id>-e<N>")
    return parse_run_id(match["run_id"]).run_id, int(match["number"] or 1)


@dataclass(frozen=True)
class StackNames:
    """Every name of one deployment, so that a user needs no right to describe the stack."""

    stage: str
    account: str
    region: str

    def __post_init__(self) -> None:
        check_stage(self.stage)

    @property
    def stack(self) -> str:
        return f"microtuning-{self.stage}"

    @property
    def bucket(self) -> str:
        return f"microtuning-{self.stage}-{self.account}-{self.region}"

    @property
    def state_machine_arn(self) -> str:
        return f"arn:aws:states:{self.region}:{self.account}:stateMachine:{self.stack}"

    def job_role_arn(self, tenant: str | None) -> str:
        """The role of the tenant's training jobs; None = the one that tenants without a role of their own share."""
        return self._role_arn("job" if tenant is None else f"job-{check_tenant(tenant)}")

    def user_role_arn(self, tenant: str) -> str:
        """The role that the people of a tenant take."""
        return self._role_arn(f"user-{check_tenant(tenant)}")

    @property
    def launcher_role_arn(self) -> str:
        """The role that makes jobs where tenants are told apart by session tags."""
        return self._role_arn("launcher")

    def tenant_key_arn(self, tenant: str) -> str:
        """The tenant's own KMS key, by its alias."""
        return f"arn:aws:kms:{self.region}:{self.account}:alias/{self.stack}-{check_tenant(tenant)}"

    def _role_arn(self, role: str) -> str:
        return f"arn:aws:iam::{self.account}:role/{self.stack}-{role}"

    def table(self, name: str) -> str:
        return f"{self.stack}-{name}"

    def function(self, name: str) -> str:
        return f"{self.stack}-{name.replace('_', '-')}"

    def execution_arn(self, execution: str) -> str:
        return f"arn:aws:states:{self.region}:{self.account}:execution:{self.stack}:{execution}"


# Where SageMaker writes the logs of training jobs.
TRAINING_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
