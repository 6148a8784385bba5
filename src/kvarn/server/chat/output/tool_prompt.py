"""Tools for models whose chat template knows none, or only half: a documented text, and earlier calls as plain text.

The text is printed in docs/tools.md and shown by /apply-template; it is used only where a request gives tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.output.call_forms.form import CallForm
from kvarn.server.chat.output.call_forms.writer import written
from kvarn.server.chat.output.deltas import ToolCall
from kvarn.server.chat.output.tools import ToolSpec

TOOL_PROMPT = """\
You can call these functions:
{functions}

To call one, answer with nothing but {form}
To call none, answer in plain text."""

JSON_FORM = """\
one JSON object per call, each on a line of its own:
{"name": "<function>", "arguments": {<arguments>}}"""
OWN_FORM = "calls in this form:\n{example}"

RESULT = "The function {name} returned:\n{content}"


def tool_prompt(tools: Sequence[ToolSpec], form: CallForm | None = None) -> str:
    """The text that tells a model which functions it may call, and how; form: of its own."""
    functions = ({"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools)
    example = written(form, [("<function>", {"<argument>": "<value>"})]) if form else ""
    asked = OWN_FORM.format(example=example) if form else JSON_FORM
    return TOOL_PROMPT.format(functions="\n".join(_json(function) for function in functions), form=asked)


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec], *, takes_system: bool
) -> list[Mapping[str, Any]]:
    """The conversation in messages that every template knows, with the tools in the system message.

    Where the template takes no system message, the text stands before the first message.
    """
    plain = _without_tool_roles(messages)
    return with_text(plain, tool_prompt(tools), takes_system=takes_system) if tools else plain


def with_written_calls(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[Mapping[str, Any]]:
    """Earlier calls as content, in the model's form, for a template that does not write them."""
    plain: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        calls = [(call.name, _parsed(call.arguments_json)) for call in _calls(index, message)]
        said = _text(message.get("content"))
        lines = [*([said] if said else []), written(form, calls)] if calls else []
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        plain.append({**others, "content": "\n".join(lines)} if calls else message)
    return plain


def with_system_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The tools as a member of the system message."""
    functions = _json([tool["function"] for tool in tools])
    first = messages[0] if messages and messages[0].get("role") == "system" else {"role": "system", "content": ""}
    others = messages[1:] if messages and messages[0] is first else messages
    return [{**first, "tools": functions}, *others]


def with_text(messages: Sequence[Mapping[str, Any]], text: str, *, takes_system: bool) -> list[Mapping[str, Any]]:
    """The conversation with a text in its system message, or before the first message where there can be none."""
    plain = list(messages)
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


def _parsed(text: str) -> Mapping[str, Any]:
    """Arguments as an object; what is none is shown as it came."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


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
