"""A request as a router reads it: which prefix it has, which model it names, and what of one replica it needs.

    a model or adapter that not all offer   by its name, at those that do
    a stored response, a running request    by its id, which begins with the tag of who gave it
    files, batches, collections, pulls      by the API key: one replica keeps all of a key's

Knows bodies of all dialects as far as that; no replica.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from kvarn.routing.text_prefix import TextHasher, TextPrefix
from kvarn.server.http.request_id import tag_of

MODEL_PATH = "/v1/models/"
REQUEST_PATH, RESPONSE_PATH = "/v1/requests/", "/v1/responses/"
# Each has something that one replica keeps: requests of one key go to one of them, as long as it is there.
HOME_PATHS = (
    *("/v1/files", "/v1/batches", "/v1/collections", "/v1/models", "/v1/stored_models", "/api/pull"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"),
)
GENERATING = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"),
    *("/infill", "/v1/fill", "/v1/embeddings", "/api/embed", "/api/embeddings"),
)
# These leave nothing behind either, and have no prefix that would be kept.
READING = (
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/apply-template", "/api/show"),
)
# The fields that name what a replica offers from then on, or no more.
OFFERING = {"/v1/load_lora_adapter": ("lora_name",), "/v1/models/load": ("id", "model")}
REMOVING = {"/v1/unload_lora_adapter": ("lora_name",), "/v1/models/unload": ("model",)}
MAX_REFERENCES = 64  # to stored items: all of one conversation lie together


@dataclass(frozen=True, slots=True)
class RoutedBody:
    """A request as it was received."""

    scope: Scope
    body: bytes
    credential: bytes
    prefix: TextPrefix | None
    tags: tuple[str, ...]  # of replicas that store what is asked for
    name: str | None  # of a model or an adapter
    is_homed: bool  # by its key
    is_mixed: bool  # it has adapters by their numbers, which are those of one replica where not all have the same

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def may_repeat(self) -> bool:
        """Whether a replica that may have begun it leaves nothing behind."""
        return self.scope["method"] in ("GET", "HEAD") or self.path in GENERATING or self.path in READING

    @property
    def offers(self) -> str | None:
        """What a replica offers that answers this well."""
        return self.name if self.path in OFFERING else None

    @classmethod
    def read(cls, scope: Scope, data: bytes, hasher: TextHasher) -> RoutedBody:
        """What is wrong with it the replica tells."""
        path, headers = scope["path"], dict(scope["headers"])
        credential = headers.get(b"authorization", b"").strip() or b"x-api-key " + headers.get(b"x-api-key", b"")
        body = _json(data) if scope["method"] == "POST" and _is_read(path) else {}
        return cls(
            scope,
            data,
            credential,
            prefix=hasher.prefix(credential, body) if path in GENERATING else None,
            tags=_tags(path, body),
            name=_name(path, body),
            is_homed=path.startswith(HOME_PATHS) or bool(body.get("retrieval")),
            is_mixed=bool(body.get("lora")),
        )


def asked_tag(path: str) -> str | None:
    """The tag of the replica that has the request or the response a path asks about."""
    prefix = next((one for one in (REQUEST_PATH, RESPONSE_PATH) if path.startswith(one)), None)
    return None if prefix is None else tag_of(path.removeprefix(prefix))


def _is_read(path: str) -> bool:
    return path in GENERATING or path in READING or path in OFFERING or path in REMOVING


def _tags(path: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    if (asked := asked_tag(path)) is not None:
        return (asked,)
    return tuple(tag for id in _continued(path, body) if (tag := tag_of(id)) is not None)


def _continued(path: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Ids of responses, or of their items, that a body continues."""
    if path == RESPONSE_PATH.rstrip("/"):
        if isinstance(previous := body.get("previous_response_id"), str):
            yield previous
        items = body.get("input")
        for item in items[:MAX_REFERENCES] if isinstance(items, list) else ():
            if isinstance(item, dict) and item.get("type") == "item_reference" and isinstance(item.get("id"), str):
                yield item["id"]


def _name(path: str, body: Mapping[str, Any]) -> str | None:
    fields = OFFERING.get(path) or REMOVING.get(path) or ("model",)
    name = next((body[field] for field in fields if isinstance(body.get(field), str)), None)
    if name is None and path.startswith(MODEL_PATH):
        return path.removeprefix(MODEL_PATH)
    return name


def _json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
