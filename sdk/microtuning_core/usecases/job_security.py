"""What a training job's request says of keys and networks: encrypted wherever it can be, and no wider open than asked.

    outputs           the tenant's key, or the stage's, always
    volume            the same key, on types without instance storage; those that have it encrypt it and refuse a key
    between machines  encrypted, where there are several
    network           the stage's own, where it has one; none at all with compute.network_isolation

That each type of the catalog gets what it takes is shown by tests/unit/test_job_security.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.run import AttemptPlan


@dataclass(frozen=True)
class JobNetwork:
    """Where the machines of jobs stand; a stage without one leaves them in SageMaker's own network."""

    subnets: Sequence[str]
    security_groups: Sequence[str]


def secure(
    request: dict[str, Any], plan: AttemptPlan, *, key_arn: str | None, network: JobNetwork | None, isolated: bool
) -> None:
    """Adds them to a CreateTrainingJob request. Only fields that differ from the service's defaults."""
    if key_arn:
        request["OutputDataConfig"]["KmsKeyId"] = key_arn
        if takes_a_volume_key(plan.instance_type):
            request["ResourceConfig"]["VolumeKmsKeyId"] = key_arn
    if plan.count > 1:
        request["EnableInterContainerTrafficEncryption"] = True
    if network:
        request["VpcConfig"] = {"Subnets": list(network.subnets), "SecurityGroupIds": list(network.security_groups)}
    if isolated:
        request["EnableNetworkIsolation"] = True


def takes_a_volume_key(instance_type: str) -> bool:
    """Whether the volume of the type is EBS, by our catalog; of a type that is not in it nothing is known."""
    row = CATALOG.get(instance_type)
    return row is not None and not row.local_storage_gb
