"""A user's word to a run that exists, and the answer to it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from microtuning_core.domain.branching import asked_to_go_back, find_checkpoint
from microtuning_core.domain.budget import run_usd, stopped_for_budget, with_budget
from microtuning_core.domain.command import Command
from microtuning_core.domain.cost import shown
from microtuning_core.domain.errors import InvalidSpec, MicrotuningError, Problem
from microtuning_core.domain.fields import Json
from microtuning_core.domain.layout import CommandKey, answer_key, kept_prefix, step_prefix
from microtuning_core.domain.manifest import MANIFEST_NAME, CheckpointManifest
from microtuning_core.domain.names import new_run_id
from microtuning_core.domain.run import CheckpointRef, Run, new_run
from microtuning_core.domain.spec_checks import field_problems, parse_spec, with_lines
from microtuning_core.spec_files import MAX_BYTES
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import settle
from microtuning_core.usecases.submit import begin_run, check_spec


def obey(services: Services, object_key: str, key: CommandKey) -> None:
    """Does what the command says and writes the answer. Given twice it changes nothing more; refused, nothing at all."""
    body = services.objects.read(object_key, at_most=MAX_BYTES)
    if body is None:
        raise MicrotuningError(f"The command {object_key} is not there.", next_step="Give it again.")
    try:
        command, run = _understood(body), _known(services, key.run_id)
        services.runs.note(key.run_id, "command", command.verb, client_id=command.client_id)
        answer = _do(services, run, command, key.command_id)
    except InvalidSpec as error:
        answer = {"errors": [each.as_dict() for each in error.problems]}
    services.objects.put_json(answer_key(key.run_id, key.command_id), {"command_id": key.command_id} | answer)


def _understood(body: bytes) -> Command:
    if len(body) > MAX_BYTES:
        raise InvalidSpec([Problem("command", f"has more than {MAX_BYTES} bytes")])
    try:
        return Command.model_validate_json(body)
    except ValidationError as error:
        raise InvalidSpec(with_lines(field_problems(error, of="command"), {})) from None


def _known(services: Services, run_id: str) -> Run:
    run = services.runs.find(run_id)
    if run is None:
        raise InvalidSpec([Problem("run_id", f"there is no run {run_id}")])
    return run


def _do(services: Services, run: Run, command: Command, command_id: str) -> dict[str, Any]:
    if command.verb == "cancel":
        settle(services, run.run_id, command=command)
        return {"run_id": run.run_id}
    if command.verb == "budget":
        return _raise_budget(services, run, command, command_id)
    meant = _checkpoint(services, run, command)
    match command.verb:
        case "rollback":
            services.runs.update(run.run_id, lambda run: asked_to_go_back(run, meant, command_id))
            settle(services, run.run_id)
            return {"run_id": run.run_id, "lineage": meant.lineage, "step": meant.step}
        case "pin":
            return {"run_id": run.run_id, "uri": f"s3://{services.names.bucket}/{keep(services, run.run_id, meant)}"}
        case "fork":
            return {"run_id": _fork(services, run, meant, command, command_id)}


def _raise_budget(services: Services, run: Run, command: Command, command_id: str) -> dict[str, Any]:
    """Another budget, which acts at once; refused where it would not let a stopped run go on."""
    if command.usd is None:
        raise InvalidSpec([Problem("usd", "is missing: how much the run may cost in all")])
    usd, spent = command.usd, run_usd(run, datetime.now(UTC))
    if command_id not in run.obeyed and stopped_for_budget(run) and usd <= spent:
        raise InvalidSpec([Problem("usd", f"is more than what the run has spent: {shown(spent)} USD at most")])
    services.runs.update(run.run_id, lambda run: with_budget(run, usd, command_id))
    settle(services, run.run_id)
    return {"run_id": run.run_id, "budget_usd": str(usd)}


def _checkpoint(services: Services, run: Run, command: Command) -> CheckpointRef:
    """The registered checkpoint that the command means; refused by field when there is none."""
    registered = services.runs.checkpoints(run.run_id)
    found = find_checkpoint(registered, command.step, command.lineage)
    if found is None:
        have = ", ".join(f"{each.step} (lineage {each.lineage})" for each in registered) or "none yet"
        raise InvalidSpec([Problem("step", f"is no checkpoint of {run.run_id}, which has {have}")])
    return found


def keep(services: Services, run_id: str, checkpoint: CheckpointRef) -> str:
    """Copies a checkpoint to where nothing is pruned, its manifest last; the prefix of the copy. Safe to repeat."""
    source = step_prefix(run_id, checkpoint.lineage, checkpoint.step)
    target = kept_prefix(run_id, checkpoint.lineage, checkpoint.step)
    if services.objects.bytes_of(target + MANIFEST_NAME) is not None:
        return target
    body = services.objects.read(source + MANIFEST_NAME)
    if body is None:
        raise InvalidSpec([Problem("step", f"checkpoint {checkpoint.step} was pruned meanwhile")])
    for file in CheckpointManifest.model_validate_json(body).files:
        services.objects.copy(source + file.path, target + file.path)
    services.objects.put(target + MANIFEST_NAME, body)
    services.runs.note(run_id, "pinned", f"step {checkpoint.step} of lineage {checkpoint.lineage} is kept")
    return target


def _fork(services: Services, run: Run, start: CheckpointRef, command: Command, command_id: str) -> str:
    """A new run from a checkpoint of this one. Its id follows from the command, so that it is made once."""
    document = changed(run.spec.model_dump(mode="json", exclude_unset=True), command.changes)
    document["name"] = command.name or document["name"]
    spec = check_spec(services, run.tenant, parse_spec(document))
    run_id = new_run_id(run.tenant, spec.name, command.issued_at, run.run_id, command_id)
    keep(services, run.run_id, start)
    forked = new_run(run_id, spec, datetime.now(UTC))
    begin_run(services, forked.with_(resume_from=start.model_copy(update={"run_id": run.run_id})))
    services.runs.note(run.run_id, "forked", f"{run_id} begins at step {start.step}")
    return run_id


def changed(document: Mapping[str, Json], changes: Mapping[str, Json]) -> dict[str, Json]:
    """`document` with `changes` laid over it, mapping by mapping; a None takes the field away, back to its default."""
    merged = dict(document)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = changed(merged[name], value)
        else:
            merged[name] = value
    return merged
