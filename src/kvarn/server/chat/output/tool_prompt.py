"""Tools for models whose chat template knows none: a documented text, and earlier calls and results as plain messages.

The text is printed in docs/tools.md and shown by /apply-template; it is used only where a request gives tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.deltas import ToolCall
from kvarn.server.chat.output.tools import ToolSpec

TOOL_PROMPT = """\
You can call these functions:
{functions}

To call one, answer with nothing but one JSON object per call, each on a line of its own:
{{"name": "<function>", "arguments": {{<arguments>}}}}
To call none, answer in plain text."""

RESULT = "The function {name} returned:\n{content}"


def tool_prompt(tools: Sequence[ToolSpec]) -> str:
    """The text that tells a model which functions it may call, and how."""
    functions = ({"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools)
    return TOOL_PROMPT.format(functions="\n".join(_json(function) for function in functions))


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec], *, takes_system: bool
) -> list[Mapping[str, Any]]:
    """The conversation in messages that every template knows, with the tools in the system message.

    Where the template takes no system message, the text stands before the first message.
    """
    plain = _without_tool_roles(messages)
    if not tools:
        return plain
    text = tool_prompt(tools)
    first, *others = plain
    is_system = first.get("role") in ("system", "developer")
    if is_system:
        return [{**first, "content": f"{_text(first.get('content'))}\n\n{text}"}, *others]
    if takes_system:
        return [{"role": "system", "content": text}, *plain]
    return [{**first, "content": f"{text}\n\n{_text(first.get('content'))}"}, *others]


def _without_tool_roles(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    plain: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}  # of the functions called, by the id of the call
    is_after_result = False
    for index, message in enumerate(messages):
        calls = _calls(index, message)
        names.update({call.id: call.name for call in calls})
        is_result = message.get("role") == "tool"
        if is_after_result and message.get("role") in ("tool", "user"):  # templates want the roles to alternate
            said = _result(message, names) if is_result else _text(message.get("content"))
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n\n{said}"}
        elif is_result:
            plain.append({"role": "user", "content": _result(message, names)})
        elif calls:
            plain.append({"role": "assistant", "content": _written(message, calls)})
        else:
            plain.append(message)
        is_after_result = is_result
    return plain


def _calls(index: int, message: Mapping[str, Any]) -> list[ToolCall]:
    calls = message.get("tool_calls") or []
    try:
        functions = [(call["id"], call["function"]) for call in calls]
        return [
            ToolCall(str(identity), str(each["name"]), _arguments(each["arguments"])) for identity, each in functions
        ]
    except (TypeError, KeyError, AttributeError):
        where = f"messages.{index}.tool_calls"
        raise InvalidField(
            f'{where} is not a list of calls; give {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}', where
        ) from None


def _arguments(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else _json(arguments)


def _written(message: Mapping[str, Any], calls: Sequence[ToolCall]) -> str:
    """What the model wrote when it made these calls."""
    lines = [f'{{"name": {_json(call.name)}, "arguments": {call.arguments_json}}}' for call in calls]
    said = _text(message.get("content"))
    return "\n".join([said, *lines] if said else lines)


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    name = names.get(str(message.get("tool_call_id")), message.get("name") or "")
    return RESULT.format(name=name, content=_text(message.get("content")))


def _text(content: object) -> str:
    """Content as one text; it may be a list of text parts. Other content is refused with the rest of the message."""
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
