"""The JSON of a reply: whatever the payload holds, it is written, and strict readers take it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest

from kvarn.server.failures import BadBody
from kvarn.server.http.json_body import parse_body, write_json


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("é 日本 \U0001f600", "é 日本 \U0001f600"),
        ("half \ud83d of a pair", "half \ud83d of a pair"),
        ('"\ude00\\', '"\ude00\\'),
        (float("inf"), None),
        ([1.5, float("nan"), {"a": -float("inf")}], [1.5, None, {"a": None}]),
        ((1, True, None), [1, True, None]),
    ],
)
def test_any_value_is_written_as_strict_json(value: Any, read: Any, in_pieces: bool) -> None:
    data = write_json({"value": value}, in_pieces=in_pieces)
    assert json.loads(data.decode("utf-8"), parse_constant=_refuse) == {"value": read}


def test_text_is_not_escaped_needlessly() -> None:
    assert write_json({"a": "é"}) == '{"a":"é"}'.encode()


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(constant)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (rb'{"a":{"b":["x","\u0000"]}}', "a.b.1", "a.b.1 contains the character NUL"),
        (rb'{"a":"\ud800"}', "a", r"a contains half of a surrogate pair (\ud800)"),
        (rb'{"\u0000":1}', None, "a name in the body contains the character NUL"),
        (b'{"' + b"k" * 9000 + rb'":["\u0000"]}', None, "contains the character NUL"),
    ],
    ids=["NUL", "surrogate", "name", "long name"],
)
def test_characters_that_are_not_taken_are_told_by_the_name_of_the_field(
    body: bytes, field: str | None, words: str
) -> None:
    with pytest.raises(BadBody) as refused:
        parse_body(body, 64)
    assert words in str(refused.value)
    assert len(refused.value.field or "") <= 160
    assert field is None or refused.value.field == field
