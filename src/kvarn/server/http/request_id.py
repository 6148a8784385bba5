"""The id of a request, which every response carries in its headers."""

from __future__ import annotations

import secrets

from kvarn.server.api.anthropic.errors import is_path as is_anthropic


def new_request_id() -> str:
    """An id that cannot be guessed: with it and the same key, the request can be looked at and cancelled."""
    return secrets.token_hex(16)


def id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    """Anthropic's clients look for the id under another name than OpenAI's; /v1/models is for both."""
    is_for_anthropic = is_anthropic(path) or path == "/v1/models" or path.startswith("/v1/models/")
    names = (b"x-request-id", b"request-id") if is_for_anthropic else (b"x-request-id",)
    return [(name, request_id.encode()) for name in names]
