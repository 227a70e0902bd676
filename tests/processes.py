"""Processes of training jobs, found by what the local SageMaker put into their environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def processes_of(job_name: str) -> dict[int, int]:
    """pid -> parent of every process of the job."""
    return {pid: parent for pid, parent, words in every_process() if f"TRAINING_JOB_NAME={job_name}" in words}


def leader_of(job_name: str) -> int:
    """The first process of the job; StopIteration where it has none any more."""
    found = processes_of(job_name)
    return next(pid for pid, parent in found.items() if parent not in found)


def every_process() -> Iterator[tuple[int, int, list[str]]]:
    """pid, parent, environment of every process that can be looked into."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it ended meanwhile, or is not ours
        yield int(folder.name), parent, environment
