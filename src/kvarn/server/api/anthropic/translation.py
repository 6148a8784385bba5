"""A body of /v1/messages as the chat the engine knows: OpenAI messages, tools and tool choice. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from kvarn.server.api.anthropic.schema import (
    Block,
    CountTokensBody,
    MessagesBody,
    MessageTool,
    NamedToolChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.reasoning import SWITCH, reads

ChatMessage = dict[str, Any]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(body: CountTokensBody, template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same conversation as a body of /v1/chat/completions."""
    choice, is_parallel = _tool_choice(body)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": chat_messages(body),
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "response_format": _response_format(body),
        "chat_template_kwargs": template_kwargs or None,
        "reasoning_effort": None if body.output_config is None else body.output_config.effort,
    }
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    return {name: value for name, value in fields.items() if value is not None}


def chat_messages(body: CountTokensBody) -> list[ChatMessage]:
    """The conversation with its system prompt first. Refuses a begun answer: templates cannot continue one."""
    if body.messages[-1].role == "assistant":
        raise InvalidField(
            "the last of messages is from the assistant; continuing a begun answer is not supported, "
            "end with a message of the user",
            "messages",
        )
    messages: list[ChatMessage] = [] if not body.system else [{"role": "system", "content": _text(body.system)}]
    for turn in body.messages:
        for message in _turn(turn):
            _append(messages, message)
    _check_results(body.messages)
    return messages


def _check_results(turns: Sequence[Turn]) -> None:
    """A result answers a call that was made before it."""
    called: set[str] = set()
    for index, turn in enumerate(turns):
        for place, block in enumerate(turn.content if not isinstance(turn.content, str) else ()):
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            if isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                where = f"messages.{index}.content.{place}"
                raise InvalidField(
                    f"{where} is the result of a call that no message before it has", f"{where}.tool_use_id"
                )


def _append(messages: list[ChatMessage], message: ChatMessage) -> None:
    """Turns of one role that follow each other are one turn; templates want the roles to alternate."""
    if messages and message["role"] in ("user", "assistant") and messages[-1]["role"] == message["role"]:
        messages[-1] = _joined(messages[-1], message)
    else:
        messages.append(message)


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    joined = {"role": first["role"], "content": "\n\n".join(filter(None, (first["content"], second["content"])))}
    if thoughts := first.get("reasoning_content", "") + second.get("reasoning_content", ""):
        joined["reasoning_content"] = thoughts
    if calls := first.get("tool_calls", []) + second.get("tool_calls", []):
        joined["tool_calls"] = calls
    return joined


def thinking_kwargs(
    thinking: ThinkingOn | ThinkingOff | None, template: str, *, can_think: bool
) -> tuple[dict[str, Any], str | None]:
    """The template arguments that switch thinking on or off, and why it stays as it is where nothing does so."""
    if thinking is None or (not can_think and thinking.type != "enabled"):
        return {}, None
    if not can_think:
        return {}, "ignored: thinking, because this model does not reason apart from its answer"
    if reads(template, SWITCH):
        return {SWITCH: isinstance(thinking, ThinkingOn)}, None
    if isinstance(thinking, ThinkingOff):
        return {}, "ignored: thinking, because this model always reasons"
    return {}, None


def _tool_choice(body: CountTokensBody) -> tuple[str | dict[str, Any] | None, bool | None]:
    """As in /v1/chat/completions, and whether several calls at once are fine."""
    choice = body.tool_choice
    if choice is None:
        return None, None
    is_parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, NamedToolChoice):
        return {"type": "function", "function": {"name": choice.name}}, is_parallel
    return CHOICES[choice.type], is_parallel


def _response_format(body: CountTokensBody) -> dict[str, Any] | None:
    given = None if body.output_config is None else body.output_config.format
    if given is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.schema_}}


def _turn(turn: Turn) -> Iterator[ChatMessage]:
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield _assistant(turn.content)
    else:
        yield from _said(turn.role, turn.content)


def _said(role: str, blocks: Iterable[Block]) -> Iterator[ChatMessage]:
    """What a user says, in order: each tool result is a message of its own, text between them too."""
    for kind, group in groupby(blocks, key=type):
        if kind is TextBlock:
            yield {"role": role, "content": "".join(block.text for block in group if isinstance(block, TextBlock))}
        elif kind is ToolResultBlock and role == "user":
            yield from (_result(block) for block in group if isinstance(block, ToolResultBlock))
        else:
            name = next(iter(group)).type
            raise InvalidField(f"a message of role {role} has a block of type {name}; remove it", "messages")


def _result(block: ToolResultBlock) -> ChatMessage:
    """Templates have no flag for a failed call, so the text says it."""
    prefix = "error: " if block.is_error else ""
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": prefix + _text(block.content)}


def _assistant(blocks: Iterable[Block]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(_call(block))
            case _:
                raise InvalidField("a message of role assistant has a block of type tool_result; remove it", "messages")
    message: ChatMessage = {"role": "assistant", "content": "".join(texts)}
    return (
        message
        | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
