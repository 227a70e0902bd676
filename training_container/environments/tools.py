"""The form of TRL's environment_factory: `reset(**row) -> str | None`, public methods are tools, `get_reward()` if there.

The model calls a tool as Hermes and Qwen do, any number of them in one turn:

    <tool_call>
    {"name": "search", "arguments": {"query": "owls"}}
    </tool_call>

A turn without a call ends the episode. What goes wrong in a call (no such tool, arguments that do not fit, an exception of
the tool's) is told to the model as the tool's answer and counted in `tool_errors`: the model is to learn from it.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ..texts import text_of
from ..user_code import Refusal, accepted
from .protocol import Action, Awaiter, Turn, as_observation, as_reward, check_sayable

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
}


class ToolsEpisode:
    """An object with `reset` and tools."""

    def __init__(self, environment: Any, settle: Awaiter) -> None:
        self._environment, self._settle = environment, settle
        # Asked of the class: a property of the object would be computed.
        names = [name for name in dir(type(environment)) if not name.startswith("_") and name not in _NOT_TOOLS]
        self._tools = {name: getattr(environment, name) for name in names if _is_method(type(environment), name)}

    def begin(self, row: Mapping[str, Any]) -> Turn:
        by_position, by_name = accepted(self._environment.reset, row)
        observation = self._settle(self._environment.reset(*by_position, **by_name))
        schemas = [schema_of(name, tool) for name, tool in self._tools.items()]
        check_sayable(schemas, "the tools' types hold")
        return Turn(as_observation(observation, "reset"), tools=schemas)

    def act(self, action: Action) -> Turn:
        calls = _CALL.findall(action.raw)
        if not calls:
            return Turn(None, done=True, metrics={"tool_calls": 0.0})
        answers = [self._call(text) for text in calls]
        messages = [{"role": "tool", "name": name, "content": content} for name, content, _ in answers]
        errors = sum(failed for _, _, failed in answers)
        return Turn(messages, metrics={"tool_calls": float(len(calls)), "tool_errors": float(errors)})

    def _call(self, text: str) -> tuple[str, str, bool]:
        """(tool, its answer as text, whether it failed)."""
        name = ""
        try:
            call = json.loads(text)
            name = str(call["name"])
            if name not in self._tools:
                raise LookupError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
            result = self._settle(self._tools[name](**call.get("arguments", {})))
        except Exception as error:
            return name, json.dumps({"error": f"{type(error).__name__}: {text_of(error)}"}), True
        return name, _text_of(result, name), False

    def grade(self) -> float | None:
        if not hasattr(self._environment, "get_reward"):
            return None
        return as_reward(self._settle(self._environment.get_reward()), "get_reward")


def _text_of(result: Any, tool: str) -> str:
    """What a tool gave, as the model reads it.

    Raises:
        Refusal: it has no such form.
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refusal(
            f"the tool {tool} gave a {type(result).__name__} that cannot be written as JSON ({text_of(error)}); give a text"
        ) from error


def _is_method(kind: type, name: str) -> bool:
    return inspect.isroutine(inspect.getattr_static(kind, name))


# --- schemas -----------------------------------------------------------------------------------------------------------


def schema_of(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """A tool as chat templates take it: name, what its docstring says, and the JSON type of each argument."""
    description, of_arguments = _docstring(inspect.getdoc(tool) or "")
    parameters = inspect.signature(tool).parameters
    hints = typing.get_type_hints(tool)
    properties = {each: _json_type(hints.get(each, str)) for each in parameters}
    for each in properties.keys() & of_arguments.keys():
        properties[each]["description"] = of_arguments[each]
    required = [each for each, parameter in parameters.items() if parameter.default is parameter.empty]
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": function}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what comes before `Args:`, the line of each argument there)."""
    before, _, after = text.partition("Args:")
    lines = after.partition("Returns:")[0].splitlines()
    found = (re.match(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)", line) for line in lines)
    return " ".join(before.split()), {match[1]: match[2].strip() for match in found if match}


def _json_type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"type": _JSON_TYPES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        known = [each for each in arguments if each is not type(None)]
        return _json_type(known[0]) if known else {"type": "string"}
    schema: dict[str, Any] = {"type": _JSON_TYPES.get(origin or hint, "string")}
    if schema["type"] == "array" and arguments:
        schema["items"] = _json_type(arguments[0])
    return schema
