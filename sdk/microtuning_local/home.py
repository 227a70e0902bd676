"""Where the local cloud keeps what it knows: `$MICROTUNING_HOME/local`, or `~/.microtuning/local`.

endpoint.json   addresses, process ids, the token of the admin endpoint (readable by its owner only)
state/ s3/      the emulator's tables and objects
jobs/<job>/     record.json of each training job; its /opt/ml tree while it runs, and after it failed
logs/           emulator.log, sagemaker.log
tmp/            temporary folder of both processes; emptied by `down`
tables-saved    there while no emulator runs and the last one saved its tables
lock            held while somebody starts or stops the cloud
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

REGION = "us-east-1"
ACCOUNT = "000000000000"
ROOT_SECRET = "test"  # nosec B105 # the emulator's own; behind the gate only programs of this machine can say it
STAGE = "local"


@dataclass(frozen=True)
class Home:
    """The state folder. Making one touches nothing; `prepare` creates the folders."""

    root: Path

    @property
    def endpoint_file(self) -> Path:
        return self.root / "endpoint.json"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def saved_mark(self) -> Path:
        """There while no emulator runs and the last one saved its tables: see gate.py."""
        return self.root / "tables-saved"

    @property
    def s3(self) -> Path:
        return self.root / "s3"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def prepare(self) -> None:
        """Create the folders, closed to other users: objects and logs may hold private data."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.state, self.s3, self.jobs, self.logs, self.tmp):
            folder.mkdir(exist_ok=True, mode=0o700)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cloud's lock, so that two `up` (or an `up` and a `down`) follow one another."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def local_home() -> Home:
    """The state folder of this user, or the one `MICROTUNING_HOME` names."""
    base = os.environ.get("MICROTUNING_HOME")
    return Home((Path(base).expanduser() if base else Path.home() / ".microtuning") / "local")


@dataclass(frozen=True)
class Endpoint:
    """endpoint.json: where the cloud listens, and the stamp of the sources that were deployed there.

    A pid is known by its start time too, since pids are used again.
    """

    endpoint_url: str
    sagemaker_url: str
    token: str
    region: str = REGION
    account: str = ACCOUNT
    emulator_pid: int | None = None
    emulator_started: str | None = None
    sagemaker_pid: int | None = None
    sagemaker_started: str | None = None
    deployed: str = ""

    @property
    def port(self) -> int:
        return int(self.endpoint_url.rsplit(":", 1)[1])

    @property
    def sagemaker_port(self) -> int:
        return int(self.sagemaker_url.rsplit(":", 1)[1])

    def stopped(self) -> Endpoint:
        """Without its processes."""
        return replace(self, emulator_pid=None, emulator_started=None, sagemaker_pid=None, sagemaker_started=None)


def read_endpoint(home: Home) -> Endpoint | None:
    """What endpoint.json says, or None before the first `up`."""
    try:
        return Endpoint(**json.loads(home.endpoint_file.read_text()))
    except FileNotFoundError:
        return None


def write_endpoint(home: Home, endpoint: Endpoint) -> None:
    write_whole(home.endpoint_file, json.dumps(asdict(endpoint), indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write by rename, mode 0600: a reader sees the old file or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.touch(mode=0o600)
    beside.write_text(text)
    beside.replace(path)
