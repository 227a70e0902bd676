"""From a document to a RunSpec, or to every problem it has: by field, by line where the file's reader knows them.

Three kinds of rules. Reported together: what each field may be (the records in `spec`) and what no field may hold (values
that cannot be stored or shown). Then, once the fields are right: what one part asks of another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache

from pydantic import ValidationError

from microtuning_core.domain.algorithms import (
    ALGORITHMS,
    LOSS_ALGORITHMS,
    POLICY_ALGORITHMS,
    DpoSettings,
    KtoSettings,
)
from microtuning_core.domain.catalog import CATALOG
from microtuning_core.domain.errors import InvalidSpec, Problem
from microtuning_core.domain.fields import Json
from microtuning_core.domain.spec import POLICIES, RunSpec
from microtuning_core.domain.spec_dangers import dangers, environment_problems, unstorable

MAX_SPEC_BYTES = 200_000  # a run's record holds its spec, and DynamoDB an item of 400 kB

_MAX_MESSAGE = 500  # some messages quote what they refuse, and that may be endless

# pydantic's words, where the reader of a spec is helped by others
_MESSAGES = {
    "missing": "is missing",
    "model_type": "is a mapping of fields to values",
    "dict_type": "is a mapping of names to values",
    "union_tag_not_found": f"needs a type: one of {', '.join(ALGORITHMS)}",
    "union_tag_invalid": f"has another type: it is one of {', '.join(ALGORITHMS)}",
}


def parse_spec(document: Json, lines: Mapping[str, int] | None = None) -> RunSpec:
    """The spec in `document` (what json or yaml gave), or InvalidSpec with every problem by field and line.

    Args:
        document: a mapping, as read from the file.
        lines: line number of each field by dotted path, where the file's reader knows them.
    """
    lines = lines or {}
    if not isinstance(document, Mapping):
        raise InvalidSpec([Problem("spec", "a spec is a mapping of fields to values", lines.get(""))])
    problems = [*unstorable(document, ""), *environment_problems(document.get("environment_variables"))]
    try:
        spec = RunSpec.model_validate(document)
    except ValidationError as error:
        raise InvalidSpec(with_lines([*field_problems(error), *problems], lines)) from None
    # Once more of the values as they were understood: "999…" in quotes is a number where a number is asked for.
    problems += [*unstorable(spec.model_dump(), ""), *dangers(spec), *_missing_parts(spec)]
    if not problems and len(spec.model_dump_json()) > MAX_SPEC_BYTES:
        problems.append(
            Problem("spec", f"has over {MAX_SPEC_BYTES:,} bytes; put long values into the code or the data")
        )
    if problems:
        raise InvalidSpec(with_lines(problems, lines))
    return spec


def with_lines(problems: list[Problem], lines: Mapping[str, int]) -> list[Problem]:
    """The problems with their lines, one a field: the first that was found."""
    first: dict[str, Problem] = {}
    for each in problems:
        message = each.message if len(each.message) <= _MAX_MESSAGE else each.message[:_MAX_MESSAGE] + "…"
        first.setdefault(each.field, Problem(each.field, message, each.line or _line_of(each.field, lines)))
    return list(first.values())


def _line_of(path: str, lines: Mapping[str, int]) -> int | None:
    """The line of the field, or of the nearest field around it (a missing field has no line of its own)."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path)


def field_problems(error: ValidationError, of: str = "spec") -> list[Problem]:
    """What pydantic found, in the words of a spec (or a command); `of` is the field of what has none."""
    return [
        Problem(_path(each["loc"]) or of, _words(each["type"], each["msg"], of) + _meant(each["type"], each["loc"], of))
        for each in error.errors()
    ]


def _meant(kind: str, location: tuple[int | str, ...], of: str) -> str:
    """The field of a spec that an unknown one is likely to have been."""
    if kind != "extra_forbidden" or of != "spec":
        return ""
    close = get_close_matches(str(location[-1]), _all_fields(), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


@cache
def _all_fields() -> list[str]:
    schema = RunSpec.model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    return sorted({name for part in parts for name in part.get("properties", {})})


def _path(location: tuple[int | str, ...]) -> str:
    """The field as its user wrote it: pydantic adds the union's tag, and the kind that a value was tried as."""
    parts = [str(part) for part in location]
    if parts[:1] == ["algorithm"] and parts[1:2] and parts[1] in ALGORITHMS:
        del parts[1]
    if len(parts) > 2 and (parts[-1].startswith("literal[") or parts[-1] == "bool"):
        del parts[-1]
    return ".".join(parts)


def _words(kind: str, message: str, of: str) -> str:
    if kind == "extra_forbidden":
        return f"is no field of a {of}"
    return _MESSAGES.get(kind, message.removeprefix("Value error, ")).rstrip(".")


# --- what one part asks of another -----------------------------------------------------------------------------------


def _missing_parts(spec: RunSpec) -> list[Problem]:
    problems = [*_about_rewards(spec), *_about_model(spec), *_about_processes(spec), *_about_recovery(spec)]
    named = code_entries(spec)
    if spec.code is None and named:
        problems.append(Problem("code", f"{named[0]} is code of yours, and the spec names no code that holds it"))
    if spec.loss and spec.algorithm.type not in LOSS_ALGORITHMS:
        problems.append(Problem("loss", f"{spec.algorithm.type} takes no loss of yours; {_these(LOSS_ALGORITHMS)} do"))
    if spec.algorithm.type != "script" and spec.model.revision and spec.model.arch:
        problems.append(Problem("model.revision", "a preset has no revision"))
    return problems


def _about_rewards(spec: RunSpec) -> Iterator[Problem]:
    kind = spec.algorithm.type
    if kind == "grpo" and spec.reward is None:
        yield Problem("reward", "grpo needs a reward")
    if spec.reward is not None and kind not in (*POLICY_ALGORITHMS, "custom"):
        yield Problem("reward", f"{kind} learns from its rows and takes no reward; {_these(POLICY_ALGORITHMS)} do")
    if kind == "multi_turn":
        if spec.environment.entry is None:
            yield Problem("environment.entry", "multi_turn needs an environment")
    elif spec.environment.entry is not None:
        yield Problem("environment.entry", f"{kind} plays in no environment; multi_turn does")
    elif spec.environment.max_steps != 1:
        yield Problem("environment.max_steps", f"{kind} plays one turn an episode; give an environment, or max_steps 1")


def _about_model(spec: RunSpec) -> Iterator[Problem]:
    model, named = spec.model, [each for each in (spec.compute.instance, *spec.compute.fallbacks) if each != "auto"]
    if model.arch and model.effective_adapter != "none" and spec.algorithm.type != "script":
        yield Problem("model.adapter", "a preset has nothing to adapt: train all its weights, or give a base model")
    if model.effective_adapter == "none":
        if model.dropout:
            yield Problem("model.dropout", "is the dropout of an adapter, and none is trained")
        if model.merge:
            yield Problem("model.merge", "merges an adapter, and none is trained")
    if model.adapter == "qlora" and model.merge:
        yield Problem("model.merge", "quantized weights are not merged; use lora, or merge the adapter afterwards")
    if model.adapter == "qlora" and (without := [each for each in named if not CATALOG[each].gpus]):
        yield Problem("model.adapter", f"qlora needs CUDA, and {without[0]} has no GPU; use lora, or a GPU type")
    algorithm = spec.algorithm
    if isinstance(algorithm, DpoSettings | KtoSettings) and algorithm.reference == "adapter_off":
        if model.effective_adapter == "none":
            yield Problem("algorithm.reference", "there is no adapter to switch off; use auto or precomputed")
    elif isinstance(algorithm, POLICIES) and algorithm.kl_coef and model.arch:
        message = (
            "holds the model to what it was before the run, and a preset begins from random weights; leave it at 0"
        )
        yield Problem("algorithm.kl_coef", message)


def _about_processes(spec: RunSpec) -> Iterator[Problem]:
    """One process a GPU, or as many as there are vCPUs where there is none."""
    processes, named = spec.compute.processes, spec.compute.instance
    if processes is None:
        return
    if spec.algorithm.type == "script":
        yield Problem("compute.processes", "a script starts its own processes")
    elif processes > spec.algorithm.batch_size:
        yield Problem("compute.processes", f"a batch of {spec.algorithm.batch_size} cannot be shared by {processes}")
    if named != "auto" and processes > (room := CATALOG[named].gpus or CATALOG[named].vcpus):
        yield Problem("compute.processes", f"{named} has room for {room}")


def _about_recovery(spec: RunSpec) -> Iterator[Problem]:
    if spec.compute.recovery == "fast" and spec.compute.spot is True:
        message = (
            "keeps the machines for a next attempt, which SageMaker does not do for spot; leave spot at auto "
            "(on-demand then), or take cheap"
        )
        yield Problem("compute.recovery", f"fast {message}")


def code_entries(spec: RunSpec) -> list[str]:
    """Fields that name something in the user's own code."""
    entries: dict[str, str | None] = {
        "loss.entry": spec.loss.entry if spec.loss else None,
        "environment.entry": spec.environment.entry,
        "algorithm.entry": spec.algorithm.entry if spec.algorithm.type in ("custom", "script") else None,
    }
    for name, part in (spec.reward.named_parts if spec.reward else {}).items():
        entries["reward.entry" if spec.reward and spec.reward.entry else f"reward.parts.{name}.entry"] = part.entry
    return [field for field, entry in entries.items() if entry and is_code(entry)]


def is_code(entry: str) -> bool:
    """Whether an entry names the user's own code, and not something that runs or lies elsewhere."""
    return not (entry == "judge" or entry.startswith(("reasoning_gym:", "arn:", "http://", "https://", "model:s3://")))


def _these(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def dump_spec(spec: RunSpec) -> str:
    """The canonical JSON of a spec, as the container reads it."""
    return json.dumps(spec.model_dump(mode="json"), ensure_ascii=False, indent=1)
