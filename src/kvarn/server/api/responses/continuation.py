"""Conversations across requests: what a body's input means together with the responses that are stored for its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter

from kvarn.server.api.responses.response_store import StoredResponse
from kvarn.server.api.responses.schema import Item, ItemReference, ResponsesBody
from kvarn.server.api.schema import InvalidField
from kvarn.server.http.json_body import write_json

Find = Callable[[str], StoredResponse | None]  # by the id of a response
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
MAX_REFERENCES = 256  # to stored items, in one body
MAX_REFERRED_RESPONSES = 64
MAX_REFERRED_BYTES = 8 << 20
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def response_id(request_id: str) -> str:
    """The id of the response to a request."""
    return f"resp_{request_id}"


def item_id(kind: str, request_id: str, index: int) -> str:
    """The id of an item that came with a request; items of the response itself have numbers only."""
    return f"{PREFIXES[kind]}_{request_id}_in{index}"


def refers(body: ResponsesBody) -> bool:
    """Whether a body needs what is stored."""
    return body.previous_response_id is not None or (
        not isinstance(body.input, str) and any(isinstance(item, ItemReference) for item in body.input)
    )


def with_stored(body: ResponsesBody, find: Find) -> tuple[ResponsesBody, list[dict[str, Any]]]:
    """The body with the items that it refers to, and the conversation it continues."""
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        previous = find(body.previous_response_id)
        if previous is None:
            raise InvalidField(
                "previous_response_id is not the id of a response that is stored for this key; it may have been "
                "dropped for later ones; send the whole conversation as input",
                "previous_response_id",
                "previous_response_not_found",
            )
        earlier = previous.conversation
    if isinstance(body.input, str):
        return body, earlier
    referred = _Referred(find)
    given = [referred.item(item) if isinstance(item, ItemReference) else item for item in body.input]
    return body.model_copy(update={"input": given}), earlier


def read_items(stored: Sequence[dict[str, Any]]) -> list[Item]:
    """Items of stored responses, as those of a body."""
    return _ITEMS.validate_python(list(stored))


def written_items(body: ResponsesBody, request_id: str) -> list[dict[str, Any]]:
    """The input of a body as it is stored, each item with an id."""
    if isinstance(body.input, str):
        return [_message("user", body.input) | {"id": item_id("message", request_id, 0)}]
    return [
        _written(item.model_dump(exclude_none=True)) | {"id": item_id(item.type, request_id, index)}
        for index, item in enumerate(body.input)
    ]


def _written(item: dict[str, Any]) -> dict[str, Any]:
    is_text = item["type"] == "message" and isinstance(item["content"], str)
    return _message(item["role"], item["content"]) if is_text else item | {"status": "completed"}


def _message(role: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    return {"type": "message", "status": "completed", "role": role, "content": [part | {"text": text}]}


class _Referred:
    """The items that one body refers to; each response is read once, and all of it is bounded."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._items: dict[str, dict[str, dict[str, Any]]] = {}  # of each response, by their ids
        self._num_left = MAX_REFERENCES
        self._num_bytes_left = MAX_REFERRED_BYTES

    def item(self, reference: ItemReference) -> Item:
        """The item itself; the reference where there is none, which is refused with its place in the input."""
        _, _, rest = reference.id.partition("_")
        found = self._of_response(response_id(rest.partition("_")[0])).get(reference.id)
        if found is None:
            return reference
        self._num_left -= 1
        self._num_bytes_left -= len(write_json(found))
        if self._num_left < 0 or self._num_bytes_left < 0:
            raise InvalidField(
                f"input refers to more than {MAX_REFERENCES} items or {MAX_REFERRED_BYTES:,} bytes of them; use "
                "previous_response_id",
                "input",
            )
        return read_items([found])[0]

    def _of_response(self, id: str) -> dict[str, dict[str, Any]]:
        if id not in self._items:
            if len(self._items) >= MAX_REFERRED_RESPONSES:
                raise InvalidField(f"input refers to items of more than {MAX_REFERRED_RESPONSES} responses", "input")
            stored = self._find(id)
            self._items[id] = {item["id"]: item for item in (stored.conversation if stored else ()) if "id" in item}
        return self._items[id]
