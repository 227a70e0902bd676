"""From what a user wrote (a spec file, or a trainer's settings) to a valid spec and the uploads it waits for.

    {"data": {"train": "rows.jsonl"}, "reward": {"entry": "rewards:exact"}, …}
        -> Draft(spec=RunSpec(data.train="s3://…/datasets/9f…/rows.jsonl", code=…), parcels=(rows.jsonl, code.zip))

Nothing is uploaded here. The rules are those of the handler that will read the spec; they are applied twice, first with
stand-ins for what is local, so that a misspelt setting is reported before any data is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microtuning_core.domain.errors import InvalidCode, InvalidSpec, MicrotuningError, Problem
from microtuning_core.domain.layout import code_key
from microtuning_core.domain.names import check_tenant
from microtuning_core.domain.planning import TINY_DECODER, ModelShape, choose_plan
from microtuning_core.domain.spec import RunSpec, foreign_locations
from microtuning_core.domain.spec_checks import parse_spec
from microtuning_core.spec_files import dump_spec_text
from microtuning_core.usecases.plan import request_for
from microtuning_sdk._code import CodePackage, package_folder, package_reward, package_script
from microtuning_sdk._connection import DEFAULT_TENANT
from microtuning_sdk._inputs import BaseModel, Data, base_model, check_dataset, dataset
from microtuning_sdk._json import why_no_json
from microtuning_sdk._uploads import Parcel, parcel

if TYPE_CHECKING:
    from microtuning_sdk._connection import Stage

Document = dict[str, Any]
_DATA_FIELDS = (("data", "train"), ("data", "eval"), ("algorithm", "warm_start", "data"))
_STAND_IN = "s3://to-be-uploaded/"
_STAND_IN_SHA256 = "0" * 64


@dataclass(frozen=True)
class Draft:
    """A valid spec, and what must be uploaded before it."""

    spec: RunSpec
    parcels: tuple[Parcel, ...] = field(repr=False)

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
    model = _with_model(stage, tenant, ready, folder)
    parcels += [*model.parcels, *_with_data(stage, tenant, document, ready, folder)]
    spec = parse_spec(ready, lines)
    if problems := foreign_locations(spec, stage.bucket) or _does_not_fit(spec, model.shape):
        raise InvalidSpec(problems)
    return Draft(spec, tuple({each.key: each for each in parcels}.values()))


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
    model = _copied_path(shown, ["model"])
    if model is not None and _is_local_model(model.get("base")):
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


def _is_local_model(value: object) -> bool:
    return isinstance(value, Path) or (
        isinstance(value, str) and not value.startswith("s3://") and (value[:1] in "./~" or Path(value).is_dir())
    )


def _names_local_code(document: Document) -> bool:
    code = document.get("code")
    given = code if isinstance(code, str) else code.get("uri") if isinstance(code, dict) else None
    if code is None:
        return _entry_of(document) is not None
    return isinstance(given, str) and not given.startswith("s3://")


def _entry_of(document: Document) -> str | None:
    """The reward or the script that a spec names."""
    for part in ("reward", "algorithm"):
        holder = document.get(part)
        if isinstance(holder, dict) and isinstance(holder.get("entry"), str):
            return str(holder["entry"])
    return None


# --- the parts, each put into `ready` --------------------------------------------------------------------------------


def _code_of(document: Document, folder: Path) -> CodePackage | None:
    """The code that a spec file names by a path, or that lies beside it under the name of its entry."""
    entry = _entry_of(document)
    if entry is None or not _names_local_code(document):
        return None
    code = document.get("code")
    if code is not None:
        path = folder / (code if isinstance(code, str) else code["uri"])
        return package_folder(path, entry)
    if entry.startswith("pickle:"):
        raise InvalidCode(entry, "a spec file has no code for it", next_step="Name a function as 'module:name'.")
    return package_reward(entry, folder) if ":" in entry else package_script(folder / entry)


def _with_code(stage: Stage, tenant: str, ready: Document, code: CodePackage) -> Parcel:
    key = code_key(tenant, code.sha256)
    ready["code"] = {"uri": f"s3://{stage.bucket}/{key}", "sha256": code.sha256, "entry": code.entry}
    if ready["algorithm"]["type"] == "script":
        ready["algorithm"]["entry"] = code.entry
    else:
        ready["reward"] = {**ready.get("reward", {}), "entry": code.entry}
    return parcel(key, code.archive)


def _with_model(stage: Stage, tenant: str, ready: Document, folder: Path) -> BaseModel:
    base = ready["model"].get("base")
    if base is None:
        return BaseModel("", TINY_DECODER)
    model = base_model(stage, tenant, base, folder=folder)
    ready["model"]["base"] = model.uri
    return model


def _with_data(stage: Stage, tenant: str, document: Document, ready: Document, folder: Path) -> list[Parcel]:
    algorithm = ready["algorithm"]["type"]
    parcels: list[Parcel] = []
    for *above, name in _DATA_FIELDS:
        given: Data | None = _at(document, above).get(name)
        if given is None:
            continue
        data = dataset(stage, tenant, given, folder=folder, any_file=algorithm == "script")
        judged_as = "sft" if "warm_start" in above else algorithm
        check_dataset(data, judged_as, has_chat_template=ready["model"].get("arch") is None)
        _at(ready, above)[name] = data.uri
        parcels += data.parcels
    return parcels


def _at(document: Document, names: list[str]) -> Document:
    for name in names:
        document = document.get(name) or {}
    return document


def _does_not_fit(spec: RunSpec, shape: ModelShape | None) -> list[Problem]:
    if shape is None and spec.algorithm.type != "script" and spec.compute.instance == "auto":
        message = (
            f"the size of {spec.model.base} cannot be told from its name or config.json; name a type that holds it"
        )
        return [Problem("compute.instance", message)]
    try:
        choose_plan(request_for(spec, shape), [])
    except MicrotuningError as error:
        return [Problem("compute", f"{error.message} {error.next_step}".strip(" ."))]
    return []
