"""After a crash the tables are as of the last clean stop, or empty, and the bucket is not: they are read back from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microtuning_core.domain.names import StackNames
from microtuning_core.usecases.rebuilding import rebuild
from microtuning_core.usecases.services import Services, StageSettings
from microtuning_local.home import STAGE

if TYPE_CHECKING:
    from microtuning_local.cloud import LocalCloud


def read_tables_back(cloud: LocalCloud) -> list[str]:
    """The runs that were put back: those that the tables lack, or know of an older revision."""
    names = StackNames(STAGE, cloud.endpoint.account, cloud.endpoint.region)
    services = Services(cloud, StageSettings(names, "", 1))  # type: ignore[arg-type]  # a cloud makes clients as a session does
    return rebuild(services)
