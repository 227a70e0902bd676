"""A user's word to a run that exists."""

from __future__ import annotations

from microtuning_core.domain.command import Command
from microtuning_core.domain.errors import MicrotuningError
from microtuning_core.domain.layout import CommandKey
from microtuning_core.usecases.services import Services
from microtuning_core.usecases.settle import settle


def obey(services: Services, object_key: str, key: CommandKey) -> None:
    """Does what the command says. A command for a run that is over, or given twice, changes nothing."""
    body = services.objects.read(object_key)
    if body is None:
        raise MicrotuningError(f"The command {object_key} is not there.", next_step="Give it again.")
    command = Command.model_validate_json(body)
    services.runs.note(key.run_id, "command", command.verb, client_id=command.client_id)
    settle(services, key.run_id, command=command)
