"""What /v1/responses and /v1/messages call the fields of a chat.

Their bodies become a ChatBody before they are checked in full, so what is wrong with them is found under the names of
/v1/chat/completions; an error speaks of the names that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Errors about the names in a body as it was sent: the client knows them, whether or not we do.
AS_SENT = frozenset({"unknown_field", "unsupported_parameter", "missing_field"})

Names = Sequence[tuple[str, str]]  # patterns and what stands for them; in error.param and in the words of messages


def _tools(schema: str) -> Names:
    return (
        (r"\btools\.(\d+)\.function\.parameters\b", rf"tools.\1.{schema}"),
        (r"\btools\.(\d+)\.function\.", r"tools.\1."),
        (r"\btool_choice\.function\.name\b", "tool_choice.name"),
    )


RESPONSES: Names = (
    *_tools("parameters"),
    (r"\bresponse_format\b(, guided_\*)?", "text.format"),
    (r"^messages\.\d+(?= )", "an item of input"),  # several items may be one message, so numbers are not the client's
    (r"^messages\b[\w.]*", "input"),
    (r"\btop_logprobs, max_tokens or n\b", "top_logprobs or max_output_tokens"),
    (r"\bmax_(completion_)?tokens\b", "max_output_tokens"),
    (r"^logprobs$", "top_logprobs"),
)
MESSAGES: Names = (
    *_tools("input_schema"),
    (r"\bresponse_format\b(, guided_\*)?", "output_config.format"),
    (r"^stop\b", "stop_sequences"),
)


def renamed(path: str, text: str) -> str:
    """The name of a field, or a message about it, as a client of a path knows it."""
    for pattern, instead in _names(path):
        text = re.sub(pattern, instead, text)
    return text


def _names(path: str) -> Names:
    if path == "/v1/responses":
        return RESPONSES
    return MESSAGES if path == "/v1/messages" or path.startswith("/v1/messages/") else ()
