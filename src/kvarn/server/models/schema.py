"""Answers of /v1/models: each entry has the fields of OpenAI's list and of Anthropic's; and how to ask for a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvarn.server.api.schema import Answer, InvalidField

MAX_PAGE = 1000
_LIMIT = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


class ModelCard(Answer):
    """One model of this server."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str
    owned_by: str = "kvarn"
    display_name: str
    kind: Literal["generate", "embed", "rerank"]
    max_model_len: int
    digest: str | None  # sha256 of the weights; null before the first load of a local file
    is_loaded: bool
    root: str  # the model itself
    parent: str | None  # of an adapter: the model that it changes
    is_diffusion: bool
    can_fill: bool  # /v1/fill, and suffix of /v1/completions, on a canvas
    sampling: dict[str, Any]  # defaults of this model, by the names of requests; of what is not here, Kvarn's


class ModelList(Answer):
    """The models of this server, loaded or not: all of them, or the page that was asked for."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of the list is wanted, as Anthropic's clients ask for it; without a limit it is all there is."""

    limit: int | None = None
    after_id: str | None = None
    before_id: str | None = None

    @staticmethod
    def of(query: Mapping[str, str]) -> Page:
        """The page a query string asks for, or InvalidField; other names in it have no meaning here."""
        limit, after_id, before_id = (query.get(name) for name in ("limit", "after_id", "before_id"))
        if limit is not None and (not _LIMIT.fullmatch(limit) or int(limit) > MAX_PAGE):
            raise InvalidField(f"limit is no number from 1 to {MAX_PAGE:,}", "limit")
        if after_id is not None and before_id is not None:
            raise InvalidField("after_id and before_id are both given; give one of them", "before_id")
        return Page(None if limit is None else int(limit), after_id, before_id)

    def cut(self, ids: list[str]) -> tuple[slice, bool]:
        """The part of the list, and whether there are more in the direction that is asked for."""
        begin, end = 0, len(ids)
        if self.after_id is not None:
            begin = _index_of(ids, "after_id", self.after_id) + 1
        if self.before_id is not None:
            end = _index_of(ids, "before_id", self.before_id)
        limit = len(ids) if self.limit is None else self.limit
        if self.before_id is not None:
            return slice(max(begin, end - limit), end), end - limit > begin
        return slice(begin, min(end, begin + limit)), begin + limit < end


def _index_of(ids: list[str], name: str, wanted: str) -> int:
    if wanted not in ids:
        raise InvalidField(f"{name} is not the id of a model here", name)
    return ids.index(wanted)


def _parameter(name: str, schema: dict[str, Any], words: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": words}


PAGE_PARAMETERS = [  # in OpenAPI; read by hand, so that a bad one is refused like any other field
    _parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "at most so many; without it all"),
    _parameter("after_id", {"type": "string"}, "those that come after this one"),
    _parameter("before_id", {"type": "string"}, "those that come right before this one"),
]
