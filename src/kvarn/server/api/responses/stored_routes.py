"""GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items: responses that are stored for the key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvarn.server.api.responses.response_store import ResponseStore, WrittenResponse
from kvarn.server.api.responses.schema import DeletedResponse, InputItems, ResponsesAnswer
from kvarn.server.api.schema import InvalidField
from kvarn.server.dependencies import Called, Charged, Responses
from kvarn.server.failures import UnknownResponse
from kvarn.server.http.json_body import write_json
from kvarn.server.request_context import RequestContext

router = APIRouter(tags=["responses"])
PATH = "/v1/responses/{response_id}"
MAX_PAGE, DEFAULT_PAGE = 100, 20
_LIMIT = re.compile(r"[1-9][0-9]{0,2}", re.ASCII)


def _parameter(name: str, schema: dict[str, Any], words: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": words}


PAGE_PARAMETERS = [  # in OpenAPI; read by hand, so that a bad one is refused like any other field
    _parameter(
        "limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, f"at most so many; else {DEFAULT_PAGE}"
    ),
    _parameter("order", {"enum": ["asc", "desc"]}, "the latest first is `desc`, which is the default"),
    _parameter("after", {"type": "string"}, "those that come after the item with this id"),
]


@router.get(PATH, response_model=ResponsesAnswer)
async def get_response(request: Charged, responses: Responses, response_id: str) -> Response:
    """Read a stored response again."""
    return request.reply_written((await _find(request, responses, response_id)).response)


@router.delete(PATH, response_model=DeletedResponse)
async def delete_response(request: Called, responses: Responses, response_id: str) -> Response:
    """Forget a stored response."""
    owner = request.principal.fingerprint
    if not await request.in_thread(lambda: responses.delete(owner, response_id)):
        raise _unknown()
    return request.reply({"id": response_id, "object": "response", "deleted": True})


@router.get(f"{PATH}/input_items", response_model=InputItems, openapi_extra={"parameters": PAGE_PARAMETERS})
async def input_items(http: Request, request: Charged, responses: Responses, response_id: str) -> Response:
    """List what the model read for a stored response, earlier responses of the conversation included."""
    limit, is_ascending, after = _page(http.query_params)
    items = (await _find(request, responses, response_id)).items
    shown = items if is_ascending else items[::-1]
    ids = [id for id, _ in shown]
    if after is not None and after not in ids:
        raise InvalidField("after is not the id of an item of this response", "after")
    begin = 0 if after is None else ids.index(after) + 1
    page, listed = ids[begin : begin + limit], b",".join(item for _, item in shown[begin : begin + limit])
    first, last = (page[0], page[-1]) if page else (None, None)
    told = {"object": "list", "first_id": first, "last_id": last, "has_more": begin + limit < len(shown)}
    return request.reply_written(write_json(told)[:-1] + b',"data":[' + listed + b"]}")


def _page(query: Mapping[str, str]) -> tuple[int, bool, str | None]:
    """Limit, whether the oldest come first, and the id before the page."""
    limit, order = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc")
    if not _LIMIT.fullmatch(limit) or int(limit) > MAX_PAGE:
        raise InvalidField(f"limit is no number from 1 to {MAX_PAGE}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidField('order is neither "asc" nor "desc"', "order")
    return int(limit), order == "asc", query.get("after")


async def _find(request: RequestContext, responses: ResponseStore, response_id: str) -> WrittenResponse:
    owner = request.principal.fingerprint
    found = await request.in_thread(lambda: responses.get_written(owner, response_id))
    if found is None:
        raise _unknown()
    return found


def _unknown() -> UnknownResponse:
    return UnknownResponse("no response with this id is stored for this key; it may have been dropped for later ones")
