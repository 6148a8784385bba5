"""A body of /v1/responses as the chat the engine knows: OpenAI messages, tools and tool choice. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvarn.server.api.responses.schema import (
    AbsentTool,
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    FunctionTool,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponseRefusalPart,
    ResponsesBody,
    ResponseSchemaFormat,
    ResponseTextPart,
)
from kvarn.server.api.schema import InvalidField

ChatMessage = dict[str, Any]
WITH_LOGPROBS = "message.output_text.logprobs"  # of include


def chat_fields(body: ResponsesBody, earlier: Sequence[Item] = ()) -> dict[str, Any]:
    """The same conversation as a body of /v1/chat/completions; earlier: what it continues."""
    has_logprobs = body.top_logprobs is not None or WITH_LOGPROBS in (body.include or ())
    fields = {
        "model": body.model,
        "messages": chat_messages(body, earlier),
        "tools": [_tool(tool) for tool in body.tools or () if isinstance(tool, FunctionTool)] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": has_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    return {name: value for name, value in fields.items() if value is not None}


def absent_tools(body: ResponsesBody) -> list[str]:
    """The types of tools that the model is not offered."""
    return sorted({tool.type for tool in body.tools or () if isinstance(tool, AbsentTool)})


def chat_messages(body: ResponsesBody, earlier: Sequence[Item] = ()) -> list[ChatMessage]:
    """The conversation, its instructions first."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*system, *_items(earlier), {"role": "user", "content": body.input}]
    _check_outputs(earlier, body.input)
    return [*system, *_items([*earlier, *body.input])]


def _tool_choice(choice: str | FunctionChoice | None) -> str | dict[str, Any] | None:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return None
    if not isinstance(given, ResponseSchemaFormat):
        return {"type": "json_object"}
    schema = {"name": given.name, "schema": given.schema_}
    return {"type": "json_schema", "json_schema": schema if given.strict is None else schema | {"strict": given.strict}}


def _items(items: Iterable[Item]) -> list[ChatMessage]:
    """Reasoning, text and calls that stand next to each other are one message of the assistant."""
    messages: list[ChatMessage] = []
    for item in items:
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, ItemReference):
            raise AssertionError("references are checked before")
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            _extend(_open_turn(messages, is_text=isinstance(item, MessageItem)), item)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _check_outputs(earlier: Iterable[Item], items: Iterable[Item]) -> None:
    """An output answers a call that was made before it, and references have been replaced by what they refer to."""
    called = {item.call_id for item in earlier if isinstance(item, FunctionCallItem)}
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            where = f"input.{index}"
            raise InvalidField(f"{where} refers to an item that is not stored here; send the item itself", where)
        if isinstance(item, FunctionCallItem):
            called.add(item.call_id)
        if isinstance(item, FunctionOutputItem) and item.call_id not in called:
            where = f"input.{index}"
            raise InvalidField(f"{where} is the output of a call that no item before it has", f"{where}.call_id")


def _open_turn(messages: list[ChatMessage], *, is_text: bool) -> ChatMessage:
    """The assistant's message that an item belongs to; a second text begins a second message."""
    if not messages or messages[-1]["role"] != "assistant" or (is_text and messages[-1]["content"]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _extend(turn: ChatMessage, item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    match item:
        case MessageItem():
            turn["content"] += _text(item.content)
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        case ReasoningItem():
            thoughts = "".join(part.text for part in item.content or ())
            if thoughts:
                turn.setdefault("reasoning_content", []).append(thoughts)  # joined when the turn is complete


def _tool(tool: FunctionTool) -> dict[str, Any]:
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {
        "type": "function",
        "function": {"name": tool.name} | {name: value for name, value in given.items() if value is not None},
    }


def _text(content: str | Sequence[ResponseTextPart | ResponseRefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
