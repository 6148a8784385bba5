"""Texts or lists of token ids, one or several, as a field of bodies takes them: `prompt` and `input`."""

from __future__ import annotations

from typing import Any

from kvarn.server.api.schema import MAX_TOKEN_IDS, BadItem

Texts = list[str] | list[list[int]]  # of one kind, none of them empty
INT31 = 2**31 - 1


def texts_schema(max_items: int) -> dict[str, Any]:
    """In OpenAPI."""
    text = {"type": "string", "minLength": 1}
    token_id = {"type": "integer", "minimum": 0, "maximum": INT31}
    ids = {"type": "array", "items": token_id, "minItems": 1, "maxItems": MAX_TOKEN_IDS}
    several = [{"type": "array", "items": one, "minItems": 1, "maxItems": max_items} for one in (text, ids)]
    return {"anyOf": [text, several[0], ids, several[1]]}


def listed_texts(given: Any, max_items: int) -> Texts:
    """A single one becomes a list; BadItem names the one that is wrong."""
    is_one = isinstance(given, str) or (isinstance(given, list) and bool(given) and _is_id(given[0]))
    items = [given] if is_one else given
    if not isinstance(items, list) or not items:
        raise ValueError("give a text, token ids, or a list of them that is not empty")
    if len(items) > max_items:
        raise ValueError(f"there are {len(items):,}, at most {max_items:,} are read; send several requests")
    _check_number([one for one in items if isinstance(one, list)])
    is_text = isinstance(items[0], str)
    for index, one in enumerate(items):
        _check(one, is_text, () if is_one else (index,))
    return items


def name_of_item(field: str, index: int, number: int) -> str:
    """What one of several texts is called; the only one may have been sent without a list."""
    return field if number == 1 else f"{field}.{index}"


def _check_number(lists: list[list[Any]]) -> None:
    number = sum(map(len, lists))
    if number > MAX_TOKEN_IDS:
        raise ValueError(f"there are {number:,} token ids, at most {MAX_TOKEN_IDS:,} are read; send several requests")


def _check(one: object, is_text: bool, at: tuple[int, ...]) -> None:
    if not isinstance(one, str if is_text else list):
        raise BadItem("give texts only, or lists of token ids only", *at)
    if not one:
        raise BadItem("give at least one character or token, or leave it out", *at)
    if isinstance(one, list) and not _are_ids(one):
        wrong = next(index for index, token_id in enumerate(one) if not _is_id_in_range(token_id))
        raise BadItem("token ids are whole numbers from 0 to the size of the vocabulary", *at, wrong)


def _are_ids(values: list[Any]) -> bool:
    """All of them at once: a prompt has thousands."""
    return list(map(type, values)).count(int) == len(values) and min(values) >= 0 and max(values) <= INT31


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id_in_range(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT31
