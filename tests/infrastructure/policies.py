"""A small judge of IAM policies, for what the emulator does not judge: leading keys, KMS, SageMaker, session tags.

One account, identity policies only: an explicit Deny wins, else an Allow is needed. It knows what the template uses, and
refuses to judge what it does not know rather than to guess. tests/infrastructure/test_policies.py holds it against the
examples of AWS's own documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Statement = Mapping[str, Any]
Context = Mapping[str, str | Sequence[str]]

_VARIABLE = re.compile(r"\$\{([^}]+)\}")
_LITERALS = {"*": "*", "?": "?", "$": "$"}  # ${*} is a star, and no wildcard
_POSITIVE: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda value, wanted: value == _plain(wanted),
    "StringEqualsIgnoreCase": lambda value, wanted: value.lower() == _plain(wanted).lower(),
    "StringLike": lambda value, wanted: _like(value, wanted),
    "ArnEquals": lambda value, wanted: _like(value, wanted),
    "ArnLike": lambda value, wanted: _like(value, wanted),
    "Bool": lambda value, wanted: value.lower() == _plain(wanted).lower(),
    "NumericLessThanEquals": lambda value, wanted: float(value) <= float(_plain(wanted)),
}
_NEGATIVE = {
    "StringNotEquals": "StringEquals",
    "StringNotEqualsIgnoreCase": "StringEqualsIgnoreCase",
    "StringNotLike": "StringLike",
    "ArnNotEquals": "ArnEquals",
    "ArnNotLike": "ArnLike",
}


@dataclass(frozen=True)
class Request:
    """`context`: condition keys, whatever their case; a key that is not there was not in the request."""

    action: str
    resource: str
    context: Context = field(default_factory=dict)

    def value(self, key: str) -> str | Sequence[str] | None:
        return {name.lower(): value for name, value in self.context.items()}.get(key.lower())


def is_allowed(statements: Sequence[Statement], request: Request) -> bool:
    """Whether a principal with these statements may do it."""
    effects = {each["Effect"] for each in statements if _applies(each, request)}
    return effects == {"Allow"}


def _applies(statement: Statement, request: Request) -> bool:
    unknown = statement.keys() - {
        "Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition", "Principal",
    }  # fmt: skip
    if unknown:
        raise ValueError(f"this judge does not know {sorted(unknown)}")
    return (
        _names(statement, "Action", lambda pattern: _like(request.action.lower(), pattern.lower()))
        and _names(statement, "Resource", lambda pattern: _matches(request.resource, pattern, request))
        and all(_holds(*each, request) for each in _conditions(statement))
    )


def _names(statement: Statement, element: str, matches: Callable[[str], bool]) -> bool:
    if element in statement:
        return any(map(matches, _as_list(statement[element])))
    if f"Not{element}" in statement:
        return not any(map(matches, _as_list(statement[f"Not{element}"])))
    raise ValueError(f"a statement has {element} or Not{element}: {statement}")


def _conditions(statement: Statement) -> list[tuple[str, str, list[str]]]:
    """Every one of them must hold."""
    blocks: Mapping[str, Mapping[str, Any]] = statement.get("Condition", {})
    return [(operator, key, _as_list(wanted)) for operator, keys in blocks.items() for key, wanted in keys.items()]


def _holds(operator: str, key: str, wanted: list[str], request: Request) -> bool:
    given = request.value(key)
    if operator == "Null":
        return (given is None) == (_plain(wanted[0]) == "true")
    of_set, _, bare = operator.rpartition(":")
    if bare.endswith("IfExists"):
        bare = bare.removesuffix("IfExists")
        if given is None:
            return True
    matches = _operator(bare, wanted, request)
    if given is None:
        return of_set == "ForAllValues" or (not of_set and bare in _NEGATIVE)
    values = [given] if isinstance(given, str) else list(given)
    if of_set == "ForAllValues":
        return all(map(matches, values))
    if of_set == "ForAnyValue":
        return any(map(matches, values))
    if of_set or len(values) != 1:
        raise ValueError(f"{operator} of {key} needs one value, or ForAllValues or ForAnyValue: {values}")
    return matches(values[0])


def _operator(name: str, wanted: list[str], request: Request) -> Callable[[str], bool]:
    """One of the wanted values is enough; of a negated operator none may match."""
    filled = [text for each in wanted if (text := _filled(each, request)) is not None]
    if name in _NEGATIVE:
        positive = _POSITIVE[_NEGATIVE[name]]
        return lambda value: not any(positive(value, each) for each in filled)
    if name not in _POSITIVE:
        raise ValueError(f"this judge does not know the condition operator {name}")
    return lambda value: any(_POSITIVE[name](value, each) for each in filled)


def _matches(value: str, pattern: str, request: Request) -> bool:
    filled = _filled(pattern, request)
    return filled is not None and _like(value, filled)


# What stands for a wildcard that came in by a variable, and so is none.
_ESCAPED = {"*": "\ue000", "?": "\ue001", "$": "\ue002"}
_UNESCAPED = {mark: text for text, mark in _ESCAPED.items()}


def _filled(pattern: str, request: Request) -> str | None:
    """The pattern with the values of its variables; None where one has no value: then nothing matches."""
    values = {}
    for name in _VARIABLE.findall(pattern):
        value = _LITERALS.get(name) or request.value(name)
        if not isinstance(value, str):
            return None
        values[name] = "".join(_ESCAPED.get(letter, letter) for letter in value)
    return _VARIABLE.sub(lambda found: values[found[1]], pattern)


def _plain(text: str) -> str:
    return "".join(_UNESCAPED.get(letter, letter) for letter in text)


def _like(value: str, pattern: str) -> bool:
    """`*` is any text, `/` and `:` too; `?` is one character."""
    parts = {"*": ".*", "?": "."}
    return (
        re.fullmatch("".join(parts.get(each) or re.escape(_plain(each)) for each in pattern), value, re.S) is not None
    )


def _as_list(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
