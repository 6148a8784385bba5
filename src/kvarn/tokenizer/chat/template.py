"""Check a conversation, render it with the model's chat template, and encode the result.

Templates expect plain JSON, text content and parsed arguments; messages come in the OpenAI format.

Control tokens the template writes become control tokens. The same characters inside a message do not: before
rendering, a mark is put after the first character of each, and no control token may cover a marked character.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvarn.checks import short
from kvarn.errors import InvalidParameter, TemplateError
from kvarn.tokenizer.chat.template_worker import TemplateWorker, shared_worker, worker_for_long
from kvarn.tokenizer.special_tokens import SpecialMatcher

if TYPE_CHECKING:
    from kvarn.tokenizer.tokenizer import Tokenizer


ROLES = ("system", "user", "assistant", "tool", "developer")
MAX_DEPTH = 64
LONG_CHARACTERS = 131_072  # a conversation of more is rendered apart from the others
MAX_ARGUMENT_VALUES = 65_536  # of one tool call in a conversation

# Names the engine gives to templates; a caller's template arguments may not replace them.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"}
    | {"conversation", "chat_template", "template", "tokenize", "continue_final_message", "return_dict"}
    | {"raise_exception", "strftime_now", "namespace", "range", "dict", "loop", "self", "debug"}
)

_THINKING = re.compile(r"message\.thinking|[\"']thinking[\"'] in message|message\[[\"']thinking[\"']\]")
_SILENT_CALLS = re.compile(r"'assistant' and message\['content'\] is none")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked conversation."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    kwargs: dict[str, Any]

    @staticmethod
    def checked(
        messages: object, tools: object = None, add_generation_prompt: bool = True, kwargs: object = None
    ) -> ChatRequest:
        """Return the request, or raise InvalidParameter naming the message and the field."""
        if not isinstance(messages, list | tuple) or not messages:
            raise InvalidParameter(
                f"messages is {_short(messages)}; give a list with at least one message", field="messages"
            )
        if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(t, Mapping) for t in tools)):
            raise InvalidParameter(f"tools is {_short(tools)}; give a list of tool definitions", field="tools")
        return ChatRequest(
            messages=[_message(index, message) for index, message in enumerate(messages)],
            tools=map_strings("tools", tools, str) if tools else None,
            add_generation_prompt=bool(add_generation_prompt),
            kwargs=_kwargs(kwargs),
        )


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation, and the offsets of characters that no control token may cover."""

    text: str
    plain: tuple[int, ...]


def encode_messages(tokenizer: Tokenizer, messages: object, tools: object, kwargs: object) -> list[int]:
    """Check a conversation and return the ids of the prompt that asks for its next message."""
    return encode_chat(tokenizer, ChatRequest.checked(messages, tools, kwargs=kwargs))


def encode_chat(tokenizer: Tokenizer, request: ChatRequest, worker: TemplateWorker | None = None) -> list[int]:
    """Return the ids of a conversation; bos precedes it once, whether the template writes it or not."""
    chat = render_chat(tokenizer, request, worker)
    ids = tokenizer.encode_marked(chat.text, parse_special=True, plain=chat.plain)
    prefix = list(tokenizer.prefix_ids)
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def render_chat(tokenizer: Tokenizer, request: ChatRequest, worker: TemplateWorker | None = None) -> RenderedChat:
    """Return what the model's template makes of a conversation."""
    template = tokenizer.chat_template
    if template is None:
        raise TemplateError("the model has no chat template; give it a text to continue instead of messages")
    context = _context(request, template)
    written = json.dumps(context, ensure_ascii=False)
    mark = _unused_character(template, written)
    marked = map_strings("the conversation", context, lambda text: _with_marks(text, mark, tokenizer.forbidden_matcher))
    names = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text}
    worker = worker or (worker_for_long() if len(written) > LONG_CHARACTERS else shared_worker())
    rendered = worker.render(template, marked | names)
    return _without_marks(rendered, mark)


def _context(request: ChatRequest, template: str) -> dict[str, Any]:
    messages = request.messages if "developer" in template else list(map(_with_known_role, request.messages))
    if "reasoning_content" not in template and _THINKING.search(template):
        messages = list(map(_with_thinking, messages))
    if _SILENT_CALLS.search(template):
        messages = list(map(_with_silent_calls, messages))
    context = {**request.kwargs, "messages": messages, "add_generation_prompt": request.add_generation_prompt}
    return context if request.tools is None else {**context, "tools": request.tools}  # undefined, not None


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """Templates without the role `developer`, which is newer than `system`, would drop its messages."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Some templates, gpt-oss's for one, have another name for reasoning, and none beside content and calls."""
    thought = message.get("reasoning_content")
    is_full = bool(message["content"]) and bool(message.get("tool_calls"))
    return message if not isinstance(thought, str) or is_full else {"thinking": thought, **message}


def _with_silent_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Some templates, DeepSeek R1's for one, write calls only beside content that is null."""
    is_silent = message.get("tool_calls") and message["content"] == ""
    return {**message, "content": None} if is_silent else message


def _with_marks(text: str, mark: str, forbidden: SpecialMatcher) -> str:
    starts = forbidden.possible_starts(text)
    if not starts:
        return text
    cuts = [0, *(start + 1 for start in starts), len(text)]
    return mark.join(text[begin:end] for begin, end in pairwise(cuts))


def _without_marks(rendered: str, mark: str) -> RenderedChat:
    pieces = rendered.split(mark)
    offsets = []
    length = 0
    for piece in pieces[:-1]:
        length += len(piece)
        offsets.append(max(0, length - 1))
    return RenderedChat("".join(pieces), tuple(offsets))


def _unused_character(template: str, used: str) -> str:
    """Return a character that is neither in the template nor in the conversation, so that no client can forge it."""
    for character in _candidates():
        if character not in used and character not in template:
            return character
    raise InvalidParameter(
        "the conversation uses every private-use character there is; leave one out", field="messages"
    )


def _candidates() -> Iterator[str]:
    yield from map(chr, range(0xFDD0, 0xFDF0))  # noncharacters: no text has them by right
    yield from map(chr, range(0xF0000, 0xFFFFE))


def map_strings(name: str, value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Return value as plain JSON with every string, keys included, changed; name is for error messages."""
    if depth > MAX_DEPTH:
        raise InvalidParameter(
            f"{name} is nested more than {MAX_DEPTH} levels deep; make it flatter", field=_field(name)
        )
    if isinstance(value, str):
        return change(_unicode(name, value))
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidParameter(f"{name} has a key that is not a string", field=_field(name))
        changed = {key: map_strings(name, item, change, depth + 1) for key, item in value.items()}
        return {change(_unicode(name, key)): item for key, item in changed.items()}
    if isinstance(value, list | tuple):
        return [map_strings(name, item, change, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InvalidParameter(f"{name} holds {_short(value)}, which JSON cannot express", field=_field(name))


def _message(index: int, message: object) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidParameter(f'{name} is {_short(message)}; give {{"role": ..., "content": ...}}', field="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter(f"{name} has role {_short(role)}; known are {', '.join(ROLES)}", field="messages")
    checked: dict[str, Any] = map_strings(name, message, str)
    given = message.get("content")
    if role == "assistant" and given is None and not checked.get("tool_calls"):
        given = ""  # it said nothing; templates know null beside calls only
    checked["content"] = _content(name, given, is_optional=role == "assistant")
    if checked.get("tool_calls") is not None:
        checked["tool_calls"] = _tool_calls(name, checked["tool_calls"])
    return checked


def _content(name: str, content: object, *, is_optional: bool) -> str | None:
    if isinstance(content, str) or (content is None and is_optional):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidParameter(
            f"content of {name} is {_short(content)}; give a string or a list of text parts", field="messages"
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidParameter(
                f'content of {name} has part {_short(part)}; give {{"type": "text", "text": ...}}', field="messages"
            )
        texts.append(text)
    return "".join(texts)


def _tool_calls(name: str, calls: object) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidParameter(f"tool_calls of {name} is {_short(calls)}; give a list of calls", field="messages")
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The API has arguments as JSON in a string, templates want the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    if text.count(",") + text.count("[") + text.count("{") > MAX_ARGUMENT_VALUES:
        raise InvalidParameter(
            f"the arguments of a tool call have more than {MAX_ARGUMENT_VALUES:,} values; shorten them",
            field="messages",
        )
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": map_strings("tool call arguments", arguments, str)}}


def _kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidParameter(
            f"template arguments are {_short(kwargs)}; give a mapping of name to value", field="chat_template_kwargs"
        )
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise InvalidParameter(
                f"template argument {_short(name)} is not a plain name", field="chat_template_kwargs"
            )
        if name in RESERVED:
            raise InvalidParameter(
                f"template argument {name} is set by Kvarn and cannot be replaced; leave it out",
                field="chat_template_kwargs",
            )
    checked: dict[str, Any] = map_strings("template arguments", kwargs, str)
    return checked


def _field(name: str) -> str:
    """The parameter that a part of a conversation belongs to."""
    return {"tools": "tools", "template arguments": "chat_template_kwargs"}.get(name, "messages")


def _unicode(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"{name} has a lone surrogate in {_short(text)}; give valid Unicode", field=_field(name)
        ) from error
    return text


def _short(value: object) -> str:
    return short(value).encode("ascii", "backslashreplace").decode()
