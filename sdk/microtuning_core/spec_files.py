"""A spec file as text: YAML or JSON, read with the line of every field, and written so that it reads back the same.

    name: sort-digits                          {"name": "sort-digits", "algorithm.type": …}, {"": 1, "name": 1,
    algorithm:                         ->       "algorithm": 2, "algorithm.type": 3, …}
      type: grpo

The SDK, the CLI and on_spec_uploaded all read through here, so that a file means the same to each of them.

Scalars follow JSON, not YAML 1.1: `1e-3` is a number, while `no`, `007`, `1:30` and `2026-01-02` stay text. Anchors,
aliases and tags are refused: a few lines of them can grow to gigabytes, and the reader is shared by all tenants.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import yaml

from microtuning_core.domain.errors import InvalidSpec, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

Json = Any
Lines = dict[str, int]

MAX_BYTES = 1_000_000
_MAX_DEPTH = 50
_MAX_VALUES = 20_000  # a second of reading; a megabyte of `1,` is half a minute of it
_TEXT = "tag:yaml.org,2002:str"

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"^(null|~|)$", "~n\0"),
    ("tag:yaml.org,2002:bool", r"^(true|false)$", "tf"),
    ("tag:yaml.org,2002:int", r"^-?(0|[1-9][0-9]*)$", "-0123456789"),
    ("tag:yaml.org,2002:float", r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$", "-0123456789"),
)


class _Loader(yaml.SafeLoader):
    """Composes nodes; scalars resolve as in JSON."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever `_Loader` would not read back as the same text."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: object) -> bool:
        return True


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), [c if c != "\0" else "" for c in _first])
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar(_SCALARS[3][0], json.dumps(value)))
# Line separators such as U+0085 fold in every style but the double-quoted one.
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, style=None if text.isprintable() else '"')
)


def read_spec_text(data: bytes | str, file: str = "spec.yaml") -> tuple[Json, Lines]:
    """The document of a spec file, and the line of each field by dotted path ("" is the document itself).

    Args:
        data: the file; UTF-8 when bytes, with or without a byte-order mark.
        file: its name; `.json` is read as JSON, anything else as YAML.

    Raises:
        InvalidSpec: not UTF-8, over 1 MB, not YAML or JSON, a key given twice, an anchor or a tag; with the line.
    """
    text = _decoded(data)
    return _read_json(text) if file.endswith(".json") else _read_yaml(text)


def read_value(text: str) -> Json:
    """One value as a spec file would hold it: `1e-5` is a number, `no` is text. InvalidSpec when it is none."""
    return read_spec_text(f"value: {text}")[0]["value"]


def dump_spec_text(document: Json) -> str:
    """YAML that `read_spec_text` reads back as the same document: every type and every character."""
    return yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31, default_flow_style=False
    )


def _decoded(data: bytes | str) -> str:
    if len(data) > MAX_BYTES:
        raise _refused(f"has {len(data)} bytes or more, and a spec has at most {MAX_BYTES}", None)
    if isinstance(data, str):
        return data.removeprefix("\ufeff")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused("is not UTF-8", data[: error.start].count(b"\n") + 1) from error


def _refused(message: str, line: int | None, field: str = "spec") -> InvalidSpec:
    return InvalidSpec([Problem(field, message, line)])


# --- JSON ------------------------------------------------------------------------------------------------------------


def _read_json(text: str) -> tuple[Json, Lines]:
    try:
        document = json.loads(text, parse_constant=_no_such_number)
    except json.JSONDecodeError as error:
        raise _refused(f"is not valid JSON: {error.msg}", error.lineno) from error
    except (ValueError, RecursionError) as error:
        raise _refused(f"is not valid JSON: {error}", None) from error
    # JSON is YAML once the tabs between its tokens are blanks (inside a JSON string a raw tab is not allowed).
    _, lines = _read_yaml(text.replace("\t", " "))
    return document, lines


def _no_such_number(literal: str) -> float:
    raise ValueError(f"{literal} is not a JSON number")


# --- YAML ------------------------------------------------------------------------------------------------------------


def _read_yaml(text: str) -> tuple[Json, Lines]:
    try:
        _refuse_dangers(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _refused(*_explained(error, text)) from error
    except RecursionError as error:
        raise _refused("is nested too deeply", None) from error
    lines: Lines = {}
    try:
        document = _value(node, "", lines, 0) if node is not None else None
    except ValueError as error:  # int() takes at most 4,300 digits
        raise _refused("holds a number with too many digits", None) from error
    return document, lines


def _refuse_dangers(text: str) -> None:
    """Anchors, tags, depth and number of values, from the events as they come: of 20,000 opening brackets the scanner
    reads 50, and not for a minute all of them."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        mark, tag = event.start_mark, getattr(event, "tag", None)
        line = mark.line + 1 if mark else None
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise _refused("is nested too deeply", line)
        if count > 2 * _MAX_VALUES:  # a field is two events, its name and its value
            raise _refused(f"holds more than {_MAX_VALUES:,} values; put long lists into the data or the code", line)
        if getattr(event, "anchor", None):
            raise _refused("anchors and aliases (& and *) are not part of a spec", line)
        if tag:
            raise _refused(f"tags such as {tag!r} are not part of a spec", line)


def _explained(error: yaml.YAMLError, text: str) -> tuple[str, int | None]:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    if mark is None:
        position = getattr(error, "position", 0)
        return f"is not valid YAML: {problem}", text.count("\n", 0, position) + 1
    if "\\t" in problem:
        problem = "a tab stands where YAML wants blanks"
    return f"is not valid YAML: {problem}", mark.line + 1


def _value(node: yaml.Node, path: str, lines: Lines, depth: int) -> Json:
    lines.setdefault(path, node.start_mark.line + 1)
    if depth > _MAX_DEPTH:
        raise _refused("is nested too deeply", node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines, depth)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, _join(path, str(i)), lines, depth + 1) for i, item in enumerate(node.value)]
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: str, lines: Lines, depth: int) -> dict[str, Json]:
    mapping: dict[str, Json] = {}
    for key, line, value in _pairs(node):
        field = _join(path, key)
        if key in mapping:
            raise _refused(f"is given twice, first in line {lines[field]}", line, field)
        lines[field] = line
        mapping[key] = _value(value, field, lines, depth + 1)
    return mapping


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[str, int, yaml.Node]]:
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise _refused("a field's name is text, not a list or a mapping", line)
        yield key.value, line, value


def _scalar(node: yaml.Node) -> Json:
    match node.tag.rsplit(":", 1)[-1]:
        case "null":
            return None
        case "bool":
            return node.value == "true"
        case "int":
            return int(node.value)
        case "float":
            return float(node.value)
    return node.value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
