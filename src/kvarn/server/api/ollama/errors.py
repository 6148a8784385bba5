"""How Ollama's clients read an error, by which names they know the fields, and which paths they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarn.server.failures import Failure

PREFIX = "/api/"
SCHEMA = {  # in OpenAPI
    "type": "object",
    "title": "OllamaError",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
IN_OPTIONS = {  # fields of a ChatBody or CompletionBody that Ollama has among its options
    **{"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "penalty_window": "repeat_last_n"},
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
}
NAMES = {"response_format": "format", "guided_json": "format", "reasoning_effort": "think"}


def field_name(name: str) -> str:
    """The name in Ollama's bodies of a field of a ChatBody, as which they are checked."""
    first, _, rest = name.partition(".")
    own = f"options.{IN_OPTIONS[first]}" if first in IN_OPTIONS else NAMES.get(first, first)
    return f"{own}.{rest}" if rest and first not in NAMES else own


def is_path(path: str) -> bool:
    """Whether a path belongs to Ollama's API, and is answered in its shape."""
    return path.startswith(PREFIX)


def error_body(failure: Failure) -> dict[str, Any]:
    """The body of a response, and the last line of a stream: there is no place for the field but the message."""
    failure = failure.renamed(field_name)
    is_named = failure.param is None or failure.status >= 500 or failure.param.rpartition(".")[2] in failure.message
    return {"error": failure.message if is_named else f"{failure.param}: {failure.message}"}
