"""From what a user wrote (a spec file, or a trainer's settings) to a valid spec and the uploads it waits for.

    {"data": {"train": "rows.jsonl"}, "reward": {"entry": "rewards:exact"}, …}
        -> Draft(spec=RunSpec(data.train="s3://…/datasets/9f…/rows.jsonl", code=…), parcels=(rows.jsonl, code.zip))

Nothing is uploaded here. The rules are those of the handler that will read the spec; they are applied twice, first with
stand-ins for what is local, so that a misspelt setting is reported before any data is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import InvalidCode, InvalidSpec, MicrotuningError, Problem
from microtuning_core.domain.layout import code_key
from microtuning_core.domain.names import check_tenant
from microtuning_core.domain.planning import TINY_DECODER, ModelShape, Plan, PlanRequest, choose_plan
from microtuning_core.domain.spec import RunSpec, foreign_locations
from microtuning_core.domain.spec_checks import is_code, parse_spec
from microtuning_core.spec_files import dump_spec_text
from microtuning_core.usecases.plan import frozen_sources, newest_prices, request_for
from microtuning_sdk._code import CodePackage, Piece, package_all, package_folder, package_script
from microtuning_sdk._connection import DEFAULT_TENANT
from microtuning_sdk._inputs import BaseModel, Data, base_model, check_dataset, dataset, is_local_model
from microtuning_sdk._json import why_no_json
from microtuning_sdk._uploads import Parcel, parcel

if TYPE_CHECKING:
    from microtuning_core.domain.datasets import Row
    from microtuning_sdk._connection import Stage

Document = dict[str, Any]
_DATA_FIELDS = (("data", "train"), ("data", "eval"), ("algorithm", "warm_start", "data"))
_STAND_IN = "s3://to-be-uploaded/"
_STAND_IN_SHA256 = "0" * 64


@dataclass(frozen=True)
class Draft:
    """A valid spec, and what must be uploaded before it.

    rows: of each data set, by the field that names it; none of a script's. code: what travels with it. model_folder: of a
    model that is a local directory. request, plan: what the first attempt needs, and the machine it gets.
    """

    spec: RunSpec
    parcels: tuple[Parcel, ...] = field(repr=False)
    rows: Mapping[str, Sequence[Row]] = field(repr=False)
    code: CodePackage | None
    model_folder: Path | None
    request: PlanRequest
    plan: Plan

    @property
    def text(self) -> str:
        """The spec file: the fields that were given, as a person would write them."""
        return dump_spec_text(self.spec.model_dump(mode="json", exclude_unset=True))


def draft(
    stage: Stage,
    document: Document,
    *,
    code: CodePackage | None = None,
    folder: Path | None = None,
    lines: Mapping[str, int] | None = None,
) -> Draft:
    """Checks everything that can be checked here, and says what would be uploaded.

    Args:
        document: a spec in which data, code and model may be local paths, and data also rows.
        code: the packed code, when the document does not name it.
        folder: what relative paths start from; the current directory by default.
        lines: line of each field, when the document is a file.

    Raises:
        InvalidSpec, InvalidData, InvalidCode: with everything needed to correct it.
    """
    folder, lines = folder or Path.cwd(), lines or {}
    document = _with_lists(document)
    if problems := _no_json(document):
        raise InvalidSpec(problems)
    parse_spec(_with_stand_ins(document, code), lines)
    tenant = check_tenant(document.get("tenant", DEFAULT_TENANT))
    ready = copy.deepcopy({key: value for key, value in document.items() if key != "data"})
    ready["data"] = dict(document["data"])
    parcels: list[Parcel] = []
    code = code or _code_of(document, folder)
    if code is not None:
        parcels.append(_with_code(stage, tenant, ready, code))
    model = _with_model(stage, tenant, ready["model"], folder)
    teacher = _with_model(stage, tenant, _teacher_in(ready), folder)
    data, rows = _with_data(stage, tenant, document, ready, folder)
    parcels += [*model.parcels, *teacher.parcels, *data]
    spec = parse_spec(ready, lines)
    if problems := foreign_locations(spec, stage.bucket) or _size_unknown(spec, model.shape):
        raise InvalidSpec(problems)
    reward_models = frozen_sources(spec)[1 if teacher.uri else 0 :]
    shapes = [teacher.shape, *(_shape_of(stage, tenant, uri, folder) for uri in reward_models)]
    request = request_for(spec, model.shape, frozen=shapes)
    unique = tuple({each.key: each for each in parcels}.values())
    return Draft(spec, unique, rows, code, model.folder, request, _plan(request))


def at_newest_prices(stage: Stage, ready: Draft) -> Draft:
    """The draft planned with the prices that the stage itself would plan with; asks the stage for them."""
    prices = newest_prices(stage.objects, stage.names.region)
    if not prices:
        return ready
    request = ready.request.model_copy(update={"prices": prices})
    return replace(ready, request=request, plan=_plan(request))


def _with_lists(document: Document) -> Document:
    """The same with rows as lists: a generator could be read only once."""
    shown = dict(document)
    for *above, name in _DATA_FIELDS:
        holder = _copied_path(shown, above)
        if holder is not None and _are_rows(holder.get(name)):
            holder[name] = list(holder[name])
    return shown


def _no_json(document: Document) -> list[Problem]:
    """A script's settings that no spec file can hold; only a program can give them."""
    algorithm = document.get("algorithm")
    given = algorithm.get("hyperparameters") if isinstance(algorithm, Mapping) else None
    if not isinstance(given, Mapping):
        return []
    whys = {
        name: why_no_json(value) if isinstance(name, str) else "has a name that is no text"
        for name, value in given.items()
    }
    return [Problem(f"algorithm.hyperparameters.{name}", why) for name, why in whys.items() if why]


def _are_rows(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _with_stand_ins(document: Document, code: CodePackage | None) -> Document:
    """The document as it will look after the uploads, as far as its rules are concerned."""
    shown = dict(document)
    for *above, name in _DATA_FIELDS:
        holder = _copied_path(shown, above)
        if holder is not None and _is_local_data(holder.get(name)):
            holder[name] = _STAND_IN + name
    for path in (["model"], ["algorithm", "teacher"]):
        model = _copied_path(shown, path)
        if model is not None and is_local_model(model.get("base")):
            model["base"] = f"{_STAND_IN}model/"
    if code is not None or _names_local_code(document):
        shown["code"] = {"uri": f"{_STAND_IN}code.zip", "sha256": _STAND_IN_SHA256}
    return shown


def _copied_path(document: Document, names: list[str]) -> Document | None:
    """The mapping at this path, copied on the way down so that the user's own is left alone."""
    holder: Document = document
    for name in names:
        if not isinstance(holder.get(name), dict):
            return None
        holder[name] = dict(holder[name])
        holder = holder[name]
    return holder


def _is_local_data(value: object) -> bool:
    if isinstance(value, str):
        return not value.startswith("s3://")
    return isinstance(value, Path) or _are_rows(value)


def _names_local_code(document: Document) -> bool:
    code = document.get("code")
    given = code if isinstance(code, str) else code.get("uri") if isinstance(code, dict) else None
    if code is None:
        return bool(_entries_of(document))
    return isinstance(given, str) and not given.startswith("s3://")


def _entries_of(document: Document) -> dict[str, str]:
    """What a spec names of the user's own code, by field: rewards, a loss, an environment, a loop or a script."""
    parts = _at(document, ["reward", "parts"])
    fields = ["reward", *(f"reward.parts.{name}" for name in parts), "loss", "environment", "algorithm"]
    named = {f"{field}.entry": _at(document, field.split(".")).get("entry") for field in fields}
    return {field: entry for field, entry in named.items() if isinstance(entry, str) and is_code(entry)}


# --- the parts, each put into `ready` --------------------------------------------------------------------------------


def _code_of(document: Document, folder: Path) -> CodePackage | None:
    """The code that a spec file names by a path, or that lies beside it under the names of its entries."""
    entries = _entries_of(document)
    if not entries or not _names_local_code(document):
        return None
    code = document.get("code")
    if code is not None:
        path = folder / (code if isinstance(code, str) else code["uri"])
        return package_folder(path, entries)
    if pickles := [entry for entry in entries.values() if entry.startswith("pickle:")]:
        raise InvalidCode(pickles[0], "a spec file has no code for it", next_step="Name a function as 'module:name'.")
    if _at(document, ["algorithm"]).get("type") == "script":
        return package_script(folder / entries["algorithm.entry"])
    return package_all({field: Piece(entry) for field, entry in entries.items()}, folder)


def _with_code(stage: Stage, tenant: str, ready: Document, code: CodePackage) -> Parcel:
    key = code_key(tenant, code.sha256)
    ready["code"] = {"uri": f"s3://{stage.bucket}/{key}", "sha256": code.sha256, "entry": code.entry}
    for path, entry in code.entries.items():
        _at(ready, path.split(".")[:-1])["entry"] = entry
    return parcel(key, code.archive)


def _with_model(stage: Stage, tenant: str, holder: Document, folder: Path) -> BaseModel:
    """The model that `holder` names, under its address in the bucket; a preset has none."""
    base = holder.get("base")
    if base is None:
        return BaseModel("", TINY_DECODER if "arch" in holder else None)
    model = base_model(stage, tenant, base, folder=folder)
    holder["base"] = model.uri
    return model


def _teacher_in(document: Document) -> Document:
    return _at(document, ["algorithm", "teacher"])


def _shape_of(stage: Stage, tenant: str, uri: str, folder: Path) -> ModelShape | None:
    """Of a reward model; None of an adapter, whose base has the shape."""
    try:
        return base_model(stage, tenant, uri, folder=folder).shape
    except InvalidSpec:
        return None


def _with_data(
    stage: Stage, tenant: str, document: Document, ready: Document, folder: Path
) -> tuple[list[Parcel], dict[str, list[Row]]]:
    """What to upload of the data, and their rows by field."""
    algorithm = ready["algorithm"]["type"]
    parcels: list[Parcel] = []
    rows: dict[str, list[Row]] = {}
    for *above, name in _DATA_FIELDS:
        given: Data | None = _at(document, above).get(name)
        if given is None:
            continue
        data = dataset(stage, tenant, given, folder=folder, any_file=algorithm == "script")
        judged_as = "sft" if "warm_start" in above else algorithm
        has_template = ready["model"].get("arch") is None
        rows[".".join([*above, name])] = check_dataset(data, judged_as, has_chat_template=has_template)
        _at(ready, above)[name] = data.uri
        parcels += data.parcels
    return parcels, rows


def _at(document: Document, names: Sequence[str]) -> Document:
    """The mapping at this path; an empty one where there is none."""
    for name in names:
        inner = document.get(name)
        document = inner if isinstance(inner, dict) else {}
    return document


def _size_unknown(spec: RunSpec, shape: ModelShape | None) -> list[Problem]:
    if shape is None and spec.algorithm.type != "script" and spec.compute.instance == "auto":
        message = (
            f"the size of {spec.model.base} cannot be told from its name or config.json; name a type that holds it"
        )
        return [Problem("compute.instance", message)]
    return []


def _plan(request: PlanRequest) -> Plan:
    try:
        return choose_plan(request, [])
    except MicrotuningError as error:
        raise InvalidSpec([Problem("compute", f"{error.message} {error.next_step}".strip(" ."))]) from error
