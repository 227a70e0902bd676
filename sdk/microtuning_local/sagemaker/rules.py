"""What SageMaker refuses, and in which words: pure functions from a request to a refusal.

Lengths, patterns, enumerations and required members come from the service's own model, which botocore ships; the
functions below add what the model cannot say: members that do not go together, and what an instance type can do.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from botocore.model import Shape

DAY_S = 86_400
MAX_RUNTIME_S = 28 * DAY_S
DEFAULT_MAX_RUNTIME_S = DAY_S
SHOWN_CHARACTERS = 200
CONTAINER_CHECKPOINTS = "/opt/ml/checkpoints"


class Refusal(Exception):
    """An error answer of the service: its code, its message, and the HTTP status it travels under."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


def validation(message: str) -> Refusal:
    return Refusal("ValidationException", message)


def not_found() -> Refusal:
    """A job that does not exist is a ValidationException too, not a ResourceNotFound."""
    return validation("Requested resource not found.")


def already_exists(name: str, arn: str) -> Refusal:
    return Refusal(
        "ResourceInUse",
        "Training job names must be unique within an AWS account and region, but a training job with the name "
        f"{name} already exists ({arn})",
    )


def limit_exceeded(instance_type: str, asked: int) -> Refusal:
    return _over_limit(f"{instance_type} for training job usage", 0, 0, asked)


def warm_pools_exceeded(instance_type: str, limit: int, used: int, asked: int) -> Refusal:
    """The limit for machines that are kept is one of its own, and 0 in a new account."""
    return _over_limit(f"{instance_type} for training warm pool usage", limit, used, asked)


def _over_limit(name: str, limit: int, used: int, asked: int) -> Refusal:
    return Refusal(
        "ResourceLimitExceeded",
        f"The account-level service limit '{name}' is {limit} Instances, with current "
        f"utilization of {used} Instances and a request delta of {asked} Instances. Please use AWS Service Quotas to "
        "request an increase for this quota. If AWS Service Quotas is not available, contact AWS support to request "
        "an increase for this quota.",
    )


def role_not_assumable(role_arn: str) -> Refusal:
    return validation(
        f"Could not assume role {role_arn}. Please ensure that the role exists and allows principal "
        "'sagemaker.amazonaws.com' to assume the role."
    )


def check_create(request: Mapping[str, Any]) -> None:
    """Raise the first Refusal that CreateTrainingJob would answer this request with.

    The service lists every broken constraint of the model at once; rules between members come one at a time.
    """
    check_model("CreateTrainingJob", request)
    for rule in RULES:
        message = rule(request)
        if message:
            raise validation(message)


# -- constraints of the model ------------------------------------------------------------------------------------------


@cache
def input_shape(operation: str) -> Shape:
    """The input shape of an operation in the service model that botocore ships (0.2 s the first time)."""
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    shape = model.operation_model(operation).input_shape
    assert shape is not None  # every operation here takes input
    return shape


def check_model(operation: str, request: Mapping[str, Any]) -> None:
    found = list(violations(input_shape(operation), request, ""))
    if found:
        errors = "error" if len(found) == 1 else "errors"
        raise validation(f"{len(found)} validation {errors} detected: {'; '.join(found)}")


def violations(shape: Shape, value: Any, path: str) -> Iterator[str]:
    """Every constraint of the model that `value` breaks, worded as the service words it."""
    if not is_of_kind(value, shape.type_name):
        yield broken(value, path, f"Member must be of type {shape.type_name}")
        return
    match shape.type_name:
        case "structure":
            yield from structure_violations(shape, value, path)
        case "list":
            yield from size_violations(shape, value, path, len(value))
            for index, item in enumerate(value, start=1):
                yield from violations(shape.member, item, f"{path}.{index}.member")  # type: ignore[attr-defined]
        case "map":
            yield from map_violations(shape, value, path)
        case "string":
            yield from size_violations(shape, value, path, len(value))
            yield from text_violations(shape, value, path)
        case "integer" | "long":
            yield from range_violations(shape, value, path)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "structure": dict, "map": dict, "list": list, "string": str, "boolean": bool,
    "integer": int, "long": int, "float": (int, float), "double": (int, float),
}  # fmt: skip


def is_of_kind(value: Any, type_name: str) -> bool:
    """Whether JSON brought what the model asks for: boto3 sees to that, and others may send anything."""
    if isinstance(value, bool):
        return type_name == "boolean"
    return isinstance(value, _KINDS.get(type_name, object))


def structure_violations(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in shape.required_members:
        if value.get(name) is None:
            yield broken("null", joined(path, name), "Member must not be null")
    for name, member in shape.members.items():
        if value.get(name) is not None:
            yield from violations(member, value[name], joined(path, name))


def map_violations(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from size_violations(shape, value, path, len(value))
    for key, item in value.items():
        yield from violations(shape.key, key, f"{path}.key")
        yield from violations(shape.value, item, f"{path}.{key}.member")


def size_violations(shape: Shape, value: Any, path: str, size: int) -> Iterator[str]:
    least, most = shape.metadata.get("min", 0), shape.metadata.get("max")
    if most is not None and size > most:
        yield broken(value, path, f"Member must have length less than or equal to {most}")
    if size < least:
        yield broken(value, path, f"Member must have length greater than or equal to {least}")


def text_violations(shape: Any, value: str, path: str) -> Iterator[str]:
    if shape.enum and value not in shape.enum:
        yield broken(value, path, f"Member must satisfy enum value set: [{', '.join(sorted(shape.enum))}]")
    pattern = shape.metadata.get("pattern")
    if pattern and not re.fullmatch(python_pattern(pattern), value):
        yield broken(value, path, f"Member must satisfy regular expression pattern: {pattern}")


def range_violations(shape: Shape, value: int, path: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and value < least:
        yield broken(value, path, f"Member must have value greater than or equal to {least}")
    if most is not None and value > most:
        yield broken(value, path, f"Member must have value less than or equal to {most}")


def broken(value: Any, path: str, constraint: str) -> str:
    return f"Value '{str(value)[:SHOWN_CHARACTERS]}' at '{path}' failed to satisfy constraint: {constraint}"


def joined(path: str, name: str) -> str:
    """The service writes members in lower camel case: resourceConfig.instanceType."""
    lower = name[:1].lower() + name[1:]
    return f"{path}.{lower}" if path else lower


def python_pattern(java_pattern: str) -> str:
    """The model's patterns are Java's; these classes are spelled otherwise in Python (all stand inside brackets)."""
    for java, python in ((r"\p{L}", r"\w"), (r"\p{N}", r"\d"), (r"\p{Z}", r"\s"), (r"\p{Alnum}", "a-zA-Z0-9")):
        java_pattern = java_pattern.replace(java, python)
    return java_pattern


# -- rules between members ---------------------------------------------------------------------------------------------


def image_is_named(request: Mapping[str, Any]) -> str | None:
    algorithm = request.get("AlgorithmSpecification") or {}
    if bool(algorithm.get("TrainingImage")) == bool(algorithm.get("AlgorithmName")):
        return "Exactly one of TrainingImage and AlgorithmName must be specified in AlgorithmSpecification."
    return None


def resources_are_named(request: Mapping[str, Any]) -> str | None:
    config = request.get("ResourceConfig") or {}
    ways = [key for key in ("InstanceType", "InstanceGroups", "InstancePreferences") if config.get(key)]
    if len(ways) != 1:
        return "ResourceConfig must specify exactly one of InstanceType, InstanceGroups and InstancePreferences."
    if ways == ["InstanceType"] and config.get("InstanceCount", 0) < 1:
        return "InstanceCount must be greater than or equal to 1."
    if ways == ["InstanceGroups"] and any(group["InstanceCount"] < 1 for group in config["InstanceGroups"]):
        return "InstanceCount of every instance group must be greater than or equal to 1."
    if "VolumeSizeInGB" not in config or config["VolumeSizeInGB"] < 1:
        return "VolumeSizeInGB must be greater than or equal to 1."
    return None


def runtime_is_allowed(request: Mapping[str, Any]) -> str | None:
    seconds = max_runtime_s(request)
    if seconds > MAX_RUNTIME_S:
        return (
            f"Invalid MaxRuntimeInSeconds: {seconds}. MaxRuntimeInSeconds must be between 1 and {MAX_RUNTIME_S} "
            "(28 days)."
        )
    return None


def waiting_is_for_spot(request: Mapping[str, Any]) -> str | None:
    wait_s = (request.get("StoppingCondition") or {}).get("MaxWaitTimeInSeconds")
    is_spot = bool(request.get("EnableManagedSpotTraining"))
    if wait_s is not None and not is_spot:
        return "Invalid MaxWaitTimeInSeconds. It is not supported when EnableManagedSpotTraining is set to false."
    if is_spot and wait_s is None:
        return "Missing MaxWaitTimeInSeconds. It must be present when EnableManagedSpotTraining is set to true."
    if wait_s is not None and wait_s < max_runtime_s(request):
        return (
            "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds "
            "when EnableManagedSpotTraining is set to true."
        )
    return None


def warm_pool_is_allowed(request: Mapping[str, Any]) -> str | None:
    config = request.get("ResourceConfig") or {}
    if not config.get("KeepAlivePeriodInSeconds"):
        return None
    if request.get("EnableManagedSpotTraining"):
        return "KeepAlivePeriodInSeconds is not supported when EnableManagedSpotTraining is set to true."
    if config.get("InstanceGroups"):
        return "KeepAlivePeriodInSeconds is not supported for heterogeneous clusters."
    return None


def preferences_are_on_demand(request: Mapping[str, Any]) -> str | None:
    if request.get("EnableManagedSpotTraining") and (request.get("ResourceConfig") or {}).get("InstancePreferences"):
        return "InstancePreferences is not supported when EnableManagedSpotTraining is set to true."
    return None


def volume_key_is_allowed(request: Mapping[str, Any]) -> str | None:
    """Types with local storage encrypt it in hardware and refuse a key for the volume."""
    config = request.get("ResourceConfig") or {}
    if not config.get("VolumeKmsKeyId"):
        return None
    with_storage = [name for name in instance_types(request) if has_local_storage(name)]
    if with_storage:
        return f"VolumeKmsKeyId is not supported for instance type {with_storage[0]}, which has local instance storage."
    return None


def locations_are_s3(request: Mapping[str, Any]) -> str | None:
    for path, uri in named_locations(request):
        if not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", uri):
            return f"{path} is not a valid S3 URI: {uri}. Provide a value of the form s3://bucket/prefix."
    return None


def channels_are_distinct(request: Mapping[str, Any]) -> str | None:
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig") or []]
    if len(names) != len(set(names)):
        return f"Duplicate channel names found: {', '.join(sorted({n for n in names if names.count(n) > 1}))}."
    return None


def environment_is_free(request: Mapping[str, Any]) -> str | None:
    reserved = [key for key in request.get("Environment") or {} if key in ("TRAINING_JOB_NAME", "TRAINING_JOB_ARN")]
    return f"Environment variables {reserved} are reserved by SageMaker." if reserved else None


def local_limits(request: Mapping[str, Any]) -> str | None:
    """What the service can do and this one cannot; the words say which of the two refuses."""
    for channel in request.get("InputDataConfig") or []:
        source = channel["DataSource"].get("S3DataSource")
        if not source or source["S3DataType"] != "S3Prefix":
            return f"The local SageMaker reads S3Prefix channels only; {channel['ChannelName']} is another kind."
    local_path = (request.get("CheckpointConfig") or {}).get("LocalPath", CONTAINER_CHECKPOINTS)
    if not local_path.startswith("/opt/ml/") or ".." in local_path.split("/"):
        return f"The local SageMaker keeps checkpoints below /opt/ml; CheckpointConfig.LocalPath is {local_path}."
    return None


RULES: tuple[Callable[[Mapping[str, Any]], str | None], ...] = (
    image_is_named,
    resources_are_named,
    runtime_is_allowed,
    waiting_is_for_spot,
    warm_pool_is_allowed,
    preferences_are_on_demand,
    volume_key_is_allowed,
    locations_are_s3,
    channels_are_distinct,
    environment_is_free,
    local_limits,
)


# -- readings of a request ---------------------------------------------------------------------------------------------


def max_runtime_s(request: Mapping[str, Any]) -> int:
    seconds: int = (request.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds", DEFAULT_MAX_RUNTIME_S)
    return seconds


def instance_types(request: Mapping[str, Any]) -> list[str]:
    config = request.get("ResourceConfig") or {}
    listed = [row["InstanceType"] for key in ("InstanceGroups", "InstancePreferences") for row in config.get(key) or []]
    return listed + ([config["InstanceType"]] if config.get("InstanceType") else [])


def named_locations(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every S3 address of a request, with the member it stands in."""
    yield "OutputDataConfig.S3OutputPath", request["OutputDataConfig"]["S3OutputPath"]
    if request.get("CheckpointConfig"):
        yield "CheckpointConfig.S3Uri", request["CheckpointConfig"]["S3Uri"]
    for channel in request.get("InputDataConfig") or []:
        source = channel["DataSource"].get("S3DataSource")
        if source:
            yield f"InputDataConfig.{channel['ChannelName']}.S3Uri", source["S3Uri"]


def has_local_storage(instance_type: str) -> bool:
    """Whether our catalog says the type has instance storage; a type it does not know has none."""
    from microtuning_core.domain import catalog

    row = catalog.CATALOG.get(instance_type)
    return bool(row and row.local_storage_gb)
