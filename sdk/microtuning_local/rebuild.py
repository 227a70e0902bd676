"""After a crash the tables are empty and the bucket is not: they are read back before anybody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microtuning_core.domain.names import StackNames
from microtuning_core.usecases.rebuilding import rebuild
from microtuning_core.usecases.services import Services, StageSettings
from microtuning_local.home import STAGE

if TYPE_CHECKING:
    from microtuning_local.cloud import LocalCloud


def rebuild_lost_tables(cloud: LocalCloud) -> list[str]:
    """The runs that were put back; none where the tables hold one."""
    names = StackNames(STAGE, cloud.endpoint.account, cloud.endpoint.region)
    services = Services(cloud, StageSettings(names, "", 1))  # type: ignore[arg-type]  # a cloud makes clients as a session does
    return rebuild(services) if services.runs.knows_no_run() else []
