"""The JSON of a reply: whatever the payload holds, it is written, and strict readers take it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest

from kvarn.server.http.json_body import write_json


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
