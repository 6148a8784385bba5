"""Pages of OpenAI's lists: limit, order, after."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kvarn.server.api.schema import InvalidField

_LIMIT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
DEFAULT_PAGE = 20


class Listed(Protocol):
    """What has an id and can be told to a client."""

    @property
    def id(self) -> str: ...

    def told(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Listed)


def parameters(max_page: int, default: int) -> list[dict[str, Any]]:
    """Of a list, in OpenAPI; read by hand, so that a bad one is refused like any other field."""
    limit = {"type": "integer", "minimum": 1, "maximum": max_page}
    return [
        _parameter("limit", limit, f"at most so many; else {default}"),
        _parameter("order", {"enum": ["asc", "desc"]}, "the latest first is `desc`, which is the default"),
        _parameter("after", {"type": "string"}, "those that come after the one with this id"),
    ]


def page_of(found: Sequence[T], query: Mapping[str, str], max_page: int, default: int) -> dict[str, Any]:
    """The part of a list, oldest first, that a query asks for."""
    limit, order = query.get("limit", str(default)), query.get("order", "desc")
    if not _LIMIT.fullmatch(limit) or int(limit) > max_page:
        raise InvalidField(f"limit is no number from 1 to {max_page}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidField('order is neither "asc" nor "desc"', "order")
    shown = list(found) if order == "asc" else list(found)[::-1]
    begin = 0
    if (after := query.get("after")) is not None:
        ids = [one.id for one in shown]
        if after not in ids:
            raise InvalidField("after is not the id of one that is listed", "after")
        begin = ids.index(after) + 1
    page = [one.told() for one in shown[begin : begin + int(limit)]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = begin + int(limit) < len(shown)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}


def _parameter(name: str, schema: dict[str, Any], words: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": words}
