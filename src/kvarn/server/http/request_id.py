"""The id of a request, which every response carries in its headers: the server's tag, then what nobody can guess."""

from __future__ import annotations

import re
import secrets

from kvarn.server.api.anthropic.errors import is_path as is_anthropic

TAG_CHARS = 8
ID_CHARS = 32
# As it is, or as the id of an answer or of one of its items.
_ID = re.compile(rf"(?:[a-z]{{1,16}}[-_])?([0-9a-f]{{{TAG_CHARS}}})[0-9a-f]{{{ID_CHARS - TAG_CHARS}}}(?![0-9a-f])")


def new_request_id(tag: str = "") -> str:
    """An id that cannot be guessed: with it and the same key, the request can be looked at and cancelled."""
    return tag + secrets.token_hex((ID_CHARS - len(tag)) // 2)


def tag_of(id: str) -> str | None:
    """The tag of the server that gave this id to a request, or to what came of one."""
    found = _ID.match(id)
    return None if found is None else found[1]


def id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    """Anthropic's clients look for the id under another name than OpenAI's; /v1/models is for both."""
    is_for_anthropic = is_anthropic(path) or path == "/v1/models" or path.startswith("/v1/models/")
    names = (b"x-request-id", b"request-id") if is_for_anthropic else (b"x-request-id",)
    return [(name, request_id.encode()) for name in names]
