"""What /v1/responses calls the fields of a chat, in errors.

Its bodies become a ChatBody before they are checked in full, so what is wrong with them is found under the names of
/v1/chat/completions; an error speaks of the names that the client sent. The shape of the body is OpenAI's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarn.server.failures import Failure

PATH = "/v1/responses"
NAMES = {
    "response_format": "text.format",
    "response_format, guided_*": "text.format",
    "tool_choice.function.name": "tool_choice.name",
    "top_logprobs, max_tokens or n": "top_logprobs or max_output_tokens",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


def field_name(name: str) -> str:
    """The name in /v1/responses of a field of a ChatBody."""
    parts = name.split(".")
    if parts[0] == "messages":  # several items may be one message, so numbers are not the client's
        return "input"
    if parts[0] == "tools":
        return ".".join(part for part in parts if part != "function")
    return NAMES.get(name, name)


def error_fields(failure: Failure) -> dict[str, str]:
    """The error of a response that broke off, in the last event of its stream."""
    return {"code": failure.code or "server_error", "message": failure.message}
