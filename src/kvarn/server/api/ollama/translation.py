"""Bodies of /api/chat and /api/generate as the chats and texts the engine knows. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvarn.server.api.ollama.schema import GenerateBody, OllamaChatBody, OllamaMessage, OllamaOptions, Think
from kvarn.server.api.schema import InvalidField
from kvarn.server.chat.reasoning import LEVEL, SWITCH, reads

ChatMessage = dict[str, Any]
LATEST = ":latest"
HUB_HOSTS = ("hf.co/", "huggingface.co/")
RANDOM_SEED = -1
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    *("repeat_penalty", "stop"),
)


def model_id(name: str, ids: Sequence[str]) -> str:
    """The id that is meant by a name: Ollama's tools write :latest behind names without a tag, or leave it out."""
    plain = name.removesuffix(LATEST)
    return next((one for one in (name, plain, name + LATEST) if one in ids), plain)


def source_name(name: str) -> str:
    """Where a model is pulled from: Ollama's tools write hf.co/org/repo:file for hf:org/repo:file."""
    name = name.removesuffix(LATEST)
    for host in HUB_HOSTS:
        if name.startswith(host):
            return f"hf:{name.removeprefix(host)}"
    return name


def chat_fields(body: OllamaChatBody | GenerateBody, messages: Sequence[ChatMessage]) -> dict[str, Any]:
    """The same request as a body of /v1/chat/completions."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "response_format": response_format(body.format),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        **sampling_fields(body.options),
    }
    if isinstance(body, OllamaChatBody) and body.tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return {name: value for name, value in fields.items() if value is not None}


def text_fields(body: GenerateBody) -> dict[str, Any]:
    """A prompt that is read as it is, as a body of /v1/completions."""
    top = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    fields: dict[str, Any] = {
        "model": body.model,
        "prompt": body.prompt,
        "suffix": body.suffix or None,
        "guided_json": body.format if isinstance(body.format, dict) else {"type": "object"} if body.format else None,
        "logprobs": top,
        "parse_special": True if body.raw else None,
        **sampling_fields(body.options),
    }
    return {name: value for name, value in fields.items() if value is not None}


def sampling_fields(options: OllamaOptions | None) -> dict[str, Any]:
    """Ollama's options by the names of /v1."""
    if options is None:
        return {}
    fields = {name: value for name in _SAME if (value := getattr(options, name)) is not None}
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    if options.seed is not None and options.seed != RANDOM_SEED:
        fields["seed"] = options.seed
    if options.repeat_last_n == 0:
        fields |= {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    elif options.repeat_last_n is not None and options.repeat_last_n > 0:
        fields["penalty_window"] = options.repeat_last_n
    return fields


def check_context(options: OllamaOptions | None, context: int) -> None:
    """A longer context than the model has here is refused: what lies beyond would be lost without a word."""
    wanted = 0 if options is None else options.num_ctx or 0
    if wanted > context:
        raise InvalidField(
            f"options.num_ctx is {wanted:,}, the model's context here is {context:,}; give at most that, "
            "or start the server with a larger --context",
            "options.num_ctx",
        )


def response_format(wanted: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """format: "json" is any object, a schema is that one."""
    if isinstance(wanted, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}
    return {"type": "json_object"} if wanted else None


def thinking_kwargs(think: Think | None, template: str, *, can_think: bool) -> tuple[dict[str, Any], str | None]:
    """The template arguments that switch thinking on, off, or to a level; and why it stays as it is if so."""
    if think is None or (think is False and not can_think):
        return {}, None
    if not can_think:
        raise InvalidField("think is given, and this model does not think apart from its answer; leave it out", "think")
    kwargs: dict[str, Any] = {SWITCH: think is not False} if reads(template, SWITCH) else {}
    if isinstance(think, str) and reads(template, LEVEL):
        kwargs[LEVEL] = think
    if think is False and not kwargs:
        return {}, "ignored: think, because this model always thinks"
    return kwargs, None


def prompt_messages(body: GenerateBody) -> list[ChatMessage]:
    """The conversation of /api/generate: a system prompt and what the user says."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The conversation in OpenAI's form, in which every call has an id and every result names its call."""
    calls = _Calls()
    return [_message(message, index, calls) for index, message in enumerate(messages)]


class _Calls:
    """The calls made so far, and which of them wait for their result."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, str]] = []  # id and name, oldest first

    def add(self, call_id: str, name: str) -> None:
        self._waiting.append((call_id, name))

    def answered(self, message: OllamaMessage, at: int) -> str:
        """The id of the call a result belongs to: by id, else the oldest one of this tool, else the oldest."""
        for call_id, name in self._waiting:
            by_id = message.tool_call_id is not None and message.tool_call_id == call_id
            if by_id or (message.tool_call_id is None and message.tool_name in (None, "", name)):
                self._waiting.remove((call_id, name))
                return call_id
        raise InvalidField(
            f"messages.{at} is the result of a call that no message before it has", f"messages.{at}.tool_name"
        )


def _message(message: OllamaMessage, index: int, calls: _Calls) -> ChatMessage:
    written: ChatMessage = {"role": message.role, "content": message.content}
    if message.tool_calls and message.role != "assistant":
        raise InvalidField(f"messages.{index} has calls and is of role {message.role}", f"messages.{index}.tool_calls")
    if message.role == "tool":
        return {**written, "tool_call_id": calls.answered(message, index)}
    if message.role == "assistant" and message.thinking:
        written["reasoning_content"] = message.thinking
    if message.tool_calls:
        written["tool_calls"] = []
        for number, call in enumerate(message.tool_calls):
            call_id = call.id or f"call_{index}_{number}"
            calls.add(call_id, call.function.name)
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            written["tool_calls"].append({"id": call_id, "type": "function", "function": function})
    return written
