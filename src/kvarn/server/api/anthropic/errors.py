"""How Anthropic's clients read an error, which names they know the fields by, and which paths they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarn.server.failures import Failure

PATH = "/v1/messages"
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Anthropic's client withdraws its request for a thread, which it makes by default, only when it is told so.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
SCHEMA = {  # in OpenAPI
    "type": "object",
    "title": "AnthropicError",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


NAMES = {
    "response_format": "output_config.format",
    "response_format, guided_*": "output_config.format",
    "tool_choice.function.name": "tool_choice.name",
    "stop": "stop_sequences",
}


def field_name(name: str) -> str:
    """The name in /v1/messages of a field of a ChatBody, as which its bodies are checked."""
    parts = name.split(".")
    if parts[0] == "tools":
        own = [part for part in parts if part != "function"]
        return ".".join([*own[:2], *("input_schema" if part == "parameters" else part for part in own[2:])])
    return NAMES.get(name, name)


def is_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API, and is answered in its shape."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(failure: Failure) -> dict[str, Any]:
    """The body of a response, and the data of an event in a stream."""
    failure = failure.renamed(field_name)
    kind = TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    words = ""
    if failure.code == "context_length_exceeded":
        words = "prompt is too long: "  # agents look for these words: they shorten the conversation and try again
    elif failure.param and failure.status < 500 and failure.param.partition(".")[0] not in failure.message:
        words = f"{failure.param}: "  # there is no place for it but the message
    error: dict[str, Any] = {"type": kind, "message": words + failure.message}
    if (failure.code, failure.param) == ("unsupported_parameter", "thread"):
        error["details"] = NO_THREADS
    return {"type": "error", "error": error}
