"""Tools as a request gives them, checked: names, sizes, schemas. Knows no format and no model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvarn.server.api.schema import InvalidField, field_at_fault
from kvarn.structured.schema_recursion import check_recursion

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 131_072  # coding agents write manuals there; the context is the narrower limit
MAX_SCHEMA_BYTES = 65_536  # of one tool ...
MAX_TOOLS_BYTES = 1 << 20  # ... and of all together: as many values as a body may have, at 16 bytes each
TOOL_NAME = r"[a-zA-Z0-9_-]{1,128}"  # OpenAI takes 64, Anthropic 128
NAME = re.compile(TOOL_NAME)

_WITH_OTHER_MEMBERS = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """The model must call this function."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedFunction


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments
    is_strict: bool  # the arguments must follow the schema also when the model is free to call or not
    num_schema_bytes: int = 0  # of the parameters, as JSON

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema that enforced arguments follow: no members beside the declared ones, unless it speaks of them."""
        schema = dict(self.parameters)
        if not any(key in schema for key in _WITH_OTHER_MEMBERS):
            schema["additionalProperties"] = False
        return schema


def check_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Return the tools of a request in OpenAI's form, or raise InvalidField naming the one at fault."""
    if len(tools) > MAX_TOOLS:
        raise InvalidField(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", "tools")
    checked = tuple(_tool(index, tool) for index, tool in enumerate(tools))
    if (num_bytes := sum(tool.num_schema_bytes for tool in checked)) > MAX_TOOLS_BYTES:
        raise InvalidField(
            f"the parameters of all tools together have {num_bytes:,} bytes, at most {MAX_TOOLS_BYTES:,} are allowed; "
            "give fewer tools",
            "tools",
        )
    seen: set[str] = set()
    for index, tool in enumerate(checked):
        if tool.name in seen:
            raise InvalidField(
                f"two tools have the name {tool.name!r}; give each its own", f"tools.{index}.function.name"
            )
        seen.add(tool.name)
    return checked


def check_choice(tools: Sequence[ToolSpec], choice: ToolChoice) -> None:
    """Raise InvalidField when the choice asks for what the tools do not have."""
    if not tools and choice not in ("none", "auto"):
        raise InvalidField("tool_choice asks for a call, but there are no tools; give tools", "tool_choice")
    if isinstance(choice, NamedFunction) and choice.name not in {tool.name for tool in tools}:
        raise InvalidField("tool_choice names a function that is not among the tools", "tool_choice.function.name")


def _tool(index: int, tool: Mapping[str, Any]) -> ToolSpec:
    where = f"tools.{index}"
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidField(f'{where} is no function; give {{"type": "function", "function": {{...}}}}', where)
    name, description = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidField(
            f"the name of {where} is {name!r:.80}; give 1 to 128 letters, digits, underscores or dashes",
            f"{where}.function.name",
        )
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARACTERS:
        raise InvalidField(
            f"the description of {where} is no text of at most {MAX_DESCRIPTION_CHARACTERS:,} characters; shorten it",
            f"{where}.function.description",
        )
    parameters, num_bytes = _parameters(where, function.get("parameters"))
    return ToolSpec(name, description, parameters, function.get("strict") is True, num_bytes)


def _parameters(where: str, parameters: object) -> tuple[Mapping[str, Any], int]:
    """The schema, and its bytes as JSON."""
    where = f"{where}.function.parameters"
    if parameters is None:
        return {"type": "object", "properties": {}}, 0
    if not isinstance(parameters, Mapping):
        raise InvalidField(f"{where} is no object; give a JSON schema", where)
    if parameters and parameters.get("type") != "object" and not any(k in parameters for k in _WITH_OTHER_MEMBERS):
        has = f"has type {parameters['type']!r:.40}" if parameters.get("type") is not None else "has no type"
        raise InvalidField(f"{where} {has}; arguments are an object, so give type object", where)
    try:
        text = json.dumps(parameters, ensure_ascii=False, allow_nan=False)
        num_bytes = len(text.encode("utf-8"))
    except (ValueError, TypeError, RecursionError):
        raise InvalidField(f"{where} cannot be written as JSON; give a plain JSON schema", where) from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidField(f"{where} has {num_bytes:,} bytes; at most {MAX_SCHEMA_BYTES:,} are allowed", where)
    if '"$ref"' in text:
        with field_at_fault(where):
            check_recursion(parameters)
    return parameters or {"type": "object", "properties": {}}, num_bytes
