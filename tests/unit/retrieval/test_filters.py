"""Conditions on metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.errors import InvalidParameter
from kvarn.retrieval.filters import parse_filter
from kvarn.retrieval.storage.embedded_index import EmbeddedIndex
from kvarn.retrieval.types import Document
from tests.unit.retrieval.words import entry

ONE = np.ones(1, np.float32)
ROWS: list[dict[str, Any]] = [
    {"lang": "en", "year": 2019},
    {"lang": "sv", "year": 2021, "draft": True},
    {"lang": "en", "year": 2023.5, "draft": False},
    {"year": "2022"},
    {'it\'s "odd"'.replace('"', ""): "x", "a.b": 1},
]


def _nested(depth: int, years: list[int]) -> dict[str, Any]:
    """As many conditions, one inside of the other, as filters may have."""
    if not depth:
        return {"year": years}
    return {"$and" if depth % 2 else "$or": [{"lang": "en"} if depth % 2 else {"lang": "x"}, _nested(depth - 1, years)]}


FILTERS: list[tuple[dict[str, Any], set[int]]] = [
    ({"lang": "en"}, {0, 2}),
    ({"lang": ["en", "sv"]}, {0, 1, 2}),
    ({"lang": {"ne": "en"}}, {1, 3, 4}),
    ({"year": {"gte": 2020, "lt": 2024}}, {1, 2}),
    ({"year": {"gt": "2021"}}, {3}),
    ({"draft": True}, {1}),
    ({"draft": {"exists": True}}, {1, 2}),
    ({"lang": {"exists": False}}, {3, 4}),
    ({"$or": [{"lang": "sv"}, {"year": "2022"}]}, {1, 3}),
    ({"$and": [{"lang": "en"}, {"year": {"lt": 2020}}]}, {0}),
    ({"$not": {"lang": "en"}}, {1, 3, 4}),
    ({"id": "d2"}, {2}),
    ({"source": {"in": ["folder/0.txt", "folder/3.txt"]}}, {0, 3}),
    ({"a.b": 1}, {4}),
    ({"it's odd": "x"}, {4}),
    ({"lang": "' OR 1=1 --"}, set()),
    ({"year": {"in": [*range(1023), 2019]}}, {0}),
    ({"$and": [{"lang": "en"}, *({"year": {"ne": number}} for number in range(1023))]}, {0, 2}),
    ({"$or": [{"$and": [{"lang": "en"}] * 32}] * 32}, {0, 2}),
    (_nested(15, [*range(1008), 2019]), {0}),
]


@pytest.mark.parametrize(("given", "expected"), FILTERS)
def test_a_filter_lets_the_right_documents_pass(tmp_path: Path, given: dict[str, Any], expected: set[int]) -> None:
    index = EmbeddedIndex(tmp_path)
    index.put([entry(number, ONE, **row) for number, row in enumerate(ROWS)])
    found = [key for key, _ in index.dense(ONE, 10, parse_filter(given))]
    assert {int(index.store.chunks([key])[key].document[1:]) for key in found} == expected
    index.close()


@pytest.mark.parametrize(
    "given",
    [
        [],
        "lang = 'en'",
        {"$where": "1"},
        {"lang": {"like": "e%"}},
        {"lang": []},
        {"lang": None},
        {"year": {"lt": float("nan")}},
        {"year": 2**70},
        {'a"b': 1},
        {"a\nb": {"exists": False}},
        {"a\\b": 1},
        {"": 1},
        {"$or": {}},
        {"lang": {"in": "en"}},
    ],
)
def test_a_wrong_filter_is_refused(given: object) -> None:
    with pytest.raises(InvalidParameter):
        parse_filter(given)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", 'a"b', "a\\b", "$or", "", "a\u2028b"])
def test_a_name_that_no_filter_could_ask_for_is_not_stored(name: str) -> None:
    with pytest.raises(InvalidParameter, match="name"):
        Document("x", metadata={name: 1})


@pytest.mark.parametrize("name", ["a b", "å", "a.b", "a'b", "[0]", "#-1", "👍", "mål 1/2"])
def test_every_name_that_is_stored_can_be_asked_for(tmp_path: Path, name: str) -> None:
    metadata = Document("x", metadata={name: 1}).metadata
    index = EmbeddedIndex(tmp_path)
    index.put([entry(0, ONE, **metadata), entry(1, ONE)])
    assert len(index.dense(ONE, 10, parse_filter({name: 1}))) == 1
    assert len(index.dense(ONE, 10, parse_filter({name: {"exists": False}}))) == 1
    index.close()


def test_a_deep_filter_is_refused() -> None:
    given: dict[str, Any] = {"lang": "en"}
    for _ in range(50):
        given = {"$not": given}
    with pytest.raises(InvalidParameter, match="deep"):
        parse_filter(given)


def test_an_empty_filter_lets_everything_pass() -> None:
    assert parse_filter(None) is parse_filter({}) is None
